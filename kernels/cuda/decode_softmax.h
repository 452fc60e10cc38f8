// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_KERNELS_CUDA_DECODE_SOFTMAX_H_
#define KVTIER_KERNELS_CUDA_DECODE_SOFTMAX_H_

#include <cstdint>

#include "kernels/cuda/decode_params.h"
#include "kernels/cuda/decode_ring.h"
#include "kernels/cuda/primitives.h"

// Scores and what the rows of a pass see. Scores are in units of log2: weights are powers of 2.

namespace kvtier::kernels::cuda::inline KVTIER_CUDA_FLAVOUR {

inline constexpr float kLog2E = 1.4426950408889634F;
inline constexpr float kLn2 = 0.6931471805599453F;

// Below every score that counts; a maximum that is still this has seen no token. Finite, so that
// differences with -inf are not NaN.
inline constexpr float kNoScore = -1e30F;
inline constexpr float kHiddenScore = -__builtin_huge_valf();

KVTIER_DEVICE uint32_t RowsOfHead(const DecodeParams& params) {
  return params.query_len * params.group_heads;
}
// Row among all query rows of the launch.
KVTIER_DEVICE uint64_t QueryRow(const DecodeParams& params, const DecodeItem& item, uint32_t row) {
  const uint64_t position = uint64_t{item.sequence} * params.query_len + row / params.group_heads;
  return position * params.kv_head_count * params.group_heads + item.kv_head * params.group_heads +
         row % params.group_heads;
}

// The last tokens of the context that a row does not see: at most 7.
KVTIER_DEVICE uint32_t HiddenTokens(const DecodeParams& params, uint32_t row) {
  return FloorSub(params.query_len - 1, row / params.group_heads);
}
// Tokens [WindowBegin(end), end) of the context that a row sees.
KVTIER_DEVICE uint32_t VisibleEnd(const DecodeParams& params, const DecodeItem& item,
                                  uint32_t row) {
  return FloorSub(item.sealed_tokens + item.tail_tokens, HiddenTokens(params, row));
}
KVTIER_DEVICE uint32_t WindowBegin(const DecodeParams& params, uint32_t end) {
  return params.window == 0 ? 0 : FloorSub(end, params.window);
}

// cap * tanh(score / cap), in log2 units; `inverse` is 1 / cap.
KVTIER_DEVICE float SoftCap(float score, float cap, float inverse) {
  const float x = score * kLn2 * inverse;
  const float square = x * x;
  // Small x, also that of a cap far above all scores: the form below would cancel.
  if (square < 0x1p-10F) {
    return score * FmaRn(square, FmaRn(square, 2.0F / 15.0F, -1.0F / 3.0F), 1.0F);
  }
  // tanh(x) = 1 - 2 / (e^2x + 1). An infinite power gives 1.
  const float power = Exp2(2.0F * kLog2E * x);
  return cap * kLog2E * (1.0F - 2.0F * Exp2(-Log2(power + 1.0F)));
}

}  // namespace kvtier::kernels::cuda::inline KVTIER_CUDA_FLAVOUR

#endif  // KVTIER_KERNELS_CUDA_DECODE_SOFTMAX_H_
