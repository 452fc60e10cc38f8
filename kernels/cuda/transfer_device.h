// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_KERNELS_CUDA_TRANSFER_DEVICE_H_
#define KVTIER_KERNELS_CUDA_TRANSFER_DEVICE_H_

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/nvfp4_device.h"
#include "kernels/cuda/primitives.h"
#include "kernels/cuda/target.h"
#include "kernels/cuda/transfer_params.h"

// Addresses in tiles and rows, for the seal and gather kernels. The maps of kernels/tile_layout.h
// in 32-bit arithmetic.

namespace kvtier::kernels::cuda::inline KVTIER_CUDA_FLAVOUR {

KVTIER_DEVICE uint32_t KCodeOffsetOf(const TileParams& tile, uint32_t token, uint32_t vector) {
  const uint32_t panel = vector / 8;
  const uint32_t left = tile.vector_count - panel * 8;
  const uint32_t row_bytes = (left < 8 ? left : 8) * 8;
  return panel * tile.block_tokens * 64 + token * row_bytes + vector % 8 * 8;
}

KVTIER_DEVICE uint32_t VCodeOffsetOf(const TileParams& tile, uint32_t token, uint32_t vector) {
  return tile.v_data_offset + token / 16 * (tile.vector_count * 128) + vector * 128 +
         token % 16 / 4 * 32 + 16 * ((token / 2 ^ vector) & 1U) + 8 * (token & 1U);
}

// Bytes from the start of K's, or V's, scales.
KVTIER_DEVICE uint32_t KScaleIndex(const TileParams& tile, uint32_t token, uint32_t vector) {
  return token * tile.vector_count + vector;
}
KVTIER_DEVICE uint32_t VScaleIndex(const TileParams& tile, uint32_t token, uint32_t vector) {
  return token / 4 * 4 * tile.vector_count + vector * 4 + token % 4;
}

// Where a thread block works: an entry, and the (layer, kv head) of grid z and y.
struct TransferTile {
  Global<std::byte> tile;
  uint32_t first_slot = 0;
  uint32_t layer = 0;
  uint32_t head = 0;
  uint32_t scale_idx = 0;  // Of (layer, head).
};

KVTIER_DEVICE bool HasEntry(const TransferParams& params, uint32_t entry_idx) {
  return params.entry_count.is_null() || entry_idx < LoadConstant<uint32_t>(params.entry_count);
}

KVTIER_DEVICE TransferTile FindTile(const TransferParams& params, uint32_t entry_idx) {
  const auto entry =
      LoadConstant<Words4>(params.entries.At<const Words4>(entry_idx * uint64_t{16}));
  TransferTile result;
  result.layer = BlockZ();
  result.head = BlockY();
  result.scale_idx = result.layer * params.kv_head_count + result.head;
  result.first_slot = entry.z;
  result.tile = Global<std::byte>{}.At<std::byte>(
      (uint64_t{entry.y} << 32 | entry.x) + params.first_layer_offset +
      uint64_t{result.scale_idx} * params.tile.tile_bytes);
  return result;
}

KVTIER_DEVICE float ScaleOf(const RowsParams& rows, uint32_t scale_idx) {
  return rows.scales.is_null() ? 1.0F : LoadConstant<float>(rows.scales + scale_idx);
}

// What a side of a tile is multiplied with, and whether its format allows it.
KVTIER_DEVICE float SideScaleOf(Global<const float> g, uint32_t scale_idx) {
  return g.is_null() ? 1.0F : LoadConstant<float>(g + scale_idx);
}
KVTIER_DEVICE bool IsSideScale(SideFormat format, float g) {
  return format == SideFormat::kNvfp4 ? IsGlobalScale(g) : IsReciprocalScale(g);
}

// The rows of (layer, head); add the offset of a slot.
KVTIER_DEVICE Global<std::byte> RowsOf(const RowsParams& rows, const TransferTile& tile) {
  Global<std::byte> base = rows.data + static_cast<int64_t>(tile.layer * rows.layer_stride);
  if (!rows.layer_data.is_null()) {
    base = Global<std::byte>{}.At<std::byte>(
        LoadConstant<uint64_t>(rows.layer_data.At<const uint64_t>(tile.layer * uint64_t{8})));
  }
  return base.At<std::byte>(tile.head * rows.head_stride);
}

// A slot's page and place in it, for K and V.
struct Slot {
  uint32_t page = 0;
  uint32_t token = 0;
};

KVTIER_DEVICE Slot FindSlot(const PagesParams& pages, uint32_t slot) {
  if (pages.page_tokens == 0) return {.page = 0, .token = slot};
  const auto table_idx = static_cast<uint32_t>(uint64_t{slot} * pages.multiplier >> pages.shift);
  return {.page = LoadConstant<uint32_t>(pages.page_table + table_idx),
          .token = slot - table_idx * pages.page_tokens};
}

KVTIER_DEVICE Global<std::byte> RowAt(Global<std::byte> rows, const RowsParams& params,
                                      const Slot& slot) {
  return rows.At<std::byte>(slot.page * params.page_stride + slot.token * params.token_stride);
}

}  // namespace kvtier::kernels::cuda::inline KVTIER_CUDA_FLAVOUR

#endif  // KVTIER_KERNELS_CUDA_TRANSFER_DEVICE_H_
