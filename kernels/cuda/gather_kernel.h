// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_KERNELS_CUDA_GATHER_KERNEL_H_
#define KVTIER_KERNELS_CUDA_GATHER_KERNEL_H_

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/nvfp4_device.h"
#include "kernels/cuda/primitives.h"
#include "kernels/cuda/target.h"
#include "kernels/cuda/transfer_device.h"
#include "kernels/cuda/transfer_params.h"

// Gathering. A thread block takes one tile, a thread one 16-byte store of every blockDim.y-th row,
// of K and then of V: neighbouring lanes write neighbouring 16 bytes.

namespace kvtier::kernels::cuda::inline KVTIER_CUDA_FLAVOUR {

// The codes of kValues (4, 8 or 16) values, in natural order.
template <uint32_t kValues>
struct RawCodes {
  uint32_t words[kValues == 16 ? 2 : 1];
};

template <uint32_t kValues>
KVTIER_DEVICE RawCodes<kValues> LoadCodes(Global<std::byte> source) {
  if constexpr (kValues == 16) {
    const auto words = LoadConstant<Words2>(source.At<const Words2>(0));
    return {{words.x, words.y}};
  } else if constexpr (kValues == 8) {
    return {{LoadConstant<uint32_t>(source.At<const uint32_t>(0))}};
  } else {
    return {{LoadConstant<uint16_t>(source.At<const uint16_t>(0))}};
  }
}

template <typename Arch>
KVTIER_DEVICE void DequantizeValues(uint32_t codes, uint32_t scale_pair, float factor,
                                    float (&values)[8]) {
  uint32_t pairs[4];
  DequantizeWord<Arch>(codes, pairs);
  KVTIER_UNROLL
  for (uint32_t i = 0; i < 4; ++i) {
    const uint32_t scaled = MulHalf2(pairs[i], scale_pair);
    values[Codes<Arch>::FirstOf(i)] = MulRn(FirstHalf(scaled), factor);
    values[Codes<Arch>::SecondOf(i)] = MulRn(SecondHalf(scaled), factor);
  }
}

// Two words that hold the elements of 8 values; for FP32, four that hold 4; for FP8, 2 for 8.
template <typename Arch, ElementType kType>
KVTIER_DEVICE void PackValues(const float (&values)[8], float inverse_scale, uint32_t* words) {
  if constexpr (kType == ElementType::kFp32) {
    KVTIER_UNROLL
    for (uint32_t i = 0; i < 4; ++i) words[i] = BitsOf(values[i]);
  } else if constexpr (kType == ElementType::kFp8E4m3) {
    KVTIER_UNROLL
    for (uint32_t i = 0; i < 2; ++i) {
      const uint32_t low = PackFp8<Arch>(MulRn(values[4 * i], inverse_scale),
                                         MulRn(values[4 * i + 1], inverse_scale));
      const uint32_t high = PackFp8<Arch>(MulRn(values[4 * i + 2], inverse_scale),
                                          MulRn(values[4 * i + 3], inverse_scale));
      words[i] = low | high << 16;
    }
  } else {
    KVTIER_UNROLL
    for (uint32_t i = 0; i < 4; ++i) {
      words[i] = kType == ElementType::kBf16 ? PackBf162(values[2 * i], values[2 * i + 1])
                                             : PackHalf2(values[2 * i], values[2 * i + 1]);
    }
  }
}

// What one thread needs to know of K or of V.
struct GatherSide {
  Global<std::byte> rows;
  float factor = 0.0F;  // g, and what is missing in the dequantized pairs.
  float inverse_scale = 0.0F;
};

// Only FP8 rows have a scale; the reciprocal is a function call.
template <ElementType kType>
KVTIER_DEVICE float InverseScale(float scale) {
  return kType == ElementType::kFp8E4m3 ? ReciprocalRn(scale) : 1.0F;
}

template <typename Arch, ElementType kType>
KVTIER_DEVICE void GatherPiece(const GatherSide& side, const RowsParams& rows, const Slot& slot,
                               uint32_t store, Global<std::byte> codes, Global<std::byte> scale,
                               Global<uint32_t> counters) {
  constexpr uint32_t kValues = 16 / ElementBytes(kType);
  const RawCodes<kValues> raw = LoadCodes<kValues>(codes);
  uint32_t byte = LoadConstant<uint8_t>(scale.At<const uint8_t>(0));
  if (byte > 0x7E) {
    AddCounter(counters, 1);
    byte = 0;
  }
  const uint32_t scale_pair = ScalesToHalf2<Arch>(byte | byte << 8);
  uint32_t words[4];
  KVTIER_UNROLL
  for (uint32_t i = 0; i < (kValues == 16 ? 2 : 1); ++i) {
    float values[8];
    DequantizeValues<Arch>(raw.words[i], scale_pair, side.factor, values);
    PackValues<Arch, kType>(values, side.inverse_scale, words + 2 * i);
  }
  StoreGlobal<Words4>(RowAt(side.rows, rows, slot).template At<Words4>(16U * store),
                      Words4{words[0], words[1], words[2], words[3]});
}

template <typename Arch, ElementType kType>
KVTIER_DEVICE void GatherBody(const GatherParams& params) {
  constexpr uint32_t kStoresPerVector = ElementBytes(kType);
  constexpr uint32_t kCodeBytes = 8 / kStoresPerVector;
  constexpr float kCodeFactor = Arch::kConvertsE2m1 ? 1.0F : 0x1p14F;
  const TransferParams& transfer = params.transfer;
  const TileParams& tile = transfer.tile;
  const uint32_t entry_idx = BlockX();
  if (!HasEntry(transfer, entry_idx)) return;
  const TransferTile source = FindTile(transfer, entry_idx);
  const float g_k = LoadConstant<float>(transfer.g_k + source.scale_idx);
  const float g_v = LoadConstant<float>(transfer.g_v + source.scale_idx);
  const Global<uint32_t> counters =
      params.counters + static_cast<int64_t>(uint64_t{entry_idx} * params.counter_stride);
  const float k_scale = ScaleOf(transfer.k, source.scale_idx);
  const float v_scale = ScaleOf(transfer.v, source.scale_idx);
  if (!IsGlobalScale(g_k) || !IsGlobalScale(g_v) || !IsReciprocalScale(k_scale) ||
      !IsReciprocalScale(v_scale)) {
    if (ThreadX() == 0 && ThreadY() == 0) AddCounter(counters + 1, 1);
    return;
  }
  const auto side_of = [&](const RowsParams& rows, float g, float scale) {
    return GatherSide{RowsOf(rows, source), MulRn(g, kCodeFactor), InverseScale<kType>(scale)};
  };
  const GatherSide k = side_of(transfer.k, g_k, k_scale);
  const GatherSide v = side_of(transfer.v, g_v, v_scale);
  const uint32_t store = ThreadX();
  const uint32_t vector = store / kStoresPerVector;
  const uint32_t part = store % kStoresPerVector * kCodeBytes;
  for (uint32_t token = ThreadY(); token < tile.block_tokens; token += BlockSizeY()) {
    const Slot slot = FindSlot(transfer.pages, source.first_slot + token);
    GatherPiece<Arch, kType>(
        k, transfer.k, slot, store,
        source.tile.At<std::byte>(KCodeOffsetOf(tile, token, vector) + part),
        source.tile.At<std::byte>(tile.k_scale_offset + KScaleIndex(tile, token, vector)),
        counters);
    GatherPiece<Arch, kType>(
        v, transfer.v, slot, store,
        source.tile.At<std::byte>(VCodeOffsetOf(tile, token, vector) + part),
        source.tile.At<std::byte>(tile.v_scale_offset + VScaleIndex(tile, token, vector)),
        counters);
  }
}

}  // namespace kvtier::kernels::cuda::inline KVTIER_CUDA_FLAVOUR

#endif  // KVTIER_KERNELS_CUDA_GATHER_KERNEL_H_
