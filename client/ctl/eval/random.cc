// SPDX-License-Identifier: Apache-2.0
#include "client/ctl/eval/random.h"

#include <cmath>

#include "client/ctl/kv_generator.h"

namespace kvtier::ctl::eval {
namespace {

constexpr double kLn2 = 0.6931471805599453;
constexpr double kSqrt2 = 1.4142135623730951;

}  // namespace

double FixedLog(double x) {
  int exponent = 0;
  double mantissa = 2.0 * std::frexp(x, &exponent);  // exact, in [1, 2)
  --exponent;
  if (mantissa > kSqrt2) {
    mantissa *= 0.5;
    ++exponent;
  }
  // log(m) = 2 atanh(s); |s| < 0.1716, so that s^24 / 25 is below 2^-64.
  const double s = (mantissa - 1.0) / (mantissa + 1.0);
  const double square = s * s;
  double sum = 0.0;
  for (int odd = 23; odd >= 1; odd -= 2) sum = sum * square + 1.0 / odd;
  return 2.0 * s * sum + exponent * kLn2;
}

double FixedExp(double x) {
  const double steps = std::floor(x / kLn2 + 0.5);
  const double rest = x - steps * kLn2;  // |rest| < 0.35
  double sum = 1.0;
  for (int n = 15; n >= 1; --n) sum = sum * rest / n + 1.0;
  return std::ldexp(sum, static_cast<int>(steps));
}

Random::Random(uint64_t seed, uint64_t stream) : seed_(SplitMix64(seed, stream)) {}

uint64_t Random::Word() { return SplitMix64(seed_, counter_++); }

double Random::Uniform() { return static_cast<double>(Word() >> 11) * 0x1p-53; }

double Random::Normal() {
  if (has_spare_) {
    has_spare_ = false;
    return spare_;
  }
  double x = 0.0;
  double y = 0.0;
  double square = 0.0;
  do {
    x = Uniform(-1.0, 1.0);
    y = Uniform(-1.0, 1.0);
    square = x * x + y * y;
  } while (square >= 1.0 || square == 0.0);
  const double factor = std::sqrt(-2.0 * FixedLog(square) / square);
  spare_ = y * factor;
  has_spare_ = true;
  return x * factor;
}

double Random::StudentT(uint32_t degrees) {
  const double normal = Normal();
  double squares = 0.0;
  for (uint32_t i = 0; i < degrees; ++i) {
    const double other = Normal();
    squares += other * other;
  }
  return normal / std::sqrt(squares / degrees);
}

}  // namespace kvtier::ctl::eval
