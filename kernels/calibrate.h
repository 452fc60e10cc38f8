// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_KERNELS_CALIBRATE_H_
#define KVTIER_KERNELS_CALIBRATE_H_

#include <cstdint>
#include <limits>
#include <span>

#include "kernels/element.h"
#include "kernels/status.h"

// From keys and values that a model computed to the scales they are sealed with: observe rows,
// merge what several workers observed, choose the transform of K, take the largest magnitude, and
// give it to GlobalScaleFromAmax.
//
// The caller owns all storage; nothing here allocates or blocks. Functions are pure but for their
// outputs: thread-safe for disjoint ones. Results depend on the values and on the order of the
// calls only, not on the machine.

namespace kvtier::kernels {

// What has been observed of one channel (head dim) of K, or of V, of one (layer, kv head). All
// values are those that seal would quantize, in FP32 before rounding to BF16: FP8 ones times their
// scale. A plain value; the default is a channel that nobody has observed.
struct ChannelStats {
  uint64_t count = 0;            // Values counted into what follows.
  uint64_t nonfinite_count = 0;  // NaNs, infinities and what BF16 rounds to infinity: left out.
  float min = std::numeric_limits<float>::infinity();
  float max = -std::numeric_limits<float>::infinity();
  // The sum of the values is sum + sum_rest; the rest is what FP64 additions lost.
  double sum = 0.0;
  double sum_rest = 0.0;

  friend constexpr bool operator==(const ChannelStats&, const ChannelStats&) = default;
};

// Adds token_count rows to `channels`, which is [head_dim]. A value that is not finite is counted
// and left out by itself; its row still counts in the other channels. Rows may be of any type,
// strided and paged, as for SealTile.
// Errors: kInvalidArgument for a bad view, or more than 256 channels; nothing is changed then.
Status Observe(const ConstRows& rows, uint32_t token_count, std::span<ChannelStats> channels);

// Adds what `from` observed to `into`. Counts, min and max do not depend on the order of merges, to
// the bit. Means do, by less than 1e-12 of the mean magnitude of the values.
// Errors: kInvalidArgument if the spans differ in size.
Status Merge(std::span<const ChannelStats> from, std::span<ChannelStats> into);

// 0 for a channel without values.
double MeanOf(const ChannelStats& channel);

// How K is transformed before it is quantized (SealOptions). Outlier channels of K dominate the
// error of attention, and both parts fold into the query at no cost.
struct TransformOptions {
  // Subtracts the mean of each channel: for channels with a bias.
  bool mean = false;
  // Divides each channel by a power of two near amax^smooth_alpha, amax around the mean if that is
  // subtracted; 0: not. In [0, 1]; begin with 0.5. Relative errors of scores by `kvtierctl eval-kv`
  // (amax6; normal, 4 outlier channels, Student t4, t3 with outlier channels):
  //   0    .095 .193 .092 .155
  //   0.5  .095 .087 .093 .092
  //   1    .095 .094 .107 .116   single outliers of heavy tails decide how fine a channel is
  // Powers of two because then the division, and the multiplication of the query, are exact, and no
  // machine's pow() shows in the bytes.
  float smooth_alpha = 0.0F;
  // Channels with fewer values are refused: a mean of a few tokens is not that of the others.
  uint64_t token_count_min = 256;
};

// Largest ratio of two channels' amax that smoothing evens out; smaller channels are treated as if
// they had amax / 64 of the largest. A channel that was silent in calibration would otherwise be
// magnified without bound, and saturate when it is not.
inline constexpr float kSmoothRangeMax = 64.0F;

// Chooses the transform of one (layer, kv head) from the stats of its K. `k_mean` and `k_smooth`
// are [head_dim] if asked for and empty otherwise. The factors of smoothing have a geometric mean
// within a factor of sqrt(2) of 1, so that the range of K stays where it was; they are all 1 if K
// is all zeros. Errors: kInvalidArgument for spans of the wrong size, an alpha outside [0, 1], or a
// channel with fewer than token_count_min values; nothing is written then.
Status ChooseTransform(std::span<const ChannelStats> k, const TransformOptions& options,
                       std::span<float> k_mean, std::span<float> k_smooth);

// Sets *amax to the largest magnitude that seal quantizes of the values observed, under the
// transform (both spans may be empty): exactly that of the values, since every step of seal keeps
// their order. Without a transform it is that before rounding to BF16. 0 if there are no values.
// Errors: kInvalidArgument for a transform that SealOptions does not allow, or more than 256
// channels; *amax is untouched then.
Status AmaxOf(std::span<const ChannelStats> channels, std::span<const float> k_mean,
              std::span<const float> k_smooth, float* amax);

}  // namespace kvtier::kernels

#endif  // KVTIER_KERNELS_CALIBRATE_H_
