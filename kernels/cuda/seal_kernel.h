// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_KERNELS_CUDA_SEAL_KERNEL_H_
#define KVTIER_KERNELS_CUDA_SEAL_KERNEL_H_

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/encode.h"
#include "kernels/cuda/nvfp4_device.h"
#include "kernels/cuda/primitives.h"
#include "kernels/cuda/target.h"
#include "kernels/cuda/transfer_device.h"
#include "kernels/cuda/transfer_params.h"

// Sealing. A thread block takes one tile, a thread one vector (x) of every blockDim.y-th row (from
// y), of K and of V. Codes are stored as 8 bytes a vector, which fill whole sectors; scale bytes
// meet in shared memory and leave 16 at a time.

namespace kvtier::kernels::cuda::inline KVTIER_CUDA_FLAVOUR {

// The values of a vector (16) or of half a vector (8) as loaded.
template <ElementType kType, uint32_t kValues = 16>
struct RawVector {
  static constexpr uint32_t kBytes = kValues * ElementBytes(kType);
  static constexpr uint32_t kLoads = (kBytes + 15) / 16;
  Words4 words[kLoads];
};

// Values [kValues * idx, kValues * idx + kValues) of a row.
template <ElementType kType, uint32_t kValues = 16>
KVTIER_DEVICE RawVector<kType, kValues> LoadVector(Global<std::byte> row, uint32_t idx) {
  using Raw = RawVector<kType, kValues>;
  Raw result;
  if constexpr (Raw::kBytes == 8) {
    const auto words = LoadConstant<Words2>(row.At<const Words2>(idx * Raw::kBytes));
    result.words[0] = {words.x, words.y, 0, 0};
  } else {
    KVTIER_UNROLL
    for (uint32_t i = 0; i < Raw::kLoads; ++i) {
      const uint64_t offset = idx * Raw::kBytes + 16U * i;
      result.words[i] = LoadConstant<Words4>(row.At<const Words4>(offset));
    }
  }
  return result;
}

KVTIER_DEVICE uint32_t WordOf(const Words4& words, uint32_t idx) {
  return idx == 0 ? words.x : idx == 1 ? words.y : idx == 2 ? words.z : words.w;
}

// Values 2 * pair and 2 * pair + 1 in FP32; FP8 times `scale`.
template <typename Arch, ElementType kType, uint32_t kValues>
KVTIER_DEVICE void UnpackPair(const RawVector<kType, kValues>& raw, uint32_t pair, float scale,
                              float (&values)[2]) {
  if constexpr (kType == ElementType::kFp32) {
    values[0] = FloatOf(WordOf(raw.words[pair / 2], pair % 2 * 2));
    values[1] = FloatOf(WordOf(raw.words[pair / 2], pair % 2 * 2 + 1));
  } else if constexpr (kType == ElementType::kFp8E4m3) {
    const uint32_t bytes = WordOf(raw.words[0], pair / 2) >> (pair % 2 * 16) & 0xFFFFU;
    const uint32_t halves = UnpackFp8<Arch>(bytes);
    values[0] = MulRn(FirstHalf(halves), scale);
    values[1] = MulRn(SecondHalf(halves), scale);
  } else {
    const uint32_t word = WordOf(raw.words[pair / 4], pair % 4);
    constexpr bool kIsBf16 = kType == ElementType::kBf16;
    values[0] = FirstValue<kIsBf16>(word);
    values[1] = SecondValue<kIsBf16>(word);
  }
}

// K's transform of the 16 channels of one vector.
struct Transform {
  Global<const float> mean;
  Global<const float> inverse_smooth;
};

// Of channels 4 * idx to 4 * idx + 3.
KVTIER_DEVICE void TransformFour(const Transform& transform, uint32_t idx, float (&values)[2][2]) {
  const auto mean = LoadConstant<Words4>(transform.mean.At<const Words4>(16U * idx));
  const auto factor = LoadConstant<Words4>(transform.inverse_smooth.At<const Words4>(16U * idx));
  KVTIER_UNROLL
  for (uint32_t i = 0; i < 4; ++i) {
    float& x = values[i / 2][i % 2];
    x = MulRn(SubRn(x, FloatOf(WordOf(mean, i))), FloatOf(WordOf(factor, i)));
  }
}

template <typename Arch, ElementType kType>
KVTIER_DEVICE EncodedVector EncodeTransformed(const RawVector<kType>& raw,
                                              const Transform& transform, float scale, float g,
                                              bool four_over_six) {
  uint32_t pairs[8];
  KVTIER_UNROLL
  for (uint32_t i = 0; i < 4; ++i) {
    float values[2][2];
    UnpackPair<Arch, kType>(raw, 2 * i, scale, values[0]);
    UnpackPair<Arch, kType>(raw, 2 * i + 1, scale, values[1]);
    TransformFour(transform, i, values);
    pairs[2 * i] = PackBf162(values[0][0], values[0][1]);
    pairs[2 * i + 1] = PackBf162(values[1][0], values[1][1]);
  }
  return EncodeVector<Arch, true>(pairs, g, four_over_six);
}

template <typename Arch, ElementType kType>
KVTIER_DEVICE EncodedVector EncodePlain(const RawVector<kType>& raw, float scale, float g,
                                        bool four_over_six) {
  uint32_t pairs[8];
  KVTIER_UNROLL
  for (uint32_t i = 0; i < 8; ++i) {
    if constexpr (kType == ElementType::kBf16 || kType == ElementType::kFp16) {
      pairs[i] = WordOf(raw.words[i / 4], i % 4);
    } else {
      float values[2];
      UnpackPair<Arch, kType>(raw, i, scale, values);
      pairs[i] = PackBf162(values[0], values[1]);
    }
  }
  return EncodeVector < Arch, kType != ElementType::kFp16 > (pairs, g, four_over_six);
}

KVTIER_DEVICE void CountVector(const EncodedVector& vector, Global<uint32_t> counters) {
  if (vector.is_nonfinite) AddCounter(counters, 1);
  if (vector.scale == 0x7E) AddCounter(counters + 1, 1);
}

// What a thread needs to know of K or of V.
struct SealSide {
  Global<std::byte> rows;
  float g = 0.0F;
  float scale = 0.0F;  // FP8 rows.
};

// Stores the scale bytes that the block collected, [K or V][tokens][vectors] in the order of the
// tile, 16 at a time.
KVTIER_DEVICE void StoreScales(const TileParams& tile, Global<std::byte> target,
                               SharedAddress scales) {
  const uint32_t side_bytes = tile.block_tokens * tile.vector_count;
  const uint32_t thread = ThreadY() * tile.vector_count + ThreadX();
  const uint32_t thread_count = BlockSizeY() * tile.vector_count;
  for (uint32_t offset = 16U * thread; offset < 2U * side_bytes; offset += 16U * thread_count) {
    const uint32_t section =
        offset < side_bytes ? tile.k_scale_offset : tile.v_scale_offset - side_bytes;
    StoreGlobal<Words4>(target.At<Words4>(section + offset), LoadShared<Words4>(scales + offset));
  }
}

template <typename Arch, ElementType kType>
KVTIER_DEVICE void SealBody(const SealParams& params) {
  const TransferParams& transfer = params.transfer;
  const TileParams& tile = transfer.tile;
  const uint32_t entry_idx = BlockX();
  if (!HasEntry(transfer, entry_idx)) return;
  const TransferTile target = FindTile(transfer, entry_idx);
  const Global<uint32_t> counters =
      params.counters + static_cast<int64_t>(uint64_t{entry_idx} * params.counter_stride);
  const SealSide k_side{RowsOf(transfer.k, target),
                        LoadConstant<float>(transfer.g_k + target.scale_idx),
                        ScaleOf(transfer.k, target.scale_idx)};
  const SealSide v_side{RowsOf(transfer.v, target),
                        LoadConstant<float>(transfer.g_v + target.scale_idx),
                        ScaleOf(transfer.v, target.scale_idx)};
  const uint32_t vector = ThreadX();
  if (!IsGlobalScale(k_side.g) || !IsGlobalScale(v_side.g) || !IsScale(k_side.scale) ||
      !IsScale(v_side.scale)) {
    if (vector == 0 && ThreadY() == 0) AddCounter(counters + 2, 1);
    return;
  }
  Transform transform;
  if (!params.k_mean.is_null()) {
    const uint64_t channel = (uint64_t{target.scale_idx} * tile.vector_count + vector) * 16U;
    transform.mean = params.k_mean.At<const float>(channel * sizeof(float));
    transform.inverse_smooth = params.k_inverse_smooth.At<const float>(channel * sizeof(float));
  }
  const SharedAddress k_scales = SharedBegin();
  const SharedAddress v_scales = k_scales + tile.block_tokens * tile.vector_count;
  KVTIER_NO_UNROLL
  for (uint32_t token = ThreadY(); token < tile.block_tokens; token += BlockSizeY()) {
    const Slot slot = FindSlot(transfer.pages, target.first_slot + token);
    const auto k_raw = LoadVector<kType>(RowAt(k_side.rows, transfer.k, slot), vector);
    const auto v_raw = LoadVector<kType>(RowAt(v_side.rows, transfer.v, slot), vector);
    const EncodedVector k =
        transform.mean.is_null()
            ? EncodePlain<Arch, kType>(k_raw, k_side.scale, k_side.g, params.four_over_six)
            : EncodeTransformed<Arch, kType>(k_raw, transform, k_side.scale, k_side.g,
                                             params.four_over_six);
    StoreGlobal<Words2>(target.tile.At<Words2>(KCodeOffsetOf(tile, token, vector)), k.codes);
    StoreShared<uint8_t>(k_scales + KScaleIndex(tile, token, vector),
                         static_cast<uint8_t>(k.scale));
    CountVector(k, counters);
    const EncodedVector v =
        EncodePlain<Arch, kType>(v_raw, v_side.scale, v_side.g, params.four_over_six);
    StoreGlobal<Words2>(target.tile.At<Words2>(VCodeOffsetOf(tile, token, vector)), v.codes);
    StoreShared<uint8_t>(v_scales + VScaleIndex(tile, token, vector),
                         static_cast<uint8_t>(v.scale));
    CountVector(v, counters);
  }
  SyncThreads();
  StoreScales(tile, target.tile, k_scales);
}

}  // namespace kvtier::kernels::cuda::inline KVTIER_CUDA_FLAVOUR

#endif  // KVTIER_KERNELS_CUDA_SEAL_KERNEL_H_
