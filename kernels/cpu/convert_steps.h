// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_KERNELS_CPU_CONVERT_STEPS_H_
#define KVTIER_KERNELS_CPU_CONVERT_STEPS_H_

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/cpu/transfer.h"

// Internal to convert_*.cc: conversion of rows in plain loops without branches, which a compiler
// turns into the vectors of the flags it is given. IEEE-754 steps one by one and integers: the bits
// are the same from each. Internal linkage: see attend.h.

namespace kvtier::kernels::cpu {
namespace {

constexpr uint32_t kConvertDimMax = 512;
constexpr uint32_t kVectorLength = 16;
constexpr uint32_t kMagnitude = 0x7FFFFFFF;
constexpr uint32_t kInfinityBits = 0x7F800000;

uint32_t BitsOf(float x) {
  uint32_t bits = 0;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}

float FloatOf(uint32_t bits) {
  float x = 0;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

// GCC 12 turns neither a floating-point step under a condition nor every ?: into vector code, so
// conditions are masks. All ones if a < b; both are below 2^31.
uint32_t Below(uint32_t a, uint32_t b) { return 0U - ((a - b) >> 31); }
uint32_t Select(uint32_t mask, uint32_t a, uint32_t b) { return (a & mask) | (b & ~mask); }

// A number without implicit one (exponent 0) is read as one with it, of the least exponent, which
// is then subtracted; exact.
float Fp16ToFp32(uint32_t half) {
  const uint32_t magnitude = half & 0x7FFF;
  const uint32_t subnormal = Below(magnitude, 0x400);
  const uint32_t bits = (magnitude << 13) + Select(subnormal, 113U << 23, 112U << 23);
  const float finite = FloatOf(bits) - FloatOf(subnormal & 113U << 23);
  const uint32_t special = (magnitude << 13) | kInfinityBits;
  return FloatOf(Select(Below(magnitude, 0x7C00), BitsOf(finite), special) | (half & 0x8000) << 16);
}

float Fp8ToFp32(uint32_t byte) {
  const uint32_t magnitude = byte & 0x7F;
  const uint32_t subnormal = Below(magnitude, 8);
  const uint32_t bits = (magnitude << 20) + Select(subnormal, 121U << 23, 120U << 23);
  const float finite = FloatOf(bits) - FloatOf(subnormal & 121U << 23);
  return FloatOf(Select(Below(magnitude, 0x7F), BitsOf(finite), 0x7FC00000) | (byte & 0x80) << 24);
}

// Drops `count` bits, rounding to nearest even.
uint32_t DropBits(uint32_t bits, uint32_t count) {
  return (bits + ((1U << (count - 1)) - 1) + (bits >> count & 1)) >> count;
}

uint32_t NanMask(uint32_t magnitude) { return Below(kInfinityBits, magnitude); }

uint32_t Fp32ToBf16(float x) {
  const uint32_t bits = BitsOf(x);
  return Select(NanMask(bits & kMagnitude), bits >> 16 | 0x40, DropBits(bits, 16));
}

uint32_t Fp32ToFp16(float x) {
  const uint32_t bits = BitsOf(x);
  const uint32_t magnitude = bits & kMagnitude;
  const uint32_t nan = 0x7E00 | (magnitude >> 13 & 0x3FF);
  const uint32_t normal = DropBits(magnitude, 13) - (112U << 10);
  // Below 2^-14 steps are 2^-24, the unit in the last place of 0.5.
  const uint32_t subnormal = BitsOf(FloatOf(magnitude) + 0.5F) - BitsOf(0.5F);
  uint32_t half = Select(Below(magnitude, 113U << 23), subnormal, normal);
  half = Select(Below(magnitude, BitsOf(65520.0F)), half, 0x7C00);
  half = Select(NanMask(magnitude), nan, half);
  return half | (bits >> 16 & 0x8000);
}

uint32_t Fp32ToFp8(float x) {
  const uint32_t bits = BitsOf(x);
  const uint32_t magnitude = bits & kMagnitude;
  const uint32_t normal = DropBits(magnitude, 20) - (120U << 3);
  // Below 2^-6 steps are 2^-9, the unit in the last place of 2^14.
  const uint32_t subnormal = BitsOf(FloatOf(magnitude) + 0x1p14F) - BitsOf(0x1p14F);
  uint32_t byte = Select(Below(magnitude, 121U << 23), subnormal, normal);
  byte = Select(Below(magnitude, BitsOf(448.0F)), byte, 0x7E);
  byte = Select(NanMask(magnitude), 0x7F, byte);
  return byte | (bits >> 24 & 0x80);
}

void LoadConverted(const ConvertRows& rows, uint32_t row, float* x) {
  const uint32_t count = rows.dim_count;
  const float scale = rows.source_scale;
  const std::byte* source = rows.sources[row];
  uint16_t words[kConvertDimMax];
  uint8_t bytes[kConvertDimMax];
  switch (rows.source_type) {
    case RowType::kBf16:
      std::memcpy(words, source, count * sizeof(uint16_t));
      for (uint32_t i = 0; i < count; ++i) x[i] = FloatOf(uint32_t{words[i]} << 16);
      return;
    case RowType::kFp16:
      std::memcpy(words, source, count * sizeof(uint16_t));
      for (uint32_t i = 0; i < count; ++i) x[i] = Fp16ToFp32(words[i]);
      return;
    case RowType::kFp32:
      std::memcpy(x, source, count * sizeof(float));
      return;
    case RowType::kFp8:
      std::memcpy(bytes, source, count);
      for (uint32_t i = 0; i < count; ++i) x[i] = Fp8ToFp32(bytes[i]) * scale;
      return;
  }
}

void Transform(const ConvertRows& rows, float* x) {
  const float* mean = rows.mean;
  const float* factor = rows.factor;
  if (mean != nullptr && rows.inverse) {
    for (uint32_t i = 0; i < rows.dim_count; ++i) x[i] = x[i] * factor[i] + mean[i];
  } else if (mean != nullptr) {
    for (uint32_t i = 0; i < rows.dim_count; ++i) x[i] = (x[i] - mean[i]) * factor[i];
  }
  const bool half = rows.source_type == RowType::kBf16 || rows.source_type == RowType::kFp16;
  if (rows.seals && (!half || mean != nullptr)) {
    for (uint32_t i = 0; i < rows.dim_count; ++i) x[i] = FloatOf(Fp32ToBf16(x[i]) << 16);
  }
}

// Vectors of 16 with a NaN or an infinity, and those that FP8 clips: 464 is where the step after
// 448 would begin.
void Count(const ConvertRows& rows, const float* x, SealCounts* counts) {
  for (uint32_t first = 0; first < rows.dim_count; first += kVectorLength) {
    uint32_t largest = 0;
    uint32_t largest_number = 0;
    for (uint32_t i = 0; i < kVectorLength; ++i) {
      const uint32_t magnitude = BitsOf(x[first + i]) & kMagnitude;
      const uint32_t number = magnitude > kInfinityBits ? 0 : magnitude;
      largest = magnitude > largest ? magnitude : largest;
      largest_number = number > largest_number ? number : largest_number;
    }
    counts->nonfinite_count += largest >= kInfinityBits ? 1 : 0;
    counts->saturated_count += FloatOf(largest_number) * rows.inverse_target_scale > 464.0F ? 1 : 0;
  }
}

void StoreConverted(const ConvertRows& rows, uint32_t row, const float* x) {
  const uint32_t count = rows.dim_count;
  std::byte* target = rows.targets[row];
  uint16_t words[kConvertDimMax];
  uint8_t bytes[kConvertDimMax];
  switch (rows.target_type) {
    case RowType::kBf16:
      for (uint32_t i = 0; i < count; ++i) words[i] = static_cast<uint16_t>(Fp32ToBf16(x[i]));
      std::memcpy(target, words, count * sizeof(uint16_t));
      return;
    case RowType::kFp16:
      for (uint32_t i = 0; i < count; ++i) words[i] = static_cast<uint16_t>(Fp32ToFp16(x[i]));
      std::memcpy(target, words, count * sizeof(uint16_t));
      return;
    case RowType::kFp32:
      std::memcpy(target, x, count * sizeof(float));
      return;
    case RowType::kFp8:
      for (uint32_t i = 0; i < count; ++i) bytes[i] = static_cast<uint8_t>(Fp32ToFp8(x[i]));
      for (uint32_t i = 0; rows.seals && i < count; ++i) {
        bytes[i] = (bytes[i] & 0x7F) == 0x7F ? uint8_t{0x7E} : bytes[i];
      }
      std::memcpy(target, bytes, count);
      return;
  }
}

SealCounts ConvertAll(const ConvertRows& arguments) {
  // A copy: stores of bytes could otherwise change it, as far as the compiler knows.
  const ConvertRows rows = arguments;
  SealCounts counts{};
  float x[kConvertDimMax];
  const bool fp8 = rows.target_type == RowType::kFp8;
  for (uint32_t row = 0; row < rows.row_count; ++row) {
    LoadConverted(rows, row, x);
    Transform(rows, x);
    if (rows.seals && fp8) Count(rows, x, &counts);
    for (uint32_t i = 0; fp8 && i < rows.dim_count; ++i) x[i] *= rows.inverse_target_scale;
    StoreConverted(rows, row, x);
  }
  return counts;
}

}  // namespace
}  // namespace kvtier::kernels::cpu

#endif  // KVTIER_KERNELS_CPU_CONVERT_STEPS_H_
