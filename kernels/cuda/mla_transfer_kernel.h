// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_KERNELS_CUDA_MLA_TRANSFER_KERNEL_H_
#define KVTIER_KERNELS_CUDA_MLA_TRANSFER_KERNEL_H_

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/gather_kernel.h"
#include "kernels/cuda/primitives.h"
#include "kernels/cuda/seal_kernel.h"
#include "kernels/cuda/target.h"
#include "kernels/cuda/transfer_device.h"
#include "kernels/cuda/transfer_params.h"
#include "kernels/mla_layout.h"

// Sealing and gathering latents and ropes, with the parts of the kernels for K and V. A thread
// block takes a tile, a thread a vector (sealing) or 16 bytes of a row (gathering) of every
// blockDim.y-th token; the first threads of a token take its rope too.

namespace kvtier::kernels::cuda::inline KVTIER_CUDA_FLAVOUR {

// BF16 pairs whose NaNs become quiet and stay what they are otherwise, as the CPU's conversion.
KVTIER_DEVICE uint32_t QuietBf16(uint32_t pair) {
  const uint32_t low = (pair & 0x7FFFU) > 0x7F80U ? 0x40U : 0U;
  const uint32_t high = (pair & 0x7FFF0000U) > 0x7F800000U ? 0x400000U : 0U;
  return pair | low | high;
}

// FP32 values to a BF16 pair; the upper half of a NaN stays, quiet.
KVTIER_DEVICE uint32_t RoundToBf16(float first, float second) {
  const uint32_t rounded = PackBf162(first, second);
  const uint32_t cut = PermuteBytes(BitsOf(first), BitsOf(second), 0x7632) | 0x00400040U;
  const bool first_is_nan = (BitsOf(first) & 0x7FFFFFFFU) > 0x7F800000U;
  const bool second_is_nan = (BitsOf(second) & 0x7FFFFFFFU) > 0x7F800000U;
  const uint32_t low = (first_is_nan ? cut : rounded) & 0xFFFFU;
  const uint32_t high = (second_is_nan ? cut : rounded) & 0xFFFF0000U;
  return low | high;
}

// Dims [16 * piece, 16 * piece + 16) of a token's rope, from a row to the tile.
template <typename Arch, ElementType kType>
KVTIER_DEVICE void SealRope(Global<std::byte> row, uint32_t piece, float scale,
                            Global<std::byte> target) {
  const auto raw = LoadVector<kType>(row, piece);
  uint32_t pairs[8];
  KVTIER_UNROLL
  for (uint32_t i = 0; i < 8; ++i) {
    if constexpr (kType == ElementType::kBf16) {
      pairs[i] = QuietBf16(WordOf(raw.words[i / 4], i % 4));
    } else {
      float values[2];
      UnpackPair<Arch, kType>(raw, i, scale, values);
      pairs[i] = RoundToBf16(values[0], values[1]);
    }
  }
  StoreGlobal<Words4>(target.At<Words4>(0), Words4{pairs[0], pairs[1], pairs[2], pairs[3]});
  StoreGlobal<Words4>(target.At<Words4>(16), Words4{pairs[4], pairs[5], pairs[6], pairs[7]});
}

template <typename Arch, ElementType kType>
KVTIER_DEVICE void MlaSealBody(const SealParams& params) {
  const TransferParams& transfer = params.transfer;
  const MlaShape shape{transfer.tile.block_tokens};
  const uint32_t entry_idx = BlockX();
  if (!HasEntry(transfer, entry_idx)) return;
  const TransferTile target = FindTile(transfer, entry_idx);
  const Global<uint32_t> counters =
      params.counters + static_cast<int64_t>(uint64_t{entry_idx} * params.counter_stride);
  const float g = LoadConstant<float>(transfer.g_k + target.scale_idx);
  const uint32_t vector = ThreadX();
  if (!IsGlobalScale(g)) {
    if (vector == 0 && ThreadY() == 0) AddCounter(counters + 2, 1);
    return;
  }
  const Global<std::byte> latents = RowsOf(transfer.k, target);
  const Global<std::byte> ropes = RowsOf(transfer.v, target);
  const float latent_scale = ScaleOf(transfer.k, target.scale_idx);
  const float rope_scale = ScaleOf(transfer.v, target.scale_idx);
  const SharedAddress scales = SharedBegin();
  KVTIER_NO_UNROLL
  for (uint32_t token = ThreadY(); token < shape.block_tokens; token += BlockSizeY()) {
    const Slot slot = FindSlot(transfer.pages, target.first_slot + token);
    const auto raw = LoadVector<kType>(RowAt(latents, transfer.k, slot), vector);
    const EncodedVector encoded =
        EncodePlain<Arch, kType>(raw, latent_scale, g, params.four_over_six);
    StoreGlobal<Words2>(target.tile.At<Words2>(MlaCodeOffset(shape, token, vector)), encoded.codes);
    const auto scale_idx =
        static_cast<uint32_t>(MlaScaleByteOffset(shape, token, vector) - MlaScaleOffset(shape));
    StoreShared<uint8_t>(scales + scale_idx, static_cast<uint8_t>(encoded.scale));
    CountVector(encoded, counters);
    if (vector < kMlaRopeDim / 16) {
      SealRope<Arch, kType>(
          RowAt(ropes, transfer.v, slot), vector, rope_scale,
          target.tile.At<std::byte>(MlaRopeElementOffset(shape, token, 16 * vector)));
    }
  }
  SyncThreads();
  const uint32_t thread = ThreadY() * BlockSizeX() + ThreadX();
  const uint32_t step = 16U * BlockSizeX() * BlockSizeY();
  for (uint32_t offset = 16U * thread; offset < MlaScaleBytes(shape); offset += step) {
    StoreGlobal<Words4>(target.tile.At<Words4>(MlaScaleOffset(shape) + offset),
                        LoadShared<Words4>(scales + offset));
  }
}

// 16 bytes of a token's rope, from BF16 in the tile to a row.
template <typename Arch, ElementType kType>
KVTIER_DEVICE void GatherRope(Global<std::byte> source, float inverse_scale,
                              Global<std::byte> target) {
  constexpr uint32_t kPairs = 8 / ElementBytes(kType);
  uint32_t pairs[kPairs];
  KVTIER_UNROLL
  for (uint32_t i = 0; i < kPairs; i += 2) {
    const auto words = LoadConstant<Words2>(source.At<const Words2>(4 * i));
    pairs[i] = words.x;
    pairs[i + 1] = words.y;
  }
  uint32_t words[4];
  KVTIER_UNROLL
  for (uint32_t part = 0; part < (kPairs == 8 ? 2 : 1); ++part) {
    if constexpr (kType == ElementType::kBf16) {
      KVTIER_UNROLL
      for (uint32_t i = 0; i < 4; ++i) words[i] = QuietBf16(pairs[i]);
    } else {
      float values[8] = {};
      KVTIER_UNROLL
      for (uint32_t i = 0; i < (kPairs < 4 ? kPairs : 4); ++i) {
        values[2 * i] = FirstBf16(pairs[4 * part + i]);
        values[2 * i + 1] = SecondBf16(pairs[4 * part + i]);
      }
      PackValues<Arch, kType>(values, inverse_scale, words + 2 * part);
    }
  }
  StoreGlobal<Words4>(target.At<Words4>(0), Words4{words[0], words[1], words[2], words[3]});
}

template <typename Arch, ElementType kType>
KVTIER_DEVICE void MlaGatherBody(const GatherParams& params) {
  constexpr uint32_t kStoresPerVector = ElementBytes(kType);
  constexpr uint32_t kStoreValues = 16 / ElementBytes(kType);
  constexpr float kCodeFactor = Arch::kConvertsE2m1 ? 1.0F : 0x1p14F;
  const TransferParams& transfer = params.transfer;
  const MlaShape shape{transfer.tile.block_tokens};
  const uint32_t entry_idx = BlockX();
  if (!HasEntry(transfer, entry_idx)) return;
  const TransferTile source = FindTile(transfer, entry_idx);
  const float g = LoadConstant<float>(transfer.g_k + source.scale_idx);
  const Global<uint32_t> counters =
      params.counters + static_cast<int64_t>(uint64_t{entry_idx} * params.counter_stride);
  const uint32_t store = ThreadX();
  if (!IsGlobalScale(g)) {
    if (store == 0 && ThreadY() == 0) AddCounter(counters + 1, 1);
    return;
  }
  const auto inverse_scale = [&](const RowsParams& rows) {
    if constexpr (kType != ElementType::kFp8E4m3) return 1.0F;
    return ReciprocalRn(ScaleOf(rows, source.scale_idx));
  };
  const GatherSide latent{RowsOf(transfer.k, source), MulRn(g, kCodeFactor),
                          inverse_scale(transfer.k)};
  const Global<std::byte> ropes = RowsOf(transfer.v, source);
  const float inverse_rope_scale = inverse_scale(transfer.v);
  const uint32_t vector = store / kStoresPerVector;
  const uint32_t part = store % kStoresPerVector * kStoreValues / 2;
  for (uint32_t token = ThreadY(); token < shape.block_tokens; token += BlockSizeY()) {
    const Slot slot = FindSlot(transfer.pages, source.first_slot + token);
    GatherPiece<Arch, kType>(latent, transfer.k, slot, store,
                             source.tile.At<std::byte>(MlaCodeOffset(shape, token, vector) + part),
                             source.tile.At<std::byte>(MlaScaleByteOffset(shape, token, vector)),
                             counters);
    if (store < kMlaRopeDim / kStoreValues) {
      GatherRope<Arch, kType>(
          source.tile.At<std::byte>(MlaRopeElementOffset(shape, token, kStoreValues * store)),
          inverse_rope_scale, RowAt(ropes, transfer.v, slot).At<std::byte>(16U * store));
    }
  }
}

}  // namespace kvtier::kernels::cuda::inline KVTIER_CUDA_FLAVOUR

#endif  // KVTIER_KERNELS_CUDA_MLA_TRANSFER_KERNEL_H_
