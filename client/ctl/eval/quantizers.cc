// SPDX-License-Identifier: Apache-2.0
#include "client/ctl/eval/quantizers.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "client/ctl/eval/random.h"
#include "kernels/nvfp4.h"

namespace kvtier::ctl::eval {
namespace {

double SpanAmax(std::span<const double> values) {
  double amax = 0.0;
  for (const double value : values) amax = std::max(amax, std::abs(value));
  return amax;
}

float Fp8RoundTrip(float x, float scale) {
  const float quotient = x / scale;
  const float magnitude = kernels::DecodeE4m3Scale(kernels::EncodeE4m3Scale(std::abs(quotient)));
  return std::copysign(magnitude, quotient) * scale;
}

void Fp8Row(std::span<const double> x, float scale, std::span<double> out) {
  for (size_t i = 0; i < x.size(); ++i) out[i] = Fp8RoundTrip(static_cast<float>(x[i]), scale);
}

// Exponent of the shared scale, limited to what E8M0 can hold. amax = m * 2^(e + 2), m in [1, 2):
// the quotient amax / 6 is at most 2^e if m <= 1.5.
int E8m0Exponent(double amax, E8m0Rule rule) {
  constexpr int kLimit = 127;
  if (amax == 0.0) return -kLimit;
  const int exponent = std::ilogb(amax) - 2;
  const bool above = rule == E8m0Rule::kCeil && amax > std::ldexp(6.0, exponent);
  return std::clamp(exponent + (above ? 1 : 0), -kLimit, kLimit);
}

void IntGroup(std::span<const double> x, const IntFormat& format, std::span<double> out) {
  auto low = static_cast<float>(x[0]);
  float high = low;
  for (const double value : x) {
    low = std::min(low, static_cast<float>(value));
    high = std::max(high, static_cast<float>(value));
  }
  const auto levels = static_cast<float>((1U << format.bits) - 1U);
  float scale = (high - low) / levels;
  if (format.fp16_metadata) {
    scale = kernels::Fp16ToFloat(kernels::FloatToFp16(scale));
    low = kernels::Fp16ToFloat(kernels::FloatToFp16(low));
  }
  if (scale == 0.0F) scale = 1.0F;
  // Adding 1.5 * 2^23 rounds a number below 2^22 to nearest even; |code| is far below.
  constexpr float kRound = 0x1.8p23F;
  for (size_t i = 0; i < x.size(); ++i) {
    const float quotient = std::clamp((static_cast<float>(x[i]) - low) / scale, 0.0F, levels);
    const float code = quotient + kRound - kRound;
    out[i] = code * scale + low;
  }
}

// In place, orthonormal, size a power of two; its own inverse.
void WalshHadamard(std::span<double> x) {
  for (size_t half = 1; half < x.size(); half *= 2) {
    for (size_t begin = 0; begin < x.size(); begin += 2 * half) {
      for (size_t i = begin; i < begin + half; ++i) {
        const double sum = x[i] + x[i + half];
        x[i + half] = x[i] - x[i + half];
        x[i] = sum;
      }
    }
  }
  const double factor = 1.0 / std::sqrt(static_cast<double>(x.size()));
  for (double& value : x) value *= factor;
}

void TransformRow(std::span<double> row) {
  const size_t run = row.size() & (~row.size() + 1);  // its lowest set bit
  for (size_t at = 0; at < row.size(); at += run) WalshHadamard(row.subspan(at, run));
}

std::vector<double> RotationSigns(size_t count, uint64_t seed) {
  constexpr uint64_t kSigns = 16;  // a stream apart from those of datasets
  Random random(seed, kSigns);
  std::vector<double> signs(count);
  for (double& sign : signs) sign = random.Sign();
  return signs;
}

// One of the two neighbours of |y| <= 6 among E2M1's magnitudes.
float RoundStochastically(float y, double uniform) {
  const float magnitude = std::min(std::abs(y), kernels::kE2m1Max);
  size_t upper = 1;
  while (kernels::kE2m1Values[upper] < magnitude) ++upper;
  const float low = kernels::kE2m1Values[upper - 1];
  const float high = kernels::kE2m1Values[upper];
  const float fraction = (magnitude - low) / (high - low);
  return std::copysign(uniform < fraction ? high : low, y);
}

}  // namespace

double Amax(const Matrix& x) { return SpanAmax(x.values()); }

Matrix RoundToBf16(const Matrix& x) {
  Matrix result = x;
  for (double& value : result.values()) {
    value = kernels::Bf16ToFloat(kernels::FloatToBf16(static_cast<float>(value)));
  }
  return result;
}

float Fp8Scale(double amax) {
  const float scale = static_cast<float>(amax) / kernels::kE4m3Max;
  return scale > 0.0F ? scale : 1.0F;
}

Matrix Fp8(const Matrix& x, float scale) {
  Matrix result(x.rows(), x.cols());
  Fp8Row(x.values(), scale, result.values());
  return result;
}

Matrix Fp8PerRow(const Matrix& x) {
  Matrix result(x.rows(), x.cols());
  for (size_t row = 0; row < x.rows(); ++row) {
    Fp8Row(x.Row(row), Fp8Scale(SpanAmax(x.Row(row))), result.Row(row));
  }
  return result;
}

Matrix Mxfp4(const Matrix& x, E8m0Rule rule) {
  Matrix result(x.rows(), x.cols());
  for (size_t row = 0; row < x.rows(); ++row) {
    for (size_t at = 0; at < x.cols(); at += kMxGroup) {
      const size_t count = std::min<size_t>(kMxGroup, x.cols() - at);
      const std::span<const double> group = x.Row(row).subspan(at, count);
      const double scale = std::ldexp(1.0, E8m0Exponent(SpanAmax(group), rule));
      for (size_t i = 0; i < count; ++i) {
        const uint8_t code = kernels::EncodeE2m1(static_cast<float>(group[i] / scale));
        result.Row(row)[at + i] = kernels::DecodeE2m1(code) * scale;
      }
    }
  }
  return result;
}

Matrix IntAsymmetric(const Matrix& x, const IntFormat& format) {
  Matrix result(x.rows(), x.cols());
  for (size_t row = 0; row < x.rows(); ++row) {
    for (size_t at = 0; at < x.cols(); at += format.group) {
      const size_t count = std::min<size_t>(format.group, x.cols() - at);
      IntGroup(x.Row(row).subspan(at, count), format, result.Row(row).subspan(at, count));
    }
  }
  return result;
}

Matrix IntAsymmetricPerChannel(const Matrix& x, const IntFormat& format) {
  return IntAsymmetric(x.Transposed(), format).Transposed();
}

Matrix Nvfp4Stochastic(const Matrix& x, float g, uint64_t seed) {
  constexpr uint64_t kRounding = 17;
  Random random(seed, kRounding);
  Matrix result(x.rows(), x.cols());
  const std::span<const double> in = x.values();
  const std::span<double> out = result.values();
  for (size_t at = 0; at < in.size(); at += kernels::kVectorDims) {
    std::array<float, kernels::kVectorDims> vector;
    for (size_t i = 0; i < vector.size(); ++i) vector[i] = static_cast<float>(in[at + i]);
    std::array<uint8_t, kernels::kVectorCodeBytes> codes;
    uint8_t scale = 0;
    kernels::Quantize16(vector.data(), g, codes.data(), &scale);
    const float step = kernels::DecodeE4m3Scale(scale) * g;
    for (size_t i = 0; i < vector.size(); ++i) {
      const double uniform = random.Uniform();
      out[at + i] = step == 0.0F ? 0.0 : RoundStochastically(vector[i] / step, uniform) * step;
    }
  }
  return result;
}

Matrix Rotated(const Matrix& x, uint64_t seed) {
  const std::vector<double> signs = RotationSigns(x.cols(), seed);
  Matrix result = x;
  for (size_t row = 0; row < x.rows(); ++row) {
    for (size_t i = 0; i < x.cols(); ++i) result.Row(row)[i] *= signs[i];
    TransformRow(result.Row(row));
  }
  return result;
}

Matrix RotatedBack(const Matrix& x, uint64_t seed) {
  const std::vector<double> signs = RotationSigns(x.cols(), seed);
  Matrix result = x;
  for (size_t row = 0; row < x.rows(); ++row) {
    TransformRow(result.Row(row));
    for (size_t i = 0; i < x.cols(); ++i) result.Row(row)[i] *= signs[i];
  }
  return result;
}

}  // namespace kvtier::ctl::eval
