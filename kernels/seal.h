// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_KERNELS_SEAL_H_
#define KVTIER_KERNELS_SEAL_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/element.h"
#include "kernels/isa.h"
#include "kernels/nvfp4.h"
#include "kernels/status.h"
#include "kernels/tile_layout.h"

namespace kvtier::kernels {

struct SealOptions {
  float g_k = 1.0F;  // Global scales of this (layer, kv head), see nvfp4.h.
  float g_v = 1.0F;
  ScaleSearch search = ScaleSearch::kAmax6;
  Isa isa = BestIsa();

  // Per-channel transform of K, [head_dim] each or empty; part of the scale set. What is quantized
  // is bf16((k - k_mean) * (1 / k_smooth)) in FP32 steps; decode folds the inverse into the query.
  // k_smooth is above 0 with a finite reciprocal.
  std::span<const float> k_mean = {};
  std::span<const float> k_smooth = {};
};

// Vectors (16 values of one token) of K and V together. Sealing adds to the counts, so that one
// object can collect a whole block.
struct SealStats {
  uint64_t nonfinite_count =
      0;  // With a NaN or infinity: the block should be kept in BF16 instead.
  uint64_t saturated_count = 0;  // With scale byte 0x7E: the global scale is too small.
};

// Quantizes block_tokens rows of K and of V of one (layer, kv head) into a tile. Both are quantized
// per token along the head dimension: 16 adjacent dims of one token share a scale byte. FP32 rows,
// FP8 rows times their scale, and transformed K are rounded to BF16 first. Writes all of dst[0,
// TileBytes(shape)); a finished tile depends only on the values, the options and
// kTileFormatVersion, bit for bit, on every machine and instruction set. dst must be exactly
// TileBytes(shape) long, needs no alignment here (GPU readers want 16 bytes) and must not overlap
// the sources. `stats` is required. Thread-safe for disjoint dst and stats. Errors:
// kInvalidArgument for a bad shape, scale, view or size; nothing is written then.
Status SealTile(const TileShape& shape, const ConstRows& k, const ConstRows& v,
                const SealOptions& options, std::span<std::byte> dst, SealStats* stats);

}  // namespace kvtier::kernels

#endif  // KVTIER_KERNELS_SEAL_H_
