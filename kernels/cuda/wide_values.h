// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_KERNELS_CUDA_WIDE_VALUES_H_
#define KVTIER_KERNELS_CUDA_WIDE_VALUES_H_

#include <cstdint>

#include "kernels/cuda/gather_kernel.h"
#include "kernels/cuda/nvfp4_device.h"
#include "kernels/cuda/primitives.h"
#include "kernels/cuda/seal_kernel.h"
#include "kernels/cuda/target.h"

// Numbers without scale bytes, FP8 and BF16 sides of tiles and ropes: conversions between them and
// rows, bit for bit those of kernels/cpu/convert_steps.h. Arithmetic on the device makes one and
// the same NaN of all of them, so sign and payload of NaNs, which are rare, are put in afterwards.

namespace kvtier::kernels::cuda::inline KVTIER_CUDA_FLAVOUR {

// BF16 of element `idx` if that is a NaN: quiet, with its sign and what fits of its payload; else
// 0.
template <ElementType kType, uint32_t kValues>
KVTIER_DEVICE uint32_t NanAsBf16(const RawVector<kType, kValues>& raw, uint32_t idx) {
  if constexpr (kType == ElementType::kFp32) {
    const uint32_t bits = WordOf(raw.words[idx / 4], idx % 4);
    return (bits & 0x7FFFFFFFU) > 0x7F800000U ? bits >> 16 | 0x40U : 0U;
  } else if constexpr (kType == ElementType::kFp8E4m3) {
    const uint32_t byte = WordOf(raw.words[0], idx / 4) >> (idx % 4 * 8) & 0xFFU;
    return (byte & 0x7FU) == 0x7FU ? (byte & 0x80U) << 8 | 0x7FC0U : 0U;
  } else {
    const uint32_t half = WordOf(raw.words[idx / 8], idx % 8 / 2) >> (idx % 2 * 16) & 0xFFFFU;
    if constexpr (kType == ElementType::kBf16) {
      return (half & 0x7FFFU) > 0x7F80U ? half | 0x40U : 0U;
    }
    const uint32_t payload = (half & 0x3FFU) >> 3;
    return (half & 0x7FFFU) > 0x7C00U ? (half & 0x8000U) | 0x7FC0U | payload : 0U;
  }
}

// Whether one of the elements of BF16 pairs is a NaN.
template <uint32_t kPairs>
KVTIER_DEVICE bool HasNan(const uint32_t (&pairs)[kPairs]) {
  uint32_t largest = pairs[0] & 0x7FFF7FFFU;
  KVTIER_UNROLL
  for (uint32_t i = 1; i < kPairs; ++i) largest = MaxNanBf162(largest, pairs[i] & 0x7FFF7FFFU);
  return (largest & 0x7FFFU) > 0x7F80U || largest >> 16 > 0x7F80U;
}

// The elements in FP32 (FP8 times `scale`), transformed if `transform` is one.
template <typename Arch, ElementType kType, uint32_t kValues>
KVTIER_DEVICE void SourceValues(const RawVector<kType, kValues>& raw, const Transform& transform,
                                float scale, float (&values)[kValues]) {
  KVTIER_UNROLL
  for (uint32_t i = 0; i < kValues; i += 4) {
    float four[2][2];
    UnpackPair<Arch, kType>(raw, i / 2, scale, four[0]);
    UnpackPair<Arch, kType>(raw, i / 2 + 1, scale, four[1]);
    if (!transform.mean.is_null()) TransformFour(transform, i / 4, four);
    KVTIER_UNROLL
    for (uint32_t j = 0; j < 4; ++j) values[i + j] = four[j / 2][j % 2];
  }
}

// As BF16, NaNs included.
template <typename Arch, ElementType kType, uint32_t kPairs>
KVTIER_DEVICE void SealBf16(const RawVector<kType, 2 * kPairs>& raw, const Transform& transform,
                            float scale, uint32_t (&pairs)[kPairs]) {
  constexpr uint32_t kValues = 2 * kPairs;
  if (kType == ElementType::kBf16 && transform.mean.is_null()) {
    KVTIER_UNROLL
    for (uint32_t i = 0; i < kPairs; ++i) pairs[i] = WordOf(raw.words[i / 4], i % 4);
  } else {
    float values[kValues];
    SourceValues<Arch>(raw, transform, scale, values);
    KVTIER_UNROLL
    for (uint32_t i = 0; i < kPairs; ++i) pairs[i] = PackBf162(values[2 * i], values[2 * i + 1]);
  }
  if (!HasNan(pairs)) return;
  KVTIER_UNROLL
  for (uint32_t i = 0; i < kValues; ++i) {
    const uint32_t nan = NanAsBf16(raw, i);
    const uint32_t shift = i % 2 * 16;
    if (nan != 0) pairs[i / 2] = (pairs[i / 2] & ~(0xFFFFU << shift)) | nan << shift;
  }
}

// A vector as FP8, and what SealTile counts. NaN becomes 448.
struct Fp8Vector {
  Words4 bytes;
  bool is_nonfinite = false;
  bool is_saturated = false;
};

template <typename Arch, ElementType kType>
KVTIER_DEVICE Fp8Vector SealFp8(const RawVector<kType>& raw, const Transform& transform,
                                float scale, float inverse) {
  constexpr bool kIsHalf = kType == ElementType::kBf16 || kType == ElementType::kFp16;
  float values[16];
  SourceValues<Arch>(raw, transform, scale, values);
  if (!kIsHalf || !transform.mean.is_null()) {
    KVTIER_UNROLL
    for (uint32_t i = 0; i < 16; i += 2) {
      const uint32_t pair = PackBf162(values[i], values[i + 1]);
      values[i] = FirstBf16(pair);
      values[i + 1] = SecondBf16(pair);
    }
  }
  Fp8Vector result;
  constexpr uint32_t kInfinity = 0x7F800000U;
  uint32_t largest = 0;  // Of the magnitudes that are no NaN, as bits.
  uint32_t words[4] = {};
  KVTIER_UNROLL
  for (uint32_t i = 0; i < 16; i += 2) {
    float scaled[2];
    KVTIER_UNROLL
    for (uint32_t j = 0; j < 2; ++j) {
      const uint32_t magnitude = BitsOf(values[i + j]) & 0x7FFFFFFFU;
      if (magnitude >= kInfinity) result.is_nonfinite = true;
      if (magnitude <= kInfinity && magnitude > largest) largest = magnitude;
      scaled[j] = MinFloat(MulRn(values[i + j], inverse), 448.0F);
    }
    words[i / 4] |= PackFp8<Arch>(scaled[0], scaled[1]) << (i % 4 * 8);
  }
  // 464 is where the step after 448 would begin.
  result.is_saturated = MulRn(FloatOf(largest), inverse) > 464.0F;
  result.bytes = {words[0], words[1], words[2], words[3]};
  return result;
}

// The other way: kValues elements of a side, to one 16-byte store.

// Makes zeros of NaNs among the FP8 bytes of a word; whether there were any.
KVTIER_DEVICE bool ClearFp8Nans(uint32_t& word) {
  const uint32_t nans = ((word & 0x7F7F7F7FU) + 0x01010101U) & 0x80808080U;
  word &= ~((nans >> 7) * 0xFFU);
  return nans != 0;
}

template <typename Arch, ElementType kType>
KVTIER_DEVICE Words4 GatherFp8(Global<std::byte> source, float g, float inverse_scale,
                               Global<uint32_t> counters) {
  constexpr uint32_t kValues = 16 / ElementBytes(kType);
  uint32_t bytes[kValues / 4];
  LoadWords(source, bytes);
  bool is_damaged = false;
  KVTIER_UNROLL
  for (uint32_t i = 0; i < kValues / 4; ++i) is_damaged = ClearFp8Nans(bytes[i]) || is_damaged;
  if (is_damaged) AddCounter(counters, 1);
  uint32_t words[4];
  KVTIER_UNROLL
  for (uint32_t first = 0; first < kValues; first += 8) {
    float values[8] = {};
    KVTIER_UNROLL
    for (uint32_t i = 0; i < (kValues < 8 ? kValues : 8); i += 2) {
      const uint32_t halves =
          UnpackFp8<Arch>(bytes[(first + i) / 4] >> ((first + i) % 4 * 8) & 0xFFFFU);
      values[i] = MulRn(FirstHalf(halves), g);
      values[i + 1] = MulRn(SecondHalf(halves), g);
    }
    PackValues<Arch, kType>(values, inverse_scale, words + first / 4);
  }
  return {words[0], words[1], words[2], words[3]};
}

// A BF16 NaN as the CPU converts it, at its place among the elements of a store; `word` holds it.
template <ElementType kType>
KVTIER_DEVICE void PutNan(uint32_t bf16, uint32_t idx, uint32_t (&words)[4]) {
  constexpr uint32_t kBits = 8 * ElementBytes(kType);
  const uint32_t sign = bf16 >> 15;
  uint32_t nan = bf16 | 0x40U;
  if constexpr (kType == ElementType::kFp16) nan = sign << 15 | 0x7E00U | (bf16 & 0x7FU) << 3;
  if constexpr (kType == ElementType::kFp8E4m3) nan = sign << 7 | 0x7FU;
  const uint32_t shift = idx * kBits % 32;
  uint32_t& word = words[idx * kBits / 32];
  word = (word & ~(((1U << kBits) - 1U) << shift)) | nan << shift;
}

template <typename Arch, ElementType kType>
KVTIER_DEVICE Words4 GatherBf16(Global<std::byte> source, float inverse_scale) {
  constexpr uint32_t kValues = 16 / ElementBytes(kType);
  uint32_t pairs[kValues / 2];
  LoadWords(source, pairs);
  uint32_t words[4];
  KVTIER_UNROLL
  for (uint32_t first = 0; first < kValues; first += 8) {
    if constexpr (kType == ElementType::kBf16) {
      KVTIER_UNROLL
      for (uint32_t i = 0; i < 4; ++i) words[i] = pairs[i];
    } else {
      float values[8] = {};
      KVTIER_UNROLL
      for (uint32_t i = 0; i < (kValues < 8 ? kValues : 8); i += 2) {
        values[i] = FirstBf16(pairs[(first + i) / 2]);
        values[i + 1] = SecondBf16(pairs[(first + i) / 2]);
      }
      PackValues<Arch, kType>(values, inverse_scale, words + first / 4);
    }
  }
  if constexpr (kType != ElementType::kFp32) {
    if (HasNan(pairs)) {
      KVTIER_UNROLL
      for (uint32_t i = 0; i < kValues; ++i) {
        const uint32_t bf16 = pairs[i / 2] >> (i % 2 * 16) & 0xFFFFU;
        if ((bf16 & 0x7FFFU) > 0x7F80U) PutNan<kType>(bf16, i, words);
      }
    }
  }
  return {words[0], words[1], words[2], words[3]};
}

}  // namespace kvtier::kernels::cuda::inline KVTIER_CUDA_FLAVOUR

#endif  // KVTIER_KERNELS_CUDA_WIDE_VALUES_H_
