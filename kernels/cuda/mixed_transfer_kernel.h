// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_KERNELS_CUDA_MIXED_TRANSFER_KERNEL_H_
#define KVTIER_KERNELS_CUDA_MIXED_TRANSFER_KERNEL_H_

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/gather_kernel.h"
#include "kernels/cuda/primitives.h"
#include "kernels/cuda/seal_kernel.h"
#include "kernels/cuda/target.h"
#include "kernels/cuda/transfer_device.h"
#include "kernels/cuda/transfer_params.h"
#include "kernels/cuda/wide_values.h"

// Sealing and gathering layers of which a side or both are FP8 or BF16 (FORMAT.md, section 4). A
// thread block takes a tile, first its K side, then its V side; threads share the rows of a side as
// in the kernels for NVFP4, of whose parts this is made.

namespace kvtier::kernels::cuda::inline KVTIER_CUDA_FLAVOUR {

// K or V of one tile. `rows` are of the engine, addresses and strides of params.
struct MixedSide {
  RowsParams params;
  Global<std::byte> rows;
  Global<std::byte> tile;
  SideFormat format = SideFormat::kNvfp4;
  bool is_v = false;
  float g = 0.0F;      // Of the side in the tile.
  float scale = 0.0F;  // Of FP8 rows.
};

KVTIER_DEVICE MixedSide FindSide(const TransferParams& transfer, const TransferTile& tile,
                                 bool is_v) {
  MixedSide side;
  side.params = is_v ? transfer.v : transfer.k;
  side.rows = RowsOf(side.params, tile);
  side.tile = tile.tile;
  side.format = is_v ? transfer.tile.format.v : transfer.tile.format.k;
  side.is_v = is_v;
  side.g = SideScaleOf(is_v ? transfer.g_v : transfer.g_k, tile.scale_idx);
  side.scale = ScaleOf(side.params, tile.scale_idx);
  return side;
}

// Whether a tile can be sealed, or gathered if `stores`, with its scales.
KVTIER_DEVICE bool HasScales(const TransferParams& transfer, const TransferTile& tile,
                             bool stores) {
  const auto has = [&](const RowsParams& rows, Global<const float> g, SideFormat format) {
    const float scale = ScaleOf(rows, tile.scale_idx);
    return IsSideScale(format, SideScaleOf(g, tile.scale_idx)) &&
           (stores ? IsReciprocalScale(scale) : IsScale(scale));
  };
  return has(transfer.k, transfer.g_k, transfer.tile.format.k) &&
         has(transfer.v, transfer.g_v, transfer.tile.format.v);
}

KVTIER_DEVICE uint32_t SideOffset(const TileParams& tile, const MixedSide& side) {
  return side.is_v ? tile.v_data_offset : 0;
}
KVTIER_DEVICE uint32_t CodeOffsetOf(const TileParams& tile, const MixedSide& side, uint32_t token,
                                    uint32_t vector) {
  return side.is_v ? VCodeOffsetOf(tile, token, vector) : KCodeOffsetOf(tile, token, vector);
}
KVTIER_DEVICE uint32_t ScaleIndexOf(const TileParams& tile, const MixedSide& side, uint32_t token,
                                    uint32_t vector) {
  return side.is_v ? VScaleIndex(tile, token, vector) : KScaleIndex(tile, token, vector);
}
KVTIER_DEVICE uint32_t ScaleOffsetOf(const TileParams& tile, bool is_v) {
  return is_v ? tile.v_scale_offset : tile.k_scale_offset;
}

// A vector of NVFP4; its scale byte goes to `scales`, in the order of the tile.
template <typename Arch, ElementType kType>
KVTIER_DEVICE void SealNvfp4Vector(const SealParams& params, const MixedSide& side,
                                   const Transform& transform, Global<std::byte> row,
                                   uint32_t token, uint32_t vector, SharedAddress scales,
                                   Global<uint32_t> counters) {
  const TileParams& tile = params.transfer.tile;
  const auto raw = LoadVector<kType>(row, vector);
  const EncodedVector encoded =
      transform.mean.is_null()
          ? EncodePlain<Arch, kType>(raw, side.scale, side.g, params.four_over_six)
          : EncodeTransformed<Arch, kType>(raw, transform, side.scale, side.g,
                                           params.four_over_six);
  StoreGlobal<Words2>(side.tile.At<Words2>(CodeOffsetOf(tile, side, token, vector)), encoded.codes);
  StoreShared<uint8_t>(scales + ScaleIndexOf(tile, side, token, vector),
                       static_cast<uint8_t>(encoded.scale));
  CountVector(encoded, counters);
}

template <typename Arch, ElementType kType>
KVTIER_DEVICE void SealFp8Vector(const TileParams& tile, const MixedSide& side,
                                 const Transform& transform, Global<std::byte> row, uint32_t token,
                                 uint32_t vector, float inverse, Global<uint32_t> counters) {
  const Fp8Vector sealed =
      SealFp8<Arch, kType>(LoadVector<kType>(row, vector), transform, side.scale, inverse);
  const uint32_t offset = SideOffset(tile, side) + (token * tile.vector_count + vector) * 16U;
  StoreGlobal<Words4>(side.tile.At<Words4>(offset), sealed.bytes);
  if (sealed.is_nonfinite) AddCounter(counters, 1);
  if (sealed.is_saturated) AddCounter(counters + 1, 1);
}

// A row of BF16: neighbouring threads store neighbouring 16 bytes, so each takes half a vector,
// twice.
template <typename Arch, ElementType kType>
KVTIER_DEVICE void SealBf16Row(const TileParams& tile, const MixedSide& side,
                               const Transform& transform, Global<std::byte> row, uint32_t token) {
  const uint32_t half_count = 2 * tile.vector_count;
  KVTIER_NO_UNROLL
  for (uint32_t half = ThreadX(); half < half_count; half += tile.vector_count) {
    Transform channels = transform;
    if (!transform.mean.is_null()) {
      channels.mean = transform.mean + 8 * half;
      channels.inverse_smooth = transform.inverse_smooth + 8 * half;
    }
    uint32_t pairs[4];
    SealBf16<Arch>(LoadVector<kType, 8>(row, half), channels, side.scale, pairs);
    const uint32_t offset = SideOffset(tile, side) + (token * half_count + half) * 16U;
    StoreGlobal<Words4>(side.tile.At<Words4>(offset),
                        Words4{pairs[0], pairs[1], pairs[2], pairs[3]});
  }
}

// `transform` is of the (layer, kv head), or none.
template <typename Arch, ElementType kType>
KVTIER_DEVICE void SealSideRows(const SealParams& params, const MixedSide& side,
                                const Transform& transform, uint32_t first_slot,
                                SharedAddress scales, Global<uint32_t> counters) {
  const TileParams& tile = params.transfer.tile;
  const uint32_t vector = ThreadX();
  Transform channels = transform;
  if (!transform.mean.is_null()) {
    channels.mean = transform.mean + 16 * vector;
    channels.inverse_smooth = transform.inverse_smooth + 16 * vector;
  }
  const float inverse = ReciprocalRn(side.g);
  KVTIER_NO_UNROLL
  for (uint32_t token = ThreadY(); token < tile.block_tokens; token += BlockSizeY()) {
    const Slot slot = FindSlot(params.transfer.pages, first_slot + token);
    const Global<std::byte> row = RowAt(side.rows, side.params, slot);
    if (side.format == SideFormat::kNvfp4) {
      SealNvfp4Vector<Arch, kType>(params, side, channels, row, token, vector, scales, counters);
    } else if (side.format == SideFormat::kFp8) {
      SealFp8Vector<Arch, kType>(tile, side, channels, row, token, vector, inverse, counters);
    } else {
      SealBf16Row<Arch, kType>(tile, side, transform, row, token);
    }
  }
}

template <typename Arch, ElementType kType>
KVTIER_DEVICE void MixedSealBody(const SealParams& params) {
  const TransferParams& transfer = params.transfer;
  const TileParams& tile = transfer.tile;
  const uint32_t entry_idx = BlockX();
  if (!HasEntry(transfer, entry_idx)) return;
  const TransferTile target = FindTile(transfer, entry_idx);
  const Global<uint32_t> counters =
      params.counters + static_cast<int64_t>(uint64_t{entry_idx} * params.counter_stride);
  if (!HasScales(transfer, target, false)) {
    if (ThreadX() == 0 && ThreadY() == 0) AddCounter(counters + 2, 1);
    return;
  }
  const uint32_t scale_bytes = tile.block_tokens * tile.vector_count;
  KVTIER_NO_UNROLL
  for (uint32_t idx = 0; idx < 2; ++idx) {
    const bool is_v = idx == 1;
    Transform transform;
    if (!is_v && !params.k_mean.is_null()) {
      const uint64_t channel = uint64_t{target.scale_idx} * tile.vector_count * 16U;
      transform.mean = params.k_mean.At<const float>(channel * sizeof(float));
      transform.inverse_smooth = params.k_inverse_smooth.At<const float>(channel * sizeof(float));
    }
    SealSideRows<Arch, kType>(params, FindSide(transfer, target, is_v), transform,
                              target.first_slot, SharedBegin() + idx * scale_bytes, counters);
  }
  SyncThreads();
  const uint32_t thread = ThreadY() * tile.vector_count + ThreadX();
  const uint32_t step = 16U * BlockSizeY() * tile.vector_count;
  KVTIER_NO_UNROLL
  for (uint32_t idx = 0; idx < 2; ++idx) {
    const bool is_v = idx == 1;
    if ((is_v ? tile.format.v : tile.format.k) != SideFormat::kNvfp4) continue;
    const Global<std::byte> section = target.tile.At<std::byte>(ScaleOffsetOf(tile, is_v));
    for (uint32_t offset = 16U * thread; offset < scale_bytes; offset += step) {
      StoreGlobal<Words4>(section.template At<Words4>(offset),
                          LoadShared<Words4>(SharedBegin() + idx * scale_bytes + offset));
    }
  }
}

// 16 bytes of a row.
template <typename Arch, ElementType kType>
KVTIER_DEVICE void GatherSidePiece(const TileParams& tile, const MixedSide& side,
                                   const GatherSide& gathered, const Slot& slot, uint32_t token,
                                   Global<uint32_t> counters) {
  constexpr uint32_t kStoresPerVector = ElementBytes(kType);
  constexpr uint32_t kValues = 16 / kStoresPerVector;
  const uint32_t store = ThreadX();
  const uint32_t vector = store / kStoresPerVector;
  if (side.format == SideFormat::kNvfp4) {
    const uint32_t part = store % kStoresPerVector * kValues / 2;
    const uint32_t scale = ScaleOffsetOf(tile, side.is_v) + ScaleIndexOf(tile, side, token, vector);
    GatherPiece<Arch, kType>(
        gathered, side.params, slot, store,
        side.tile.At<std::byte>(CodeOffsetOf(tile, side, token, vector) + part),
        side.tile.At<std::byte>(scale), counters);
    return;
  }
  const bool is_fp8 = side.format == SideFormat::kFp8;
  const uint32_t value = token * tile.vector_count * 16U + store * kValues;
  const Global<std::byte> source =
      side.tile.At<std::byte>(SideOffset(tile, side) + value * (is_fp8 ? 1U : 2U));
  StoreGlobal<Words4>(RowAt(side.rows, side.params, slot).template At<Words4>(16U * store),
                      is_fp8
                          ? GatherFp8<Arch, kType>(source, side.g, gathered.inverse_scale, counters)
                          : GatherBf16<Arch, kType>(source, gathered.inverse_scale));
}

template <typename Arch, ElementType kType>
KVTIER_DEVICE void MixedGatherBody(const GatherParams& params) {
  constexpr float kCodeFactor = Arch::kConvertsE2m1 ? 1.0F : 0x1p14F;
  const TransferParams& transfer = params.transfer;
  const TileParams& tile = transfer.tile;
  const uint32_t entry_idx = BlockX();
  if (!HasEntry(transfer, entry_idx)) return;
  const TransferTile source = FindTile(transfer, entry_idx);
  const Global<uint32_t> counters =
      params.counters + static_cast<int64_t>(uint64_t{entry_idx} * params.counter_stride);
  if (!HasScales(transfer, source, true)) {
    if (ThreadX() == 0 && ThreadY() == 0) AddCounter(counters + 1, 1);
    return;
  }
  KVTIER_NO_UNROLL
  for (uint32_t idx = 0; idx < 2; ++idx) {
    const MixedSide side = FindSide(transfer, source, idx == 1);
    const GatherSide gathered{side.rows, MulRn(side.g, kCodeFactor),
                              InverseScale<kType>(side.scale)};
    KVTIER_NO_UNROLL
    for (uint32_t token = ThreadY(); token < tile.block_tokens; token += BlockSizeY()) {
      const Slot slot = FindSlot(transfer.pages, source.first_slot + token);
      GatherSidePiece<Arch, kType>(tile, side, gathered, slot, token, counters);
    }
  }
}

}  // namespace kvtier::kernels::cuda::inline KVTIER_CUDA_FLAVOUR

#endif  // KVTIER_KERNELS_CUDA_MIXED_TRANSFER_KERNEL_H_
