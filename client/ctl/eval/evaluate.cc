// SPDX-License-Identifier: Apache-2.0
#include "client/ctl/eval/evaluate.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "client/ctl/eval/attention.h"
#include "proto/base/check.h"
#include "proto/base/status_util.h"

namespace kvtier::ctl::eval {
namespace {

// Attention over the data as it is.
struct Reference {
  Matrix scores;
  Matrix weights;
  Matrix output;
};

Reference ReferenceOf(const Head& head) {
  Reference reference;
  reference.scores = Scores(head.q, head.k, head.softmax_scale);
  reference.weights = Softmax(reference.scores);
  reference.output = WeightedSum(reference.weights, head.v);
  return reference;
}

absl::StatusOr<std::optional<double>> KernelError(const Head& head, const RoundTrip& stored,
                                                  const Matrix& output) {
  if (!stored.sealed.has_value()) return std::nullopt;
  const size_t token_count = stored.sealed->full_tile_token_count();
  if (token_count == 0) return std::nullopt;
  KVT_ASSIGN_OR_RETURN(const Matrix measured, stored.sealed->Attend(head.q, head.softmax_scale));
  if (token_count == stored.k.rows()) return RelativeMaxError(measured, output);
  const Matrix scores = Scores(head.q, stored.k.FirstRows(token_count), head.softmax_scale);
  return RelativeMaxError(measured, WeightedSum(Softmax(scores), stored.v.FirstRows(token_count)));
}

absl::StatusOr<Errors> Measure(const Head& head, const Reference& reference,
                               const RoundTrip& stored) {
  const Matrix scores = Scores(head.q, stored.k, head.softmax_scale);
  const Matrix weights = Softmax(scores);
  const Matrix output = WeightedSum(weights, stored.v);
  Errors errors;
  errors.bytes_per_value = stored.bytes_per_value;
  errors.k = RelativeError(stored.k, head.k);
  errors.v = RelativeError(stored.v, head.v);
  errors.scores = RelativeScoreError(scores, reference.scores);
  errors.output = RelativeError(output, reference.output);
  errors.k_only_output = RelativeError(WeightedSum(weights, head.v), reference.output);
  errors.v_only_output = RelativeError(WeightedSum(reference.weights, stored.v), reference.output);
  KVT_ASSIGN_OR_RETURN(errors.kernel, KernelError(head, stored, output));
  return errors;
}

void AddTo(const Errors& errors, Errors* sum) {
  sum->bytes_per_value += errors.bytes_per_value;
  sum->k += errors.k;
  sum->v += errors.v;
  sum->scores += errors.scores;
  sum->output += errors.output;
  sum->k_only_output += errors.k_only_output;
  sum->v_only_output += errors.v_only_output;
  if (errors.kernel.has_value()) {
    sum->kernel = std::max(sum->kernel.value_or(0.0), *errors.kernel);
  }
}

Errors Divided(Errors sum, double count) {
  for (double* value : {&sum.bytes_per_value, &sum.k, &sum.v, &sum.scores, &sum.output,
                        &sum.k_only_output, &sum.v_only_output}) {
    *value /= count;
  }
  return sum;
}

ExampleSide SideOf(const Matrix& stored, const Matrix& k, const Matrix& exact_scores,
                   const Matrix& q) {
  const Matrix scores = Scores(q, stored, 1.0);
  ExampleSide side;
  side.scores.assign(scores.values().begin(), scores.values().end());
  for (size_t t = 0; t < side.scores.size(); ++t) {
    side.max_error = std::max(side.max_error, std::abs(side.scores[t] - exact_scores.Row(0)[t]));
  }
  side.k_error = RelativeError(stored, k);
  return side;
}

}  // namespace

Evaluation::Evaluation(std::span<const Method> methods, std::function<void()> step)
    : step_(std::move(step)) {
  for (const Method& method : methods) sums_.push_back({.method = method});
}

absl::Status Evaluation::Add(const Layer& layer) {
  LayerAmax layer_amax;
  for (const Head& head : layer.heads) {
    layer_amax.k = std::max(layer_amax.k, Amax(RoundToBf16(head.k)));
    layer_amax.v = std::max(layer_amax.v, Amax(RoundToBf16(head.v)));
  }
  for (const Head& head : layer.heads) KVT_RETURN_IF_ERROR(AddHead(head, layer_amax));
  return absl::OkStatus();
}

absl::Status Evaluation::AddHead(const Head& head, const LayerAmax& layer_amax) {
  const Reference reference = ReferenceOf(head);
  // An engine computes K and V in BF16: that is what every method is given.
  const Matrix k = RoundToBf16(head.k);
  const Matrix v = RoundToBf16(head.v);
  for (MethodResult& sum : sums_) {
    const absl::StatusOr<RoundTrip> stored = Apply(sum.method, k, v, layer_amax);
    if (absl::IsUnimplemented(stored.status())) {
      sum.skipped = FromAbsl(stored.status().message());
    } else {
      KVT_RETURN_IF_ERROR(stored.status());
      KVT_ASSIGN_OR_RETURN(const Errors errors, Measure(head, reference, *stored));
      AddTo(errors, &sum.errors);
    }
    if (step_) step_();
  }
  ++head_count_;
  return absl::OkStatus();
}

std::vector<MethodResult> Evaluation::Results() const {
  KVT_CHECK(head_count_ > 0);
  std::vector<MethodResult> results = sums_;
  for (MethodResult& result : results) result.errors = Divided(result.errors, head_count_);
  return results;
}

ExampleResult RunWorkedExample() {
  const WorkedExample example = MakeWorkedExample();
  const IntFormat format{.bits = 2, .group = 4, .fp16_metadata = false};
  const Matrix exact_scores = Scores(example.q, example.k, 1.0);
  ExampleResult result{.k = example.k, .q = example.q};
  result.exact_scores.assign(exact_scores.values().begin(), exact_scores.values().end());
  result.per_token = SideOf(IntAsymmetric(example.k, format), example.k, exact_scores, example.q);
  result.per_channel =
      SideOf(IntAsymmetricPerChannel(example.k, format), example.k, exact_scores, example.q);
  return result;
}

}  // namespace kvtier::ctl::eval
