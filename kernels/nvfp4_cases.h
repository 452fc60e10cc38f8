// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_KERNELS_NVFP4_CASES_H_
#define KVTIER_KERNELS_NVFP4_CASES_H_

#include <cmath>
#include <cstdint>

#include "kernels/nvfp4.h"

// Case generation shared by the oracle tests; it holds no expected values.

namespace kvtier::kernels {

// Calls visit(x, scale_byte, code) for every BF16 value x that can occur in a vector whose scale
// byte is `scale_byte`, with the code that Quantize16 gave it. 15 values at a time share a vector
// with an anchor of 6 * e4m3(scale_byte) * g, which fixes the scale byte; under 0x7E every value,
// infinities and NaNs included, occurs. Returns false if Quantize16 chose another scale byte.
template <typename Visit>
bool ForEachBf16UnderScale(uint8_t scale_byte, float g, const Visit& visit) {
  // 2^-10 * g is the largest scale that still rounds to byte 0 (a tie, to even).
  const float anchor = 6.0F * (scale_byte == 0 ? 0x1p-10F : DecodeE4m3Scale(scale_byte)) * g;
  float x[kVectorDims] = {anchor};
  uint32_t count = 1;
  const auto flush = [&] {
    uint8_t codes[kVectorCodeBytes];
    uint8_t scale = 0;
    Quantize16(x, g, codes, &scale);
    if (scale != scale_byte) return false;
    for (uint32_t i = 0; i < count; ++i) {
      visit(x[i], scale, static_cast<uint8_t>(codes[i / 2] >> (i % 2 * 4) & 0xF));
    }
    return true;
  };
  for (uint32_t bits = 0; bits <= 0xFFFF; ++bits) {
    const float value = Bf16ToFloat(static_cast<uint16_t>(bits));
    const bool occurs = scale_byte == kScaleByteMax || std::fabs(value) <= anchor;
    if (!occurs) continue;
    x[count++] = value;
    if (count < kVectorDims) continue;
    if (!flush()) return false;
    count = 1;
  }
  for (uint32_t i = count; i < kVectorDims; ++i) x[i] = 0.0F;
  return flush();
}

}  // namespace kvtier::kernels

#endif  // KVTIER_KERNELS_NVFP4_CASES_H_
