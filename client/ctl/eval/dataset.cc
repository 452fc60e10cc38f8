// SPDX-License-Identifier: Apache-2.0
#include "client/ctl/eval/dataset.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "absl/strings/str_split.h"
#include "client/ctl/eval/random.h"
#include "proto/base/check.h"
#include "proto/base/status_util.h"

namespace kvtier::ctl::eval {
namespace {

constexpr uint32_t kOutlierCount = 4;
constexpr double kScoreDeviation = 3.0;
// Queries are smaller where keys are large, as trained models have it.
constexpr double kOutlierQueryFactor = 0.3;

// Streams of a seed, one a tensor, so that a change of one leaves the others as they are.
enum Stream : uint64_t { kKeys = 0, kValues = 1, kQueries = 2, kOutliers = 3, kBiases = 4 };

struct Outlier {
  size_t channel = 0;
  double magnitude = 0.0;  // 10 to 20
  double sign = 1.0;
};

bool HasOutliers(Family family) {
  return family == Family::kOutZm || family == Family::kOutBias || family == Family::kStudent3Out;
}

// Distinct channels.
std::vector<Outlier> MakeOutliers(Family family, uint32_t head_dim, uint64_t seed) {
  std::vector<Outlier> outliers;
  if (!HasOutliers(family)) return outliers;
  Random random(seed, kOutliers);
  while (outliers.size() < kOutlierCount) {
    Outlier outlier{.channel = random.Below(head_dim)};
    outlier.magnitude = random.Uniform(10.0, 20.0);
    outlier.sign = random.Sign();
    const bool known = std::any_of(outliers.begin(), outliers.end(), [&](const Outlier& other) {
      return other.channel == outlier.channel;
    });
    if (!known) outliers.push_back(outlier);
  }
  return outliers;
}

// Unit variance where the family's distribution has one.
double Draw(Family family, Random* random) {
  switch (family) {
    case Family::kGauss:
    case Family::kOutZm:
    case Family::kOutBias:
      return random->Normal();
    case Family::kStudent4:
      return random->StudentT(4) / std::sqrt(2.0);
    case Family::kStudent3Out:
      return random->StudentT(3) / std::sqrt(3.0);
  }
  return 0.0;
}

Matrix MakeKeys(Family family, const SyntheticShape& shape, uint64_t seed,
                const std::vector<Outlier>& outliers) {
  Matrix k(shape.token_count, shape.head_dim);
  Random random(seed, kKeys);
  for (double& value : k.values()) value = Draw(family, &random);
  if (family == Family::kOutBias) {
    Random biases(seed, kBiases);
    std::vector<double> bias(shape.head_dim);
    for (double& value : bias) value = 0.5 * biases.Normal();
    for (const Outlier& outlier : outliers) bias[outlier.channel] = 0.0;
    for (size_t t = 0; t < k.rows(); ++t) {
      for (size_t d = 0; d < k.cols(); ++d) k.Row(t)[d] += bias[d];
    }
  }
  for (size_t t = 0; t < k.rows(); ++t) {
    for (const Outlier& outlier : outliers) {
      double& value = k.Row(t)[outlier.channel];
      value = family == Family::kOutBias ? 1.5 * value + outlier.sign * outlier.magnitude
                                         : value * outlier.magnitude;
    }
  }
  return k;
}

Matrix MakeValues(Family family, const SyntheticShape& shape, uint64_t seed) {
  const bool heavy = family == Family::kStudent4 || family == Family::kStudent3Out;
  Matrix v(shape.token_count, shape.head_dim);
  Random random(seed, kValues);
  for (size_t t = 0; t < v.rows(); ++t) {
    const double scale = FixedExp(0.3 * random.Normal());
    for (double& value : v.Row(t)) {
      value = scale * Draw(heavy ? Family::kStudent4 : Family::kGauss, &random);
    }
  }
  return v;
}

// The deviation of all q.k / sqrt(d) around the mean of their query.
double ScoreDeviation(const Matrix& q, const Matrix& k) {
  double squares = 0.0;
  std::vector<double> scores(k.rows());
  for (size_t i = 0; i < q.rows(); ++i) {
    double mean = 0.0;
    for (size_t t = 0; t < k.rows(); ++t) {
      double sum = 0.0;
      for (size_t d = 0; d < k.cols(); ++d) sum += q.Row(i)[d] * k.Row(t)[d];
      scores[t] = sum / std::sqrt(static_cast<double>(k.cols()));
      mean += scores[t];
    }
    mean /= static_cast<double>(k.rows());
    for (const double score : scores) squares += (score - mean) * (score - mean);
  }
  return std::sqrt(squares / static_cast<double>(q.rows() * k.rows()));
}

Matrix ScaledQueries(Matrix q, const Matrix& k) {
  const double factor = kScoreDeviation / ScoreDeviation(q, k);
  for (double& value : q.values()) value *= factor;
  return q;
}

// Data is FP32, as a dump may be; methods round from there.
void RoundToFloat(Matrix* matrix) {
  for (double& value : matrix->values()) value = static_cast<float>(value);
}

}  // namespace

std::string_view FamilyName(Family family) {
  switch (family) {
    case Family::kGauss:
      return "gauss";
    case Family::kOutZm:
      return "out_zm";
    case Family::kOutBias:
      return "out_bias";
    case Family::kStudent4:
      return "t4";
    case Family::kStudent3Out:
      return "t3_out";
  }
  return "unknown";
}

absl::StatusOr<std::vector<Family>> ParseFamilies(std::string_view list) {
  if (list == "all") return std::vector<Family>(std::begin(kAllFamilies), std::end(kAllFamilies));
  std::vector<Family> families;
  for (const std::string& name : std::vector<std::string>(absl::StrSplit(ToAbsl(list), ','))) {
    const auto* found = std::find_if(std::begin(kAllFamilies), std::end(kAllFamilies),
                                     [&](Family family) { return FamilyName(family) == name; });
    if (found == std::end(kAllFamilies)) {
      return Invalid("family \"%s\" is unknown; use gauss, out_zm, out_bias, t4, t3_out or all",
                     name);
    }
    families.push_back(*found);
  }
  return families;
}

Head MakeSynthetic(Family family, const SyntheticShape& shape, uint64_t seed) {
  KVT_CHECK(shape.head_dim >= kOutlierCount && shape.token_count > 0 && shape.query_count > 0);
  const std::vector<Outlier> outliers = MakeOutliers(family, shape.head_dim, seed);
  Head head;
  head.k = MakeKeys(family, shape, seed, outliers);
  head.v = MakeValues(family, shape, seed);
  head.q = Matrix(shape.query_count, shape.head_dim);
  Random random(seed, kQueries);
  for (double& value : head.q.values()) value = random.Normal();
  for (size_t i = 0; i < head.q.rows(); ++i) {
    for (const Outlier& outlier : outliers) head.q.Row(i)[outlier.channel] *= kOutlierQueryFactor;
  }
  for (double& value : head.k.values()) value *= shape.sigma;
  for (double& value : head.v.values()) value *= shape.sigma;
  head.q = ScaledQueries(std::move(head.q), head.k);
  head.softmax_scale = 1.0 / std::sqrt(static_cast<double>(shape.head_dim));
  RoundToFloat(&head.k);
  RoundToFloat(&head.v);
  RoundToFloat(&head.q);
  return head;
}

Matrix MakeQueries(const Matrix& k, uint32_t query_count, uint64_t seed) {
  Matrix q(query_count, k.cols());
  Random random(seed, kQueries);
  for (double& value : q.values()) value = random.Normal();
  q = ScaledQueries(std::move(q), k);
  RoundToFloat(&q);
  return q;
}

WorkedExample MakeWorkedExample() {
  constexpr std::array<std::array<float, 4>, 4> kKeyRows = {{{0.1F, -0.2F, 0.4F, 9.0F},
                                                             {-0.4F, 0.5F, -0.3F, 11.0F},
                                                             {0.3F, -0.6F, 0.2F, 10.0F},
                                                             {-0.2F, 0.1F, 0.5F, 12.0F}}};
  constexpr std::array<float, 4> kQuery = {1.0F, 1.0F, 1.0F, 0.1F};
  WorkedExample example{.k = Matrix(4, 4), .q = Matrix(1, 4)};
  for (size_t d = 0; d < 4; ++d) {
    for (size_t t = 0; t < 4; ++t) example.k.Row(t)[d] = kKeyRows[t][d];
    example.q.Row(0)[d] = kQuery[d];
  }
  return example;
}

}  // namespace kvtier::ctl::eval
