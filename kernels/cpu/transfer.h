// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_KERNELS_CPU_TRANSFER_H_
#define KVTIER_KERNELS_CPU_TRANSFER_H_

#include <cstddef>
#include <cstdint>

// Internal to kernels/: sealing and gathering one side (K, V or latents) of a tile, as plain data.
// The rule of attend.h holds: no inline function here.

namespace kvtier::kernels::cpu {

enum class RowType : uint8_t { kBf16, kFp16, kFp32, kFp8 };

// K, V and the latents of MLA differ in the order of their 8-byte runs and scale bytes.
enum class SideOrder : uint8_t { kK, kV, kLatent };

struct SealSide {
  const std::byte* const* rows;       // [block_tokens], each head_dim elements.
  bool is_first;                      // Nobody has requested the first rows yet.
  const std::byte* const* next_rows;  // [16], what is sealed next, or null: for prefetching.
  RowType type;
  float row_scale;              // FP8: multiplies the stored values.
  const float* mean;            // [head_dim] or null: x = bf16((x - mean) * inverse_smooth).
  const float* inverse_smooth;  // [head_dim], null if and only if mean is.
  uint32_t block_tokens;
  uint32_t head_dim;  // Of latents: 512.
  float g;
  bool four_over_six;
  SideOrder order;
  std::byte* codes;
  std::byte* scales;
};

struct SealCounts {
  uint64_t nonfinite_count;
  uint64_t saturated_count;
};

struct GatherSide {
  const std::byte* codes;
  const std::byte* scales;  // All valid.
  SideOrder order;
  uint32_t block_tokens;
  uint32_t head_dim;
  float g;
  std::byte* const* rows;  // [block_tokens], each head_dim elements.
  RowType type;
  float inverse_row_scale;  // FP8: the stored byte is e4m3(value * inverse_row_scale).
  bool streaming;           // Bypass the caches if the rows' alignment allows it.
};

// Numbers without scale bytes: wide sides of mixed tiles, ropes, workspaces. In FP32 steps:
//   x = source [* source_scale], transformed, [rounded to BF16], [* inverse_target_scale]
// and stored, rounded to nearest even; beyond the range to infinity, or to 448 in FP8.
struct ConvertRows {
  const std::byte* const* sources;  // [row_count], each dim_count elements.
  RowType source_type;
  float source_scale;  // FP8 only.
  std::byte* const* targets;
  RowType target_type;
  float inverse_target_scale;  // FP8 only.
  uint32_t row_count;
  uint32_t dim_count;  // A multiple of 16, at most 512.
  // [dim_count] each or null, both or none: (x - mean) * factor, or x * factor + mean if `inverse`.
  const float* mean;
  const float* factor;
  bool inverse;
  // Rounds to BF16 in between, but for plain FP16; in an FP8 target, NaN becomes 448.
  bool seals;
};

// Counts vectors of 16 if it seals in FP8: with a NaN or an infinity; clipped (above 464).
using ConvertRowsFunction = SealCounts (*)(const ConvertRows&);
using SealSideFunction = SealCounts (*)(const SealSide&);
using GatherSideFunction = void (*)(const GatherSide&);

}  // namespace kvtier::kernels::cpu

#endif  // KVTIER_KERNELS_CPU_TRANSFER_H_
