// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_KERNELS_DECODE_H_
#define KVTIER_KERNELS_DECODE_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/element.h"
#include "kernels/status.h"
#include "kernels/tile_layout.h"

namespace kvtier::kernels {

// The last, unsealed tokens of a context, BF16 bit patterns [token][kv head][dim] with free
// strides. Token t, kv head h begins t * token_stride + h * head_stride elements after k (or v);
// its head_dim elements are contiguous. Memory beyond token_count tokens is never read.
struct DecodeTail {
  const uint16_t* k = nullptr;  // May be null when token_count is 0.
  const uint16_t* v = nullptr;
  uint32_t token_count = 0;   // Any count, also above block_tokens.
  uint64_t token_stride = 0;  // In elements, >= head_dim.
  uint64_t head_stride = 0;   // In elements, >= head_dim when there are two kv heads or more.
};

// One decode step of one sequence for one layer. Views are not owned and must outlive the call.
struct DecodeArgs {
  BlockShape block_shape;
  uint32_t layer_idx = 0;

  // [query_head_count][head_dim], dense, BF16 or FP32, all finite. query_head_count is a multiple
  // of kv_head_count; query head q reads kv head q / (query_head_count / kv_head_count): MHA, GQA
  // and MQA.
  ElementType query_type = ElementType::kFp32;
  const void* query = nullptr;
  uint32_t query_head_count = 0;

  // Starts of the blocks of the sequence, in order; entry i holds tokens [i * block_tokens,
  // (i + 1) * block_tokens) of it, all layers, BlockBytes(block_shape) bytes. Only the first
  // sealed_token_count / block_tokens entries are read. Sealed blocks are always full.
  std::span<const std::byte* const> block_table;
  uint64_t sealed_token_count = 0;  // A multiple of block_tokens; 0 is allowed.

  DecodeTail tail;  // Follows the sealed tokens.

  float softmax_scale = 0.0F;  // Multiplies q.k, usually 1 / sqrt(head_dim).
  std::span<const float> g_k;  // [kv_head_count], this layer's global scales.
  std::span<const float> g_v;  // [kv_head_count]

  std::span<float> out;  // [query_head_count][head_dim]
  std::span<float> lse;  // [query_head_count], natural log of sum exp(softmax_scale * q.k)
};

// Fused decode attention in one pass: dequantizes each tile where it lies, online softmax, FP32
// accumulation. No sequence at all (no sealed and no tail token) gives out = 0 and lse = -inf.
// Uses about 32 KiB of stack, allocates nothing, does not block. Thread-safe for disjoint outputs.
// A tail value that is not finite makes its heads' results not finite. A split of a sequence is a
// call over a part of its block table; merge the results with MergeDecode (only one of the parts
// has the tail). Errors: kInvalidArgument when a requirement above is not met, before anything is
// read or written; kDataLoss if a tile holds a scale byte above 0x7E: out and lse are unspecified
// then.
Status Decode(const DecodeArgs& args);

// The result of one split: out [query_head_count][head_dim], lse [query_head_count]. A row whose
// lse is -inf is empty; its out is not read.
struct DecodePartial {
  std::span<const float> out;
  std::span<const float> lse;
};

// Merges splits by their log-sum-exps into `out` and `lse`, in index order: the result depends on
// the partials and their order only. Zero partials, or only empty ones, give zeros and -inf. The
// outputs must not overlap the inputs. Allocates nothing. Thread-safe for disjoint outputs.
// Errors: kInvalidArgument if a span does not have the exact size, or a count is zero.
Status MergeDecode(std::span<const DecodePartial> partials, uint32_t query_head_count,
                   uint32_t head_dim, std::span<float> out, std::span<float> lse);

}  // namespace kvtier::kernels

#endif  // KVTIER_KERNELS_DECODE_H_
