// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_KERNELS_CUDA_DECODE_H_
#define KVTIER_KERNELS_CUDA_DECODE_H_

#include <cstdint>

#include "kernels/cuda/blocks.h"
#include "kernels/element.h"
#include "kernels/status.h"
#include "kernels/tile_layout.h"

namespace kvtier::kernels::cuda {

// The unsealed tokens of the sequences of a batch: token t, kv head h of sequence s begins
// t * token_stride + h * head_stride elements after k[s] (or v[s]). Memory beyond a sequence's
// tokens is never read. Strides are multiples of 8 elements, addresses of 16 bytes.
struct DeviceTails {
  const uint32_t* token_counts = nullptr;  // [batch_size]; null: no tails.
  const void* const* k = nullptr;          // [batch_size]
  const void* const* v = nullptr;
  uint64_t token_stride = 0;  // Elements.
  uint64_t head_stride = 0;
  ElementType type = ElementType::kBf16;  // kBf16 or kFp8E4m3.
  float k_scale = 1.0F;                   // FP8 only: multiplies the stored values.
  float v_scale = 1.0F;
};

// One decode step of a batch for one layer: kernels::Decode (kernels/decode.h) for each sequence,
// with the same words. All pointers are to device memory; what the device reads there is not
// checked by the host: lengths, addresses and scales must be what the comments say.
struct DecodeBatchArgs {
  BlockShape block_shape;
  LayerFormat layer_format = {};  // Of this layer.
  uint64_t layer_offset = 0;      // LayerOffset of this layer: bytes from a block's start.

  uint32_t batch_size = 0;  // In [1, 1024].
  // [batch_size][table_stride] addresses of blocks, multiples of 16. Of sequence s the first
  // sealed_token_counts[s] / block_tokens are read. table_stride * block_tokens is the longest
  // sequence that the launch serves; counts above it are cut to it.
  const void* const* block_table = nullptr;
  uint32_t table_stride = 0;
  const uint32_t* sealed_token_counts = nullptr;  // [batch_size], multiples of block_tokens.
  DeviceTails tails = {};

  // [batch_size][query_len][query_head_count][head_dim], BF16 or FP32, dense, finite.
  ElementType query_type = ElementType::kBf16;
  const void* query = nullptr;
  uint32_t query_head_count = 0;
  uint32_t query_len = 1;  // In [1, 8]; a sequence has at least as many tokens.

  float softmax_scale = 0.0F;
  float soft_cap = 0.0F;
  uint32_t window = 0;
  const float* g_k = nullptr;  // [kv_head_count], not read for a BF16 side.
  const float* g_v = nullptr;
  const float* k_smooth = nullptr;  // [kv_head_count][head_dim] or null.
  const float* k_mean = nullptr;
  const float* sinks = nullptr;  // [query_head_count] or null.

  ElementType out_type = ElementType::kBf16;  // BF16 or FP32.
  void* out = nullptr;                        // As query.
  float* lse = nullptr;                       // [batch_size][query_len][query_head_count] or null.
  // Grows by one or more if a tile that was read holds a byte that sealing never writes (a scale
  // byte above 0x7E, an FP8 NaN): the results of this launch are then unspecified. May be null.
  uint32_t* damage_count = nullptr;

  // DecodeBatchWorkspaceBytes, a multiple of 256, zeroed once before its first use. A launch leaves
  // it ready for the next; launches that may overlap need one each.
  void* workspace = nullptr;
};

// What limits a launch: of the card that it is for.
struct DeviceLimits {
  uint32_t multiprocessor_count = 0;
  uint32_t shared_bytes_per_block = 0;  // With opt-in.
  bool copies_bulk = false;             // sm_90 and later.
};

// Fused attention over NVFP4 tiles in place and the tails, in one launch on `stream`. Head dims 64,
// 96, 128, 192 and 256, block_tokens 16 to 128, any number of query heads a kv head. Sides of FP8
// and BF16 are read too, more slowly. Allocates nothing, does not wait, reads nothing from the
// device on the host: a captured launch can be replayed with other lengths and tables.
// Deterministic: a sequence's bits depend on its own tokens, the shapes and the architecture only,
// not on the batch, table_stride or the card.
//
// Error of out against exact attention over the dequantized values: at most 2^-9 of the largest
// |out| unless values cancel: weights over tiles are FP16, each off by 2^-11 of itself, down to
// 2^-29 of the largest. Scores are FP32 sums, off by up to 2^-18 of that of softmax_scale * |query
// * K|, which must be a few hundreds at most. FP32 queries and those with k_smooth are, over tiles,
// sums of two FP16 numbers, which takes more multiplications. Scores below -10^30 count as hidden.
// A NaN in a tail token makes the results of the rows that see it NaN. Errors: kInvalidArgument
// for what the host can see, before anything is launched; kUnavailable if the device is not usable
// or the launch fails. Thread-safe for disjoint outputs and workspaces.
Status DecodeBatch(const DecodeBatchArgs& args, Stream stream);

// 0 for arguments that DecodeBatch refuses. Depends on shapes, batch_size, table_stride, query_len
// and query_head_count.
uint64_t DecodeBatchWorkspaceBytes(const DecodeBatchArgs& args);

}  // namespace kvtier::kernels::cuda

#endif  // KVTIER_KERNELS_CUDA_DECODE_H_
