// SPDX-License-Identifier: Apache-2.0
#include "kernels/calibrate.h"

#include <algorithm>
#include <cmath>

#include "kernels/nvfp4.h"
#include "kernels/rows.h"
#include "kernels/tile_layout.h"

namespace kvtier::kernels {
namespace {

// The smallest magnitude that BF16 rounds to infinity, a tie with the even side.
constexpr float kBf16Overflow = 0x1.FFp127F;

// Tokens whose values are summed in plain FP64 before the sum is added with compensation. Of BF16
// values (8 significant bits) it is exact unless their exponents span more than 37.
constexpr uint32_t kChunkTokens = 256;

// sum + rest += x, with what the addition loses kept in rest (Knuth's two-sum).
void TwoSum(double x, double* sum, double* rest) {
  const double total = *sum + x;
  const double x_part = total - *sum;
  *rest += (*sum - (total - x_part)) + (x - x_part);
  *sum = total;
}

// One pass over a few tokens, one array a quantity so that the loops vectorize.
struct Chunk {
  double sum[kHeadDimMax] = {};
  float min[kHeadDimMax];
  float max[kHeadDimMax];
  uint32_t finite_count[kHeadDimMax] = {};

  Chunk() {
    std::fill_n(min, kHeadDimMax, std::numeric_limits<float>::infinity());
    std::fill_n(max, kHeadDimMax, -std::numeric_limits<float>::infinity());
  }

  void AddRow(const float* row, uint32_t dim_count) {
    for (uint32_t d = 0; d < dim_count; ++d) {
      const bool finite = std::fabs(row[d]) < kBf16Overflow;  // False for NaN.
      // + 0 turns -0 into 0: which of the two came first must not show.
      const float x = finite ? row[d] + 0.0F : 0.0F;
      const float low = finite ? x : std::numeric_limits<float>::infinity();
      const float high = finite ? x : -std::numeric_limits<float>::infinity();
      sum[d] += static_cast<double>(x);
      min[d] = low < min[d] ? low : min[d];
      max[d] = high > max[d] ? high : max[d];
      finite_count[d] += finite ? 1U : 0U;
    }
  }

  void AddTo(uint32_t token_count, std::span<ChannelStats> channels) const {
    for (size_t d = 0; d < channels.size(); ++d) {
      ChannelStats& channel = channels[d];
      channel.count += finite_count[d];
      channel.nonfinite_count += token_count - finite_count[d];
      channel.min = std::min(channel.min, min[d]);
      channel.max = std::max(channel.max, max[d]);
      TwoSum(sum[d], &channel.sum, &channel.sum_rest);
    }
  }
};

// The largest magnitude of what seal makes of a channel's values. x -> (x - mean) * inverse is
// monotone as computed, rounding to BF16 too: the extremes go to the extremes.
float ChannelAmax(const ChannelStats& channel, float mean, float inverse_smooth) {
  if (channel.count == 0) return 0.0F;
  return std::max(std::fabs((channel.min - mean) * inverse_smooth),
                  std::fabs((channel.max - mean) * inverse_smooth));
}

// log2 of the factor of each channel, before rounding: alpha * log2(amax), less its mean.
void SmoothExponents(std::span<const ChannelStats> k, std::span<const float> k_mean, float alpha,
                     double* exponents) {
  float amax[kHeadDimMax];
  float largest = 0.0F;
  for (size_t d = 0; d < k.size(); ++d) {
    amax[d] = ChannelAmax(k[d], k_mean.empty() ? 0.0F : k_mean[d], 1.0F);
    largest = std::max(largest, amax[d]);
  }
  std::fill_n(exponents, k.size(), 0.0);
  // An amax that overflowed around its mean says nothing about the others.
  if (largest == 0.0F || !std::isfinite(largest)) return;
  double sum = 0.0;
  for (size_t d = 0; d < k.size(); ++d) {
    const double floored = std::max(amax[d], largest / kSmoothRangeMax);
    exponents[d] = static_cast<double>(alpha) * std::log2(floored);
    sum += exponents[d];
  }
  for (size_t d = 0; d < k.size(); ++d) exponents[d] -= sum / static_cast<double>(k.size());
}

}  // namespace

Status Observe(const ConstRows& rows, uint32_t token_count, std::span<ChannelStats> channels) {
  if (channels.size() > kHeadDimMax) {
    return Status::InvalidArgument("more than 256 channels");
  }
  if (AnyIsNull(channels)) return NullSpan();
  const auto dim_count = static_cast<uint32_t>(channels.size());
  if (const Status status = ValidateRows(rows, token_count, dim_count); !status.ok()) return status;
  float row[kHeadDimMax];
  for (uint32_t begin = 0; begin < token_count;) {
    const uint32_t end = begin + std::min(token_count - begin, kChunkTokens);
    Chunk chunk;
    for (uint32_t t = begin; t < end; ++t) {
      LoadRow(rows, t, dim_count, row);
      if (rows.type == ElementType::kFp8E4m3) {
        for (uint32_t d = 0; d < dim_count; ++d) row[d] *= rows.scale;
      }
      chunk.AddRow(row, dim_count);
    }
    chunk.AddTo(end - begin, channels);
    begin = end;
  }
  return Status();
}

Status Merge(std::span<const ChannelStats> from, std::span<ChannelStats> into) {
  if (from.size() != into.size()) {
    return Status::InvalidArgument("stats of different head_dim");
  }
  if (AnyIsNull(from, into)) return NullSpan();
  for (size_t d = 0; d < from.size(); ++d) {
    into[d].count += from[d].count;
    into[d].nonfinite_count += from[d].nonfinite_count;
    into[d].min = std::min(into[d].min, from[d].min);
    into[d].max = std::max(into[d].max, from[d].max);
    TwoSum(from[d].sum, &into[d].sum, &into[d].sum_rest);
    into[d].sum_rest += from[d].sum_rest;
  }
  return Status();
}

double MeanOf(const ChannelStats& channel) {
  if (channel.count == 0) return 0.0;
  return (channel.sum + channel.sum_rest) / static_cast<double>(channel.count);
}

Status ChooseTransform(std::span<const ChannelStats> k, const TransformOptions& options,
                       std::span<float> k_mean, std::span<float> k_smooth) {
  if (!(options.smooth_alpha >= 0.0F && options.smooth_alpha <= 1.0F)) {
    return Status::InvalidArgument("smooth_alpha must be in [0, 1]");
  }
  if (k.size() > kHeadDimMax || k_mean.size() != (options.mean ? k.size() : 0) ||
      k_smooth.size() != (options.smooth_alpha > 0.0F ? k.size() : 0)) {
    return Status::InvalidArgument("k_mean and k_smooth must be head_dim long if asked for");
  }
  if (AnyIsNull(k, k_mean, k_smooth)) return NullSpan();
  const bool enough = std::all_of(k.begin(), k.end(), [&options](const ChannelStats& channel) {
    return channel.count >= options.token_count_min;
  });
  if (!enough) return Status::InvalidArgument("too few tokens for a mean or for smoothing");
  for (size_t d = 0; d < k_mean.size(); ++d) k_mean[d] = static_cast<float>(MeanOf(k[d]));
  if (k_smooth.empty()) return Status();
  double exponents[kHeadDimMax];
  SmoothExponents(k, k_mean, options.smooth_alpha, exponents);
  for (size_t d = 0; d < k_smooth.size(); ++d) {
    k_smooth[d] = std::ldexp(1.0F, static_cast<int>(std::lround(exponents[d])));
  }
  return Status();
}

Status AmaxOf(std::span<const ChannelStats> channels, std::span<const float> k_mean,
              std::span<const float> k_smooth, float* amax) {
  if (channels.size() > kHeadDimMax) return Status::InvalidArgument("more than 256 channels");
  if (amax == nullptr) return Status::InvalidArgument("a result pointer is required");
  if (AnyIsNull(channels)) return NullSpan();
  const auto dim_count = static_cast<uint32_t>(channels.size());
  if (const Status status = ValidateTransform(k_mean, k_smooth, dim_count); !status.ok()) {
    return status;
  }
  float largest = 0.0F;
  for (size_t d = 0; d < channels.size(); ++d) {
    largest = std::max(largest, ChannelAmax(channels[d], k_mean.empty() ? 0.0F : k_mean[d],
                                            k_smooth.empty() ? 1.0F : 1.0F / k_smooth[d]));
  }
  const bool is_transformed = !k_mean.empty() || !k_smooth.empty();
  *amax = is_transformed ? Bf16ToFloat(FloatToBf16(largest)) : largest;
  return Status();
}

}  // namespace kvtier::kernels
