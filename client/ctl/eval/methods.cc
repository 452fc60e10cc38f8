// SPDX-License-Identifier: Apache-2.0
#include "client/ctl/eval/methods.h"

#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include "absl/strings/str_split.h"
#include "kernels/nvfp4.h"
#include "proto/base/check.h"
#include "proto/base/status_util.h"

namespace kvtier::ctl::eval {
namespace {

using kernels::ScaleSearch;

constexpr uint32_t kWindowTokens = 128;
constexpr float kSmoothSqrt = 0.5F;
constexpr float kSmoothAmax = 1.0F;
constexpr uint64_t kRotationSeed = 1;
constexpr uint64_t kRoundingSeedK = 2;
constexpr uint64_t kRoundingSeedV = 3;

constexpr Method kMethods[] = {
    {.name = "bf16", .summary = "as it is"},
    {.name = "fp8_unit",
     .summary = "E4M3, scale 1",
     .format = Format::kFp8,
     .calibration = Calibration::kUnit},
    {.name = "fp8_tensor",
     .summary = "E4M3, one scale for all kv heads",
     .format = Format::kFp8,
     .calibration = Calibration::kTensor},
    {.name = "fp8_head", .summary = "E4M3, a scale per kv head", .format = Format::kFp8},
    {.name = "fp8_token",
     .summary = "E4M3, an FP32 scale per token",
     .format = Format::kFp8,
     .calibration = Calibration::kToken},
    {.name = "nvfp4_unit",
     .summary = "NVFP4, global scale 1",
     .format = Format::kNvfp4,
     .calibration = Calibration::kUnit},
    {.name = "nvfp4", .summary = "NVFP4, calibrated global scale", .format = Format::kNvfp4},
    {.name = "nvfp4_4over6",
     .summary = "NVFP4, 4-over-6 scale search",
     .format = Format::kNvfp4,
     .search = ScaleSearch::kFourOverSix},
    {.name = "nvfp4_mean",
     .summary = "NVFP4, K without its mean",
     .format = Format::kNvfp4,
     .mean = true},
    {.name = "nvfp4_smooth",
     .summary = "NVFP4, K smoothed by sqrt(amax)",
     .format = Format::kNvfp4,
     .smooth_alpha = kSmoothSqrt},
    {.name = "nvfp4_smooth_amax",
     .summary = "NVFP4, K smoothed by amax",
     .format = Format::kNvfp4,
     .smooth_alpha = kSmoothAmax},
    {.name = "nvfp4_mean_smooth_4over6",
     .summary = "NVFP4, mean, sqrt(amax), 4-over-6",
     .format = Format::kNvfp4,
     .search = ScaleSearch::kFourOverSix,
     .mean = true,
     .smooth_alpha = kSmoothSqrt},
    {.name = "nvfp4_mean_smooth_amax_4over6",
     .summary = "NVFP4, mean, amax, 4-over-6",
     .format = Format::kNvfp4,
     .search = ScaleSearch::kFourOverSix,
     .mean = true,
     .smooth_alpha = kSmoothAmax},
    {.name = "nvfp4_hadamard",
     .summary = "NVFP4 of rotated K and V",
     .format = Format::kNvfp4,
     .rotated = true},
    {.name = "nvfp4_stochastic",
     .summary = "NVFP4, stochastic rounding",
     .format = Format::kNvfp4,
     .stochastic = true},
    {.name = "mxfp4", .summary = "MXFP4, OCP scale (floor)", .format = Format::kMxfp4},
    {.name = "mxfp4_ceil",
     .summary = "MXFP4, scale rounded up",
     .format = Format::kMxfp4,
     .e8m0 = E8m0Rule::kCeil},
    {.name = "int4_token", .summary = "INT4, K and V per token", .format = Format::kInt4},
    {.name = "int4_token_hadamard",
     .summary = "INT4 per token, rotated",
     .format = Format::kInt4,
     .rotated = true},
    {.name = "int4_kivi", .summary = "INT4, K per channel", .format = Format::kInt4, .kivi = true},
    {.name = "int4_kivi_window",
     .summary = "INT4 so, last 128 tokens BF16",
     .format = Format::kInt4,
     .kivi = true,
     .window_token_count = kWindowTokens},
    {.name = "int2_token", .summary = "INT2, K and V per token", .format = Format::kInt2},
    {.name = "int2_kivi", .summary = "INT2, K per channel", .format = Format::kInt2, .kivi = true},
    {.name = "int2_kivi_window",
     .summary = "INT2 so, last 128 tokens BF16",
     .format = Format::kInt2,
     .kivi = true,
     .window_token_count = kWindowTokens},
};

// Metadata of `bytes` for every `group` values of a run of `count`, per value.
double MetadataShare(size_t count, size_t group, double bytes) {
  const size_t group_count = (count + group - 1) / group;
  return static_cast<double>(group_count) * bytes / static_cast<double>(count);
}

float Fp8ScaleOf(Calibration calibration, double layer_amax, const Matrix& x) {
  if (calibration == Calibration::kUnit) return 1.0F;
  return Fp8Scale(calibration == Calibration::kTensor ? layer_amax : Amax(x));
}

RoundTrip ApplyFp8(const Method& method, const Matrix& k, const Matrix& v,
                   const LayerAmax& layer_amax) {
  if (method.calibration == Calibration::kToken) {
    return {.k = Fp8PerRow(k),
            .v = Fp8PerRow(v),
            .bytes_per_value = 1.0 + MetadataShare(k.cols(), k.cols(), sizeof(float))};
  }
  return {.k = Fp8(k, Fp8ScaleOf(method.calibration, layer_amax.k, k)),
          .v = Fp8(v, Fp8ScaleOf(method.calibration, layer_amax.v, v)),
          .bytes_per_value = 1.0};
}

absl::StatusOr<RoundTrip> ApplyNvfp4(const Method& method, const Matrix& k, const Matrix& v) {
  RoundTrip result;
  result.bytes_per_value = 0.5 + MetadataShare(k.cols(), kernels::kVectorDims, 1.0);
  if (const kernels::Status shape = kernels::Validate(kernels::TileShape{
          .block_tokens = kernels::kBlockTokensMin, .head_dim = static_cast<uint32_t>(k.cols())});
      !shape.ok()) {
    return Unimplemented("%s: %s", method.name, shape.message());
  }
  if (method.stochastic) {
    float g_k = 1.0F;
    float g_v = 1.0F;
    // The data was checked to be finite.
    KVT_CHECK(kernels::GlobalScaleFromAmax(static_cast<float>(Amax(k)), &g_k).ok());
    KVT_CHECK(kernels::GlobalScaleFromAmax(static_cast<float>(Amax(v)), &g_v).ok());
    result.k = Nvfp4Stochastic(k, g_k, kRoundingSeedK);
    result.v = Nvfp4Stochastic(v, g_v, kRoundingSeedV);
    return result;
  }
  KVT_ASSIGN_OR_RETURN(SealedHead sealed,
                       SealedHead::Seal(k, v,
                                        {.unit_scales = method.calibration == Calibration::kUnit,
                                         .search = method.search,
                                         .mean = method.mean,
                                         .smooth_alpha = method.smooth_alpha}));
  result.k = sealed.keys();
  result.v = sealed.values();
  result.sealed = std::move(sealed);
  return result;
}

RoundTrip ApplyMxfp4(const Method& method, const Matrix& k, const Matrix& v) {
  return {.k = Mxfp4(k, method.e8m0),
          .v = Mxfp4(v, method.e8m0),
          .bytes_per_value = 0.5 + MetadataShare(k.cols(), kMxGroup, 1.0)};
}

RoundTrip ApplyInt(const Method& method, const Matrix& k, const Matrix& v) {
  const IntFormat format{.bits = method.format == Format::kInt4 ? 4U : 2U};
  constexpr double kMetadataBytes = 4.0;  // FP16 scale and zero
  const double token_share = MetadataShare(v.cols(), format.group, kMetadataBytes);
  const double k_share =
      method.kivi ? MetadataShare(k.rows(), format.group, kMetadataBytes) : token_share;
  return {.k = method.kivi ? IntAsymmetricPerChannel(k, format) : IntAsymmetric(k, format),
          .v = IntAsymmetric(v, format),
          .bytes_per_value = format.bits / 8.0 + (k_share + token_share) / 2};
}

absl::StatusOr<RoundTrip> ApplyFormat(const Method& method, const Matrix& k, const Matrix& v,
                                      const LayerAmax& layer_amax) {
  switch (method.format) {
    case Format::kBf16:
      return RoundTrip{.k = k, .v = v, .bytes_per_value = 2.0};
    case Format::kFp8:
      return ApplyFp8(method, k, v, layer_amax);
    case Format::kNvfp4:
      return ApplyNvfp4(method, k, v);
    case Format::kMxfp4:
      return ApplyMxfp4(method, k, v);
    case Format::kInt4:
    case Format::kInt2:
      return ApplyInt(method, k, v);
  }
  return Internal("method %s has no format", method.name);
}

// The rows of `head`, then the last ones of `whole`.
Matrix WithLastRowsOf(const Matrix& whole, const Matrix& head) {
  Matrix result = whole;
  std::copy(head.values().begin(), head.values().end(), result.values().begin());
  return result;
}

}  // namespace

std::span<const Method> AllMethods() { return kMethods; }

absl::StatusOr<std::vector<Method>> ParseMethods(std::string_view list) {
  std::vector<Method> methods;
  for (const std::string& name : std::vector<std::string>(absl::StrSplit(ToAbsl(list), ','))) {
    const auto* found = std::find_if(std::begin(kMethods), std::end(kMethods),
                                     [&](const Method& method) { return method.name == name; });
    if (found == std::end(kMethods)) {
      std::string known;
      for (const Method& method : kMethods) {
        known += known.empty() ? "" : ", ";
        known += method.name;
      }
      return Invalid("method \"%s\" is unknown; there are %s", name, known);
    }
    methods.push_back(*found);
  }
  return methods;
}

absl::StatusOr<RoundTrip> Apply(const Method& method, const Matrix& k, const Matrix& v,
                                const LayerAmax& layer_amax) {
  const size_t window = std::min<size_t>(method.window_token_count, k.rows());
  if (window == k.rows() && window > 0) {
    return RoundTrip{.k = k, .v = v, .bytes_per_value = 2.0};
  }
  if (window > 0) {
    const size_t quantized = k.rows() - window;
    KVT_ASSIGN_OR_RETURN(RoundTrip result, ApplyFormat(method, k.FirstRows(quantized),
                                                       v.FirstRows(quantized), layer_amax));
    result.k = WithLastRowsOf(k, result.k);
    result.v = WithLastRowsOf(v, result.v);
    result.bytes_per_value = (result.bytes_per_value * static_cast<double>(quantized) +
                              2.0 * static_cast<double>(window)) /
                             static_cast<double>(k.rows());
    return result;
  }
  if (method.rotated) {
    KVT_ASSIGN_OR_RETURN(RoundTrip result, ApplyFormat(method, Rotated(k, kRotationSeed),
                                                       Rotated(v, kRotationSeed), layer_amax));
    result.k = RotatedBack(result.k, kRotationSeed);
    result.v = RotatedBack(result.v, kRotationSeed);
    result.sealed.reset();  // its attention would need rotated queries
    return result;
  }
  return ApplyFormat(method, k, v, layer_amax);
}

}  // namespace kvtier::ctl::eval
