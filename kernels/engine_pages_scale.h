// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_KERNELS_ENGINE_PAGES_SCALE_H_
#define KVTIER_KERNELS_ENGINE_PAGES_SCALE_H_

#include <cstdint>

#include "kernels/status.h"

// Global scales as other engines and checkpoints state them. A stored element stands for
//
//   value = e2m1(code) * e4m3(scale byte) * g
//
// with g the multiplier that the writer of the page divided by. The page does not hold g, and the
// number called "k_scale" is made from the largest magnitude of the calibration (amax) in different
// ways that are not compatible. Two questions, two functions:
//
//   What multiplies the bytes of a page?      ToDequantMultiplier, of the number that the kernels
//                                             which wrote the page were given.
//   What would another loader have made of    ConvertGlobalScale, between the conventions of the
//   the same calibration?                     checkpoint and of the engine.
//
// An engine that hands a checkpoint's number to its kernels unchanged needs the first only. One
// that rescales on loading needs both: SGLang on SM100 multiplies amax / 2688 by 6, so the pages it
// writes have g = ConvertGlobalScale(k_scale, kAmaxOver2688, kAmaxOver448).
//
// Who uses what, and where it was read: docs/engine-pages.md. All functions are pure and
// thread-safe.

namespace kvtier::kernels {

enum class GlobalScaleConvention : uint8_t {
  kDequantMultiplier = 0,  // g itself, whatever it was made from.
  kAmaxOver2688 = 1,       // amax / (448 * 6): block scales use all of E4M3.
  kAmaxOver448 = 2,        // e2m1 * e4m3 fits E4M3, for kernels that compute in FP8.
  kAmaxOver6 = 3,          // As for E2M1 without block scales.
  kEncodeScale = 4,        // 2688 / amax: what a quantizer multiplies by. The inverse of g.
};

// The global scales of one (layer, kv head), as multipliers.
struct GlobalScales {
  float k;
  float v;
};

// Sets *g to the multiplier of pages whose writing kernels were given `value`: value itself, and
// 1 / value for kEncodeScale. Such kernels scale a block by amax_of_block / 6 / g, so they accept
// any g, and how it was chosen leaves no trace in the bytes.
// Errors: kInvalidArgument if value or the result is not finite and above 0, or the convention is
// unknown; *g is untouched.
Status ToDequantMultiplier(float value, GlobalScaleConvention convention, float* g);

// The inverse: the number that kernels of this convention must be given to read an exported page
// whose tile has global scale g. Exact for the powers of two of kvtier. Errors: as above.
Status FromDequantMultiplier(float g, GlobalScaleConvention convention, float* value);

// Sets *converted to what the same calibration is under `to`; one rounding. For example 6 * value
// from kAmaxOver2688 to kAmaxOver448.
// Errors: kInvalidArgument as above, and for kDequantMultiplier, from which no amax follows.
Status ConvertGlobalScale(float value, GlobalScaleConvention from, GlobalScaleConvention to,
                          float* converted);

}  // namespace kvtier::kernels

#endif  // KVTIER_KERNELS_ENGINE_PAGES_SCALE_H_
