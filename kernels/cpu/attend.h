// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_KERNELS_CPU_ATTEND_H_
#define KVTIER_KERNELS_CPU_ATTEND_H_

#include <cstddef>
#include <cstdint>

// Internal to kernels/: the work of decode that each instruction set implements, as plain data.
// No inline function may stand here or be called from a *_avx2.cc or *_avx512.cc: the linker keeps
// one copy of an inline function, and it could keep the one that an older processor cannot run.

namespace kvtier::kernels::cpu {

inline constexpr uint32_t kAttendRowsMax = 16;  // Query rows that share one pass over K and V.
inline constexpr uint32_t kMlaValueDims = 512;  // The latent.
inline constexpr uint32_t kMlaKeyDims = 576;    // The latent, then the rope.
inline constexpr uint32_t kAttendDimMax = kMlaKeyDims;

// Up to kAttendRowsMax query rows of one kv head, and where their result goes. For row r and token
// t of the part: score = soft_cap(scale * (query[r] . k[t]) + bias[r]), for t in
// [begin[r], end[r]); other tokens do not exist for the row.
struct AttendQuery {
  const float* query;     // [row_count][head_dim], finite.
  bool is_bf16;           // Every value of `query` is exact in BF16.
  uint32_t row_count;     // 1..kAttendRowsMax
  uint32_t head_dim;      // Of K. A multiple of 16, at most 256; kMlaKeyDims for MLA.
  uint32_t value_dim;     // head_dim; kMlaValueDims for MLA.
  float scale;            // Without the global scale of K.
  float soft_cap;         // 0: none.
  const float* bias;      // [row_count]
  const uint64_t* begin;  // [row_count], tokens relative to the part.
  const uint64_t* end;    // [row_count]
  float* out;  // [row_count][value_dim]: softmax-weighted mean of V; 0 if there is no token.
  float* lse;  // [row_count]: natural log of the sum of exp(score); -inf if no token.
};

enum class AttendFormat : uint8_t { kNvfp4, kFp8, kBf16 };

// Where K or V is inside a tile, and what multiplies its values (g for NVFP4, the scale for FP8).
struct TileSide {
  AttendFormat format;
  uint64_t data_offset;
  uint64_t scale_offset;  // NVFP4 only.
  float multiplier;
};

// Sealed tokens of one (layer, kv head): tile i lies at blocks[i] + tile_offset.
struct AttendTiles {
  const std::byte* const* blocks;
  uint64_t block_count;
  uint64_t tile_offset;
  uint32_t block_tokens;
  TileSide k;
  TileSide v;
};

// Unsealed tokens: row t begins t * stride bytes after data.
struct AttendSide {
  AttendFormat format;  // kBf16 or kFp8.
  const std::byte* data;
  uint64_t stride_bytes;
  float multiplier;
};
struct AttendRows {
  uint64_t token_count;
  AttendSide k;
  AttendSide v;
};

// Sealed tokens of a layer of an MLA cache: tile i lies at blocks[i] + tile_offset. K of a token is
// its latent, then its rope; V is its latent.
struct AttendMlaTiles {
  const std::byte* const* blocks;
  uint64_t block_count;
  uint64_t tile_offset;
  uint32_t block_tokens;
  float g;
};
struct AttendMlaRows {
  uint64_t token_count;
  AttendSide latent;
  AttendSide rope;
};

// False: a scale byte that is never written, or an FP8 NaN in a tile, was met; the result is
// unspecified. Thread-safe for disjoint results; uses about 200 KiB of stack; does not allocate or
// block.
using AttendTilesFunction = bool (*)(const AttendQuery&, const AttendTiles&);
using AttendRowsFunction = void (*)(const AttendQuery&, const AttendRows&);
using AttendMlaTilesFunction = bool (*)(const AttendQuery&, const AttendMlaTiles&);
using AttendMlaRowsFunction = void (*)(const AttendQuery&, const AttendMlaRows&);

}  // namespace kvtier::kernels::cpu

#endif  // KVTIER_KERNELS_CPU_ATTEND_H_
