// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "client/ctl/eval/dataset.h"
#include "client/ctl/eval/quantizers.h"
#include "client/ctl/eval/sealed_head.h"

namespace kvtier::ctl::eval {

enum class Format : uint8_t { kBf16, kFp8, kNvfp4, kMxfp4, kInt4, kInt2 };

// Where scales come from.
enum class Calibration : uint8_t {
  kUnit,    // 1.0
  kTensor,  // the largest magnitude of all kv heads of the layer
  kHead,    // the largest magnitude of the kv head
  kToken,   // of each token, as it arrives
};

// A way to store K and V. `name` is part of the interface (command line, JSON).
struct Method {
  std::string_view name;
  std::string_view summary;
  Format format = Format::kBf16;
  Calibration calibration = Calibration::kHead;  // FP8 and NVFP4
  kernels::ScaleSearch search = kernels::ScaleSearch::kAmax6;
  bool mean = false;          // of K
  float smooth_alpha = 0.0F;  // of K, see kernels::TransformOptions
  bool rotated = false;       // K and V, random signs and a Hadamard transform
  bool stochastic = false;    // rounding
  E8m0Rule e8m0 = E8m0Rule::kFloor;
  bool kivi = false;  // keys per channel; otherwise per token
  // The last tokens stay in BF16.
  uint32_t window_token_count = 0;
};

// All methods, in the order in which they are shown.
std::span<const Method> AllMethods();
// Comma-separated names, in the order given. Errors: INVALID_ARGUMENT for an unknown name.
absl::StatusOr<std::vector<Method>> ParseMethods(std::string_view list);

// What a reader gets back of one kv head.
struct RoundTrip {
  Matrix k;
  Matrix v;
  // Bytes of a stored value with its share of the metadata of its group, row or vector, K and V
  // averaged. What a whole head shares is not counted.
  double bytes_per_value = 0.0;
  // NVFP4 as the product stores it: the tiles, to run the product's attention on.
  std::optional<SealedHead> sealed = std::nullopt;
};

// The largest magnitudes of a layer, for per-tensor scales.
struct LayerAmax {
  double k = 0.0;
  double v = 0.0;
};

// `k` and `v` are [token][dim] and hold BF16 values. Errors: UNIMPLEMENTED if the method does not
// exist for this head dim.
absl::StatusOr<RoundTrip> Apply(const Method& method, const Matrix& k, const Matrix& v,
                                const LayerAmax& layer_amax);

}  // namespace kvtier::ctl::eval
