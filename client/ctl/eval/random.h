// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace kvtier::ctl::eval {

// Exponential and natural logarithm made of +, -, *, / and powers of two alone, which IEEE 754
// fixes bit for bit; the C library's differ in the last bit from version to version. Relative error
// below 1e-15 (Log: absolute near 1). Log requires a finite x > 0, Exp |x| < 700.
double FixedLog(double x);
double FixedExp(double x);

// Pseudorandom numbers that are the same bits on every machine: splitmix64 of a counter, and
// arithmetic in a fixed order without fused multiply-add. docs/accuracy.md is the specification.
// Thread-compatible.
class Random {
 public:
  // Streams of one seed are independent.
  Random(uint64_t seed, uint64_t stream);

  uint64_t Word();
  // In [0, 1), a multiple of 2^-53.
  double Uniform();
  double Uniform(double low, double high) { return low + (high - low) * Uniform(); }
  // In [0, count). Requires: count > 0.
  uint64_t Below(uint64_t count) { return Word() % count; }
  double Sign() { return Word() >> 63 != 0 ? -1.0 : 1.0; }
  // Standard normal, by the polar method.
  double Normal();
  // Student's t: a normal over the root of the mean of `degrees` squared normals.
  double StudentT(uint32_t degrees);

 private:
  uint64_t seed_;
  uint64_t counter_ = 0;
  double spare_ = 0.0;  // the second normal of a pair
  bool has_spare_ = false;
};

}  // namespace kvtier::ctl::eval
