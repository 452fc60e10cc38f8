// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_KERNELS_CUDA_MLA_DECODE_H_
#define KVTIER_KERNELS_CUDA_MLA_DECODE_H_

#include <cstdint>

#include "kernels/cuda/blocks.h"
#include "kernels/element.h"
#include "kernels/mla_layout.h"
#include "kernels/status.h"

namespace kvtier::kernels::cuda {

// The unsealed tokens of the sequences of a batch: the latent of token t of sequence s begins
// t * latent_stride elements after latent[s], its rope t * rope_stride elements after rope[s]. Of a
// cache with rows [latent | rope] of 576, both strides are 576. Memory beyond a sequence's tokens
// is never read. Strides are multiples of 16 bytes, addresses too.
struct DeviceMlaTails {
  const uint32_t* token_counts = nullptr;  // [batch_size]; null: no tails.
  const void* const* latent = nullptr;     // [batch_size]
  const void* const* rope = nullptr;
  uint64_t latent_stride = 0;                    // Elements, >= 512.
  uint64_t rope_stride = 0;                      // Elements, >= 64.
  ElementType latent_type = ElementType::kBf16;  // kBf16 or kFp8E4m3.
  ElementType rope_type = ElementType::kBf16;
  float latent_scale = 1.0F;  // FP8 only: multiplies the stored values.
  float rope_scale = 1.0F;
};

// One decode step of a batch for one layer: kernels::DecodeMla (kernels/mla.h) for each sequence.
// All pointers are to device memory; fields without a comment are those of DecodeBatchArgs
// (decode.h).
struct DecodeMlaBatchArgs {
  MlaBlockShape block_shape;
  uint32_t layer_idx = 0;

  uint32_t batch_size = 0;
  const void* const* block_table = nullptr;
  uint32_t table_stride = 0;
  const uint32_t* sealed_token_counts = nullptr;
  DeviceMlaTails tails = {};

  // [batch_size][query_len][query_head_count][576]: 512 dims that meet the latent, 64 the rope.
  ElementType query_type = ElementType::kBf16;
  const void* query = nullptr;
  uint32_t query_head_count = 0;  // Passes have 8 rows of query_len * query_head_count.
  uint32_t query_len = 1;

  float softmax_scale = 0.0F;
  float soft_cap = 0.0F;
  uint32_t window = 0;
  const float* g = nullptr;  // One value: this layer's global scale.
  const float* sinks = nullptr;

  ElementType out_type = ElementType::kBf16;
  void* out = nullptr;  // [batch_size][query_len][query_head_count][512]
  float* lse = nullptr;
  uint32_t* damage_count = nullptr;
  void* workspace = nullptr;  // DecodeMlaBatchWorkspaceBytes, as DecodeBatchArgs::workspace.
};

// The contract of DecodeBatch holds: one launch on `stream` that allocates nothing, reads lengths
// on the device and gives bits that depend on the sequence, the shapes and the architecture only.
// Generic: FP32 on every architecture, each pass of 8 query rows dequantizes all tokens again.
// Error of out against exact attention over the dequantized values: 1e-5 of the largest |out|, plus
// the rounding to out_type.
Status DecodeMlaBatch(const DecodeMlaBatchArgs& args, Stream stream);

// 0 for arguments that DecodeMlaBatch refuses. Depends on the shape, batch_size, table_stride,
// query_len and query_head_count.
uint64_t DecodeMlaBatchWorkspaceBytes(const DecodeMlaBatchArgs& args);

}  // namespace kvtier::kernels::cuda

#endif  // KVTIER_KERNELS_CUDA_MLA_DECODE_H_
