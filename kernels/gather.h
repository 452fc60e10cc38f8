// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_KERNELS_GATHER_H_
#define KVTIER_KERNELS_GATHER_H_

#include <cstddef>
#include <span>

#include "kernels/element.h"
#include "kernels/status.h"
#include "kernels/tile_layout.h"

namespace kvtier::kernels {

// Checks what can be wrong in a tile's bytes: every scale byte must be one that sealing can write
// (0x00..0x7E). All code bytes are valid. Poisoned or uninitialized memory (0x7F, 0xFF) is caught
// here instead of becoming NaN.
// Errors: kInvalidArgument for a bad shape or size, kDataLoss for a scale byte above 0x7E.
// Thread-safe.
Status ValidateTile(const TileShape& shape, std::span<const std::byte> tile);

// Dequantizes one tile into block_tokens rows of K and of V, BF16 or FP32. Exact: both types hold
// every value of the format. Global scales are those the tile was sealed with.
// `tile` is exactly TileBytes(shape) long, any alignment; the rows must not overlap it. Elements
// between rows (token_stride > head_dim) are untouched. Thread-safe for disjoint destinations.
// Errors: kInvalidArgument for a bad shape, scale, view (FP16 could not hold every value) or size;
// kDataLoss as ValidateTile. Nothing is written on an error.
Status GatherTile(const TileShape& shape, std::span<const std::byte> tile, float g_k, float g_v,
                  const MutableRows& k, const MutableRows& v);

}  // namespace kvtier::kernels

#endif  // KVTIER_KERNELS_GATHER_H_
