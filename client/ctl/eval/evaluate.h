// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "client/ctl/eval/dataset.h"
#include "client/ctl/eval/methods.h"

namespace kvtier::ctl::eval {

// What a method does to the values and to attention. All but `kernel` are relative errors
// |approximate - exact| / |exact| against the data before it was rounded to BF16.
struct Errors {
  double bytes_per_value = 0.0;
  double k = 0.0;
  double v = 0.0;
  double scores = 0.0;         // after the mean over the tokens is taken off
  double output = 0.0;         // K and V quantized
  double k_only_output = 0.0;  // V exact
  double v_only_output = 0.0;  // K exact
  // NVFP4 as the product stores it: kernels::Decode against FP64 attention over the values that the
  // tiles stand for, largest difference relative to the largest magnitude, full tiles only.
  std::optional<double> kernel;
};

struct MethodResult {
  Method method;
  // Means over the kv heads; the largest for `kernel`.
  Errors errors = {};
  // Why the method was not run; `errors` is then empty.
  std::string skipped = {};
};

// Runs methods over the kv heads of one dataset, layer by layer. Holds sums only. Single-thread.
class Evaluation {
 public:
  // `step` is called after each (kv head, method).
  explicit Evaluation(std::span<const Method> methods, std::function<void()> step = {});

  // Blocks for as long as it computes. Errors: those of the kernels, which refuse nothing that
  // ReadDump accepts and MakeSynthetic makes.
  absl::Status Add(const Layer& layer);

  // In the order of the methods. Requires: one layer added, or more.
  std::vector<MethodResult> Results() const;

 private:
  absl::Status AddHead(const Head& head, const LayerAmax& layer_amax);

  std::vector<MethodResult> sums_;
  uint32_t head_count_ = 0;
  std::function<void()> step_;
};

// The worked example, by the quantizers that the methods use.
struct ExampleSide {
  std::vector<double> scores;  // q.k, not scaled
  double max_error = 0.0;      // of a score
  double k_error = 0.0;        // relative
};
struct ExampleResult {
  Matrix k;
  Matrix q;
  std::vector<double> exact_scores = {};
  ExampleSide per_token = {};
  ExampleSide per_channel = {};
};
ExampleResult RunWorkedExample();

}  // namespace kvtier::ctl::eval
