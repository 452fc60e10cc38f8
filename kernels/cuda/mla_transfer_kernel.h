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
#include "kernels/cuda/wide_values.h"
#include "kernels/mla_layout.h"

// Sealing and gathering latents and ropes, with the parts of the kernels for K and V. A thread
// block takes a tile, a thread a vector (sealing) or 16 bytes of a row (gathering) of every
// blockDim.y-th token; the first threads of a token take its rope too.

namespace kvtier::kernels::cuda::inline KVTIER_CUDA_FLAVOUR {

// Dims [16 * piece, 16 * piece + 16) of a token's rope, from a row to the tile.
template <typename Arch, ElementType kType>
KVTIER_DEVICE void SealRope(Global<std::byte> row, uint32_t piece, float scale,
                            Global<std::byte> target) {
  const auto raw = LoadVector<kType>(row, piece);
  uint32_t pairs[8];
  SealBf16<Arch>(raw, Transform{}, scale, pairs);
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
  const float latent_scale = ScaleOf(transfer.k, target.scale_idx);
  const float rope_scale = ScaleOf(transfer.v, target.scale_idx);
  if (!IsGlobalScale(g) || !IsScale(latent_scale) || !IsScale(rope_scale)) {
    if (vector == 0 && ThreadY() == 0) AddCounter(counters + 2, 1);
    return;
  }
  const Global<std::byte> latents = RowsOf(transfer.k, target);
  const Global<std::byte> ropes = RowsOf(transfer.v, target);
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
  const float latent_scale = ScaleOf(transfer.k, source.scale_idx);
  const float rope_scale = ScaleOf(transfer.v, source.scale_idx);
  if (!IsGlobalScale(g) || !IsReciprocalScale(latent_scale) || !IsReciprocalScale(rope_scale)) {
    if (store == 0 && ThreadY() == 0) AddCounter(counters + 1, 1);
    return;
  }
  const GatherSide latent{RowsOf(transfer.k, source), MulRn(g, kCodeFactor),
                          InverseScale<kType>(latent_scale)};
  const Global<std::byte> ropes = RowsOf(transfer.v, source);
  const float inverse_rope_scale = InverseScale<kType>(rope_scale);
  const uint32_t vector = store / kStoresPerVector;
  const uint32_t part = store % kStoresPerVector * kStoreValues / 2;
  for (uint32_t token = ThreadY(); token < shape.block_tokens; token += BlockSizeY()) {
    const Slot slot = FindSlot(transfer.pages, source.first_slot + token);
    GatherPiece<Arch, kType>(latent, transfer.k, slot, store,
                             source.tile.At<std::byte>(MlaCodeOffset(shape, token, vector) + part),
                             source.tile.At<std::byte>(MlaScaleByteOffset(shape, token, vector)),
                             counters);
    if (store < kMlaRopeDim / kStoreValues) {
      const uint64_t rope = MlaRopeElementOffset(shape, token, kStoreValues * store);
      StoreGlobal<Words4>(
          RowAt(ropes, transfer.v, slot).template At<Words4>(16U * store),
          GatherBf16<Arch, kType>(source.tile.At<std::byte>(rope), inverse_rope_scale));
    }
  }
}

}  // namespace kvtier::kernels::cuda::inline KVTIER_CUDA_FLAVOUR

#endif  // KVTIER_KERNELS_CUDA_MLA_TRANSFER_KERNEL_H_
