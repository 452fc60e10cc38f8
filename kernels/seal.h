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
  // Of this (layer, kv head): global scales (see nvfp4.h) for NVFP4 sides; what multiplies the
  // stored values for FP8 sides, above 0 and with a finite reciprocal. BF16 sides have none.
  float g_k = 1.0F;
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
// object can collect a whole block. BF16 sides count nothing: they hold every value.
struct SealStats {
  // With a NaN or infinity: the block should be kept in BF16 instead.
  uint64_t nonfinite_count = 0;
  // NVFP4: with scale byte 0x7E; FP8: with a magnitude above 464 times the scale, which 448 clips.
  // The scale is too small.
  uint64_t saturated_count = 0;
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

// The same for a layer of mixed formats (FORMAT.md, section 4): dst is TileBytes(shape, format)
// long. Wide sides take the values that NVFP4 would quantize, transformed K among them:
//   FP8:  e4m3(value * (1 / g)), rounded to nearest even and saturating at 448; NaN becomes 448, so
//         that NaN bytes are never written. An FP8 source under the same scale keeps its bytes, up
//         to NaN.
//   BF16: the value, rounded to nearest even if it is FP16; NaN and infinities are kept.
Status SealTile(const TileShape& shape, const LayerFormat& format, const ConstRows& k,
                const ConstRows& v, const SealOptions& options, std::span<std::byte> dst,
                SealStats* stats);

}  // namespace kvtier::kernels

#endif  // KVTIER_KERNELS_SEAL_H_
