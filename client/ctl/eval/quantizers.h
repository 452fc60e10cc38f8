// SPDX-License-Identifier: Apache-2.0
//
// Formats that the product does not store, each as a round trip: what a reader would get back. They
// are here to be compared with; their element conversions are those of kernels/nvfp4.h, the other
// arithmetic is FP32.
#pragma once

#include <cstdint>

#include "client/ctl/eval/matrix.h"

namespace kvtier::ctl::eval {

// The largest magnitude; 0 for an empty matrix.
double Amax(const Matrix& x);

Matrix RoundToBf16(const Matrix& x);

// Signed E4M3 of x / scale, saturating at 448. Requires: scale > 0.
Matrix Fp8(const Matrix& x, float scale);
// amax / 448 in FP32: the scale that maps the largest magnitude to the largest code; 1 for 0.
float Fp8Scale(double amax);
// With the scale of each row's amax.
Matrix Fp8PerRow(const Matrix& x);

// How MXFP4 chooses the power of two that 32 values of a row share.
enum class E8m0Rule : uint8_t {
  kFloor,  // floor(log2(amax)) - 2, as OCP MX v1.0 has it: the largest values may saturate
  kCeil,   // ceil(log2(amax / 6)): nothing saturates
};
inline constexpr uint32_t kMxGroup = 32;
Matrix Mxfp4(const Matrix& x, E8m0Rule rule);

// Asymmetric integers: zero = min, scale = (max - min) / (2^bits - 1), of `group` adjacent values
// of a row (what is left at the end of a row is a group too); a scale of 0 is 1.
struct IntFormat {
  uint32_t bits = 4;  // 1 to 8
  uint32_t group = 32;
  bool fp16_metadata = true;  // false: scale and zero stay FP32, as in the worked example
};
Matrix IntAsymmetric(const Matrix& x, const IntFormat& format);
// The same with groups of `group` tokens of one channel: KIVI's layout of keys.
Matrix IntAsymmetricPerChannel(const Matrix& x, const IntFormat& format);

// NVFP4 with the scale bytes of kernels/nvfp4.h, but codes rounded up with the probability of their
// fraction, from a seeded generator. Requires: kernels::IsValidGlobalScale(g), x.cols() % 16 == 0.
Matrix Nvfp4Stochastic(const Matrix& x, float g, uint64_t seed);

// Rotates every row by an orthogonal transform: random signs (seeded), then a Walsh-Hadamard
// transform of every run of P values, P the largest power of two that divides the row's length.
Matrix Rotated(const Matrix& x, uint64_t seed);
Matrix RotatedBack(const Matrix& x, uint64_t seed);

}  // namespace kvtier::ctl::eval
