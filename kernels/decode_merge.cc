// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/decode.h"
#include "kernels/rows.h"

namespace kvtier::kernels {

namespace {

constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();

}  // namespace

Status MergeDecode(std::span<const DecodePartial> partials, uint32_t query_head_count,
                   uint32_t head_dim, std::span<float> out, std::span<float> lse) {
  if (query_head_count == 0 || head_dim == 0) {
    return Status::InvalidArgument("query_head_count and head_dim must not be zero");
  }
  const uint64_t out_count = uint64_t{query_head_count} * head_dim;
  if (out.size() != out_count || lse.size() != query_head_count) {
    return Status::InvalidArgument("out or lse does not have the exact size");
  }
  if (AnyIsNull(partials, out, lse)) return NullSpan();
  for (const DecodePartial& partial : partials) {
    if (AnyIsNull(partial.out, partial.lse)) return NullSpan();
    if (partial.out.size() != out_count || partial.lse.size() != query_head_count) {
      return Status::InvalidArgument("a partial does not have the exact size");
    }
  }
  std::fill(out.begin(), out.end(), 0.0F);
  for (uint32_t h = 0; h < query_head_count; ++h) {
    float maximum = kNegativeInfinity;
    for (const DecodePartial& partial : partials) maximum = std::fmax(maximum, partial.lse[h]);
    float sum = 0.0F;
    for (const DecodePartial& partial : partials) {
      // An empty split is skipped, not multiplied by zero: its out may be anything.
      if (partial.lse[h] == kNegativeInfinity) continue;
      const float weight = std::exp(partial.lse[h] - maximum);
      sum += weight;
      for (uint64_t i = uint64_t{h} * head_dim; i < uint64_t{h + 1} * head_dim; ++i) {
        out[i] += weight * partial.out[i];
      }
    }
    if (sum == 0.0F) {
      lse[h] = kNegativeInfinity;
      continue;
    }
    for (uint64_t i = uint64_t{h} * head_dim; i < uint64_t{h + 1} * head_dim; ++i) out[i] /= sum;
    lse[h] = maximum + std::log(sum);
  }
  return Status();
}

}  // namespace kvtier::kernels
