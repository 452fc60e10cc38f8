// SPDX-License-Identifier: Apache-2.0
#include "kernels/engine_pages_scale.h"

#include <cmath>
#include <initializer_list>
#include <limits>

namespace kvtier::kernels {
namespace {

constexpr double kE2m1TimesE4m3Max = 6.0 * 448.0;

bool IsFiniteAboveZero(double x) { return std::isfinite(x) && x > 0.0; }

// Rounds to FP32; *out is untouched if nothing above 0 and finite is left.
Status Store(double result, float* out) {
  if (out == nullptr) return Status::InvalidArgument("a result pointer is required");
  // Compared before narrowing: beyond its range the conversion is undefined.
  if (result > static_cast<double>(std::numeric_limits<float>::max()) ||
      static_cast<float>(result) <= 0.0F) {
    return Status::InvalidArgument("a converted global scale is outside the range of FP32");
  }
  *out = static_cast<float>(result);
  return Status();
}

// What amax is divided by; 0 if amax does not follow from the value by a division.
double DivisorOf(GlobalScaleConvention convention) {
  switch (convention) {
    case GlobalScaleConvention::kAmaxOver2688:
      return kE2m1TimesE4m3Max;
    case GlobalScaleConvention::kAmaxOver448:
      return 448.0;
    case GlobalScaleConvention::kAmaxOver6:
      return 6.0;
    case GlobalScaleConvention::kDequantMultiplier:
    case GlobalScaleConvention::kEncodeScale:
      return 0.0;
  }
  return 0.0;
}

bool IsKnown(GlobalScaleConvention convention) {
  return convention <= GlobalScaleConvention::kEncodeScale;
}

// Both directions are the same map: the identity, or the reciprocal.
Status Reinterpret(float value, GlobalScaleConvention convention, float* out) {
  if (!IsKnown(convention)) return Status::InvalidArgument("unknown global scale convention");
  if (!IsFiniteAboveZero(static_cast<double>(value))) {
    return Status::InvalidArgument("a global scale is not finite and above 0");
  }
  const double x = static_cast<double>(value);
  return Store(convention == GlobalScaleConvention::kEncodeScale ? 1.0 / x : x, out);
}

}  // namespace

Status ToDequantMultiplier(float value, GlobalScaleConvention convention, float* g) {
  return Reinterpret(value, convention, g);
}

Status FromDequantMultiplier(float g, GlobalScaleConvention convention, float* value) {
  return Reinterpret(g, convention, value);
}

Status ConvertGlobalScale(float value, GlobalScaleConvention from, GlobalScaleConvention to,
                          float* converted) {
  for (const GlobalScaleConvention convention : {from, to}) {
    if (!IsKnown(convention)) return Status::InvalidArgument("unknown global scale convention");
    if (convention == GlobalScaleConvention::kDequantMultiplier) {
      return Status::InvalidArgument("kDequantMultiplier does not say what amax was");
    }
  }
  if (!IsFiniteAboveZero(static_cast<double>(value))) {
    return Status::InvalidArgument("a global scale is not finite and above 0");
  }
  const auto x = static_cast<double>(value);
  // An encode scale is 2688 / amax, and its own inverse is amax / 2688.
  const bool from_encode = from == GlobalScaleConvention::kEncodeScale;
  const bool to_encode = to == GlobalScaleConvention::kEncodeScale;
  if (from == to) return Store(x, converted);
  const double amax = from_encode ? kE2m1TimesE4m3Max / x : x * DivisorOf(from);
  return Store(to_encode ? kE2m1TimesE4m3Max / amax : amax / DivisorOf(to), converted);
}

}  // namespace kvtier::kernels
