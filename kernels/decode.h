// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_KERNELS_DECODE_H_
#define KVTIER_KERNELS_DECODE_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/element.h"
#include "kernels/executor.h"
#include "kernels/isa.h"
#include "kernels/status.h"
#include "kernels/tile_layout.h"

namespace kvtier::kernels {

// The last, unsealed tokens of a context, [token][kv head][dim] with free strides. Token t, kv head
// h begins t * token_stride + h * head_stride elements after k (or v); its head_dim elements are
// contiguous. Memory beyond token_count tokens is never read.
struct DecodeTail {
  const void* k = nullptr;  // May be null when token_count is 0. Needs no alignment.
  const void* v = nullptr;
  uint32_t token_count = 0;   // Any count, also above block_tokens.
  uint64_t token_stride = 0;  // In elements, >= head_dim.
  uint64_t head_stride = 0;   // In elements, >= head_dim when there are two kv heads or more.
  ElementType type = ElementType::kBf16;  // kBf16 or kFp8E4m3.
  float k_scale = 1.0F;  // FP8 only: multiplies the stored values. Finite, above 0.
  float v_scale = 1.0F;
};

// One decode step of one sequence for one layer. Views are not owned and must outlive the call.
struct DecodeArgs {
  BlockShape block_shape;
  uint32_t layer_idx = 0;

  // [query_len][query_head_count][head_dim], dense, BF16 or FP32, all finite. query_head_count is a
  // multiple of kv_head_count; query head q reads kv head q / (query_head_count / kv_head_count):
  // MHA, GQA and MQA.
  ElementType query_type = ElementType::kFp32;
  const void* query = nullptr;
  uint32_t query_head_count = 0;

  // Starts of the blocks of the sequence, in order; entry i holds tokens [i * block_tokens,
  // (i + 1) * block_tokens) of it, all layers, BlockBytes(block_shape, layer_formats) bytes. Only
  // the first sealed_token_count / block_tokens entries are read. Sealed blocks are always full.
  std::span<const std::byte* const> block_table;
  uint64_t sealed_token_count = 0;  // A multiple of block_tokens; 0 is allowed.

  DecodeTail tail = {};  // Follows the sealed tokens.

  float softmax_scale = 0.0F;  // Multiplies q.k, usually 1 / sqrt(head_dim).
  std::span<const float> g_k;  // [kv_head_count], this layer's global scales.
  std::span<const float> g_v;  // [kv_head_count]

  std::span<float> out;  // [query_len][query_head_count][head_dim]
  std::span<float> lse;  // [query_len][query_head_count], natural log of sum exp(score)

  // Speculative decoding: the queries are those of the last query_len tokens of the context, in
  // order, and each sees the tokens up to its own. In [1, 8].
  uint32_t query_len = 1;

  // Positions, for a call over a part of a sequence. The first sealed token (or tail token, if
  // there is no sealed one) is token first_token of a context of context_token_count tokens; 0
  // means that the context ends with the tail.
  uint64_t first_token = 0;
  uint64_t context_token_count = 0;

  uint64_t window = 0;    // A query sees this many tokens, its own included; 0: all.
  float soft_cap = 0.0F;  // score = soft_cap * tanh(score / soft_cap); 0: none.
  // [query_head_count] or empty: attention sinks, scores of a token without value that every query
  // sees. They belong to one part of a split sequence only, as the tail does.
  std::span<const float> sinks = {};

  // The transform the blocks were sealed with (SealOptions), [kv_head_count][head_dim] each or
  // empty: score = q . (k' * k_smooth + k_mean) for a sealed k', folded into the query. The tail
  // holds plain K.
  std::span<const float> k_smooth = {};
  std::span<const float> k_mean = {};

  // [layer_count] or empty: the formats of the blocks' layers, if not all are NVFP4. g_k and g_v of
  // an FP8 side are its scales (finite, above 0), those of a BF16 side are not read.
  std::span<const LayerFormat> layer_formats = {};

  Isa isa = BestIsa();

  // With an executor the splits run on the caller's threads; `workspace` must then have
  // DecodeWorkspaceBytes and the alignment of float. Without one it is not used.
  const Executor* executor = nullptr;
  std::span<std::byte> workspace = {};
};

// Fused decode attention in one pass: dequantizes each tile where it lies, online softmax, FP32
// accumulation. The sequence is cut into splits that depend on sealed_token_count only, merged in
// order: results are the same bits with and without executor, whatever its threads and the rest of
// a batch. A query that sees no token gives out = 0 and lse = -inf (its sink's score, if it has
// one). Uses about 160 KiB of stack, allocates nothing, does not block. Thread-safe for disjoint
// outputs and workspaces.
//
// Error of out against exact attention over the same dequantized values: 2e-6 of the largest |V|
// for all but kAvx512, which holds softmax weights in 15 bits below the largest of 64 tokens: there
// at most 2^-9 of the largest |out| (measured: below 2^-10 from uniform to one-hot softmax), unless
// the token with the largest has no values: the 63 others then lose what is below 2^-15 of it.
// Instruction sets agree within these bounds, not bit for bit. A NaN in a tail token makes the
// results of the queries that see it not finite; so does an infinity in V, or in K if the score is
// +inf or NaN. The results of queries that do not see it are the same bits as without it.
// Arithmetic is that of FP32: a score beyond its range counts as an infinity, a sum of weight * |V|
// beyond it is one; kAvx512 takes denormal BF16 values for zeros. A split of a sequence is a call
// over a part of its block table; merge the results with MergeDecode (only one of the parts has the
// tail). Errors: kInvalidArgument when a requirement above is not met, before anything is read or
// written; kDataLoss if a tile that is read holds a byte that is never written (a scale byte above
// 0x7E, an FP8 NaN): out and lse are unspecified then.
Status Decode(const DecodeArgs& args);

// Bytes of workspace that Decode needs with an executor; 0 for arguments that Decode refuses.
uint64_t DecodeWorkspaceBytes(const DecodeArgs& args);

// The result of one split: out [query_head_count][head_dim], lse [query_head_count]. A row whose
// lse is -inf is empty; its out is not read.
struct DecodePartial {
  std::span<const float> out;
  std::span<const float> lse;
};

// Merges splits by their log-sum-exps into `out` and `lse`, in index order: the result depends on
// the partials and their order only. Zero partials, or only empty ones, give zeros and -inf. The
// outputs must not overlap the inputs. With a query_len above 1, query_head_count stands for
// query_len * query_head_count. Allocates nothing. Thread-safe for disjoint outputs.
// Errors: kInvalidArgument if a span does not have the exact size, or a count is zero.
Status MergeDecode(std::span<const DecodePartial> partials, uint32_t query_head_count,
                   uint32_t head_dim, std::span<float> out, std::span<float> lse);

}  // namespace kvtier::kernels

#endif  // KVTIER_KERNELS_DECODE_H_
