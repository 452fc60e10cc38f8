// SPDX-License-Identifier: Apache-2.0
//
// What methods are measured on: keys, values and queries, made here or read from a dump.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "client/ctl/eval/matrix.h"

namespace kvtier::ctl::eval {

// One kv head of one layer: k and v are [token][dim], q is [query][dim], the queries of every query
// head that reads this kv head. Every query sees every token.
struct Head {
  Matrix k;
  Matrix v;
  Matrix q = {};
  double softmax_scale = 0.0;  // 1 / sqrt(head_dim)
};

// The kv heads of one layer, of equal shape: what a per-tensor scale is shared by.
struct Layer {
  std::vector<Head> heads;
};

// The synthetic families. In all of them the standard deviation of the scores is 3.
enum class Family : uint8_t {
  kGauss,        // normal
  kOutZm,        // 4 outlier channels of K, zero mean, 10 to 20 times as large
  kOutBias,      // 4 outlier channels of K with a constant bias of 10 to 20
  kStudent4,     // Student's t with 4 degrees of freedom
  kStudent3Out,  // t with 3 degrees, and outlier channels as in kOutZm
};
inline constexpr Family kAllFamilies[] = {Family::kGauss, Family::kOutZm, Family::kOutBias,
                                          Family::kStudent4, Family::kStudent3Out};

// "gauss", "out_zm", "out_bias", "t4", "t3_out".
std::string_view FamilyName(Family family);
// Comma-separated names, or "all". Errors: INVALID_ARGUMENT for an unknown name.
absl::StatusOr<std::vector<Family>> ParseFamilies(std::string_view list);

struct SyntheticShape {
  uint32_t token_count = 4096;
  uint32_t head_dim = 128;
  uint32_t query_count = 16;
  double sigma = 1.0;  // multiplies K and V; queries shrink with it, so that scores stay
};

// The same values on every machine, to the bit. Requires: head_dim >= 4, all counts > 0, sigma > 0.
Head MakeSynthetic(Family family, const SyntheticShape& shape, uint64_t seed);

// Normal queries, scaled so that the scores over `k` have a standard deviation of 3: for dumps that
// come without queries. Requires: rows of `k` that differ.
Matrix MakeQueries(const Matrix& k, uint32_t query_count, uint64_t seed);

// The worked example of keys per channel against keys per token: 4 tokens of 4 channels, channel 3
// an outlier, and one query.
struct WorkedExample {
  Matrix k;
  Matrix q;
};
WorkedExample MakeWorkedExample();

}  // namespace kvtier::ctl::eval
