// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_KERNELS_GATHER_H_
#define KVTIER_KERNELS_GATHER_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/element.h"
#include "kernels/isa.h"
#include "kernels/status.h"
#include "kernels/tile_layout.h"

namespace kvtier::kernels {

// Checks what can be wrong in a tile's bytes: every scale byte must be one that sealing can write
// (0x00..0x7E). All code bytes are valid. Poisoned or uninitialized memory (0x7F, 0xFF) is caught
// here instead of becoming NaN.
// Errors: kInvalidArgument for a bad shape or size, kDataLoss for a scale byte above 0x7E.
// Thread-safe.
Status ValidateTile(const TileShape& shape, std::span<const std::byte> tile);

// The same for a layer of mixed formats. NVFP4 sides as above; FP8 sides hold no NaN (0x7F, 0xFF:
// kDataLoss); BF16 sides can hold anything, poison too.
Status ValidateTile(const TileShape& shape, const LayerFormat& format,
                    std::span<const std::byte> tile);

struct GatherOptions {
  float g_k = 1.0F;  // What the tile was sealed with, see SealOptions.
  float g_v = 1.0F;
  // For large targets that are not read soon: stores bypass the caches where rows are aligned.
  bool streaming = false;
  Isa isa = BestIsa();

  // To undo the transform that K was sealed with (SealOptions), [head_dim] each or empty: what is
  // stored is k' * k_smooth + k_mean in FP32 steps, rounded to the target. Empty, K comes out as it
  // was sealed.
  std::span<const float> k_mean = {};
  std::span<const float> k_smooth = {};
};

// Dequantizes one tile into block_tokens rows of K and of V, of any element type, dense or in
// pages. BF16 and FP32 are exact. FP16 rounds to nearest even, beyond its range to infinity. FP8 is
// e4m3(value * (1 / rows.scale)), rounded to nearest even and saturating at 448. `tile` is exactly
// TileBytes(shape) long, any alignment; the rows must not overlap it. Elements between rows
// (token_stride > head_dim) are untouched. Every instruction set gives the same bits. Thread-safe
// for disjoint destinations. Errors: kInvalidArgument for a bad shape, scale, view or size;
// kDataLoss as ValidateTile. Nothing is written on an error.
Status GatherTile(const TileShape& shape, std::span<const std::byte> tile,
                  const GatherOptions& options, const MutableRows& k, const MutableRows& v);

// The same for a layer of mixed formats; `tile` is exactly TileBytes(shape, format) long. The value
// of an FP8 side is the stored number times g in FP32, which BF16 rounds; FP8 rows under the same
// scale get its bytes. NaN of a BF16 side stays NaN in every type.
Status GatherTile(const TileShape& shape, const LayerFormat& format,
                  std::span<const std::byte> tile, const GatherOptions& options,
                  const MutableRows& k, const MutableRows& v);

// The exact form: as the first with these global scales, for BF16 or FP32 rows only.
Status GatherTile(const TileShape& shape, std::span<const std::byte> tile, float g_k, float g_v,
                  const MutableRows& k, const MutableRows& v);

}  // namespace kvtier::kernels

#endif  // KVTIER_KERNELS_GATHER_H_
