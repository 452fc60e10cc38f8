// SPDX-License-Identifier: Apache-2.0
#include "kernels/scale_set.h"

#include <algorithm>
#include <cmath>

#include "kernels/rows.h"

namespace kvtier::kernels {
namespace {

bool IsScaleOf(SideFormat format, float g) {
  switch (format) {
    case SideFormat::kNvfp4:
      return IsValidGlobalScale(g);
    case SideFormat::kFp8:
      return g > 0.0F && std::isfinite(g) && std::isfinite(1.0F / g);
    case SideFormat::kBf16:
      return g == 1.0F;
  }
  return false;
}

Status ValidateTransform(const ScaleSet& set, uint64_t head_count) {
  for (const auto& vector : {set.k_mean, set.k_smooth}) {
    if (vector.empty()) continue;
    if (vector.size() != head_count * set.head_dim) {
      return Status::InvalidArgument("k_mean and k_smooth need a value per channel");
    }
    if (!std::all_of(vector.begin(), vector.end(), [](float x) { return std::isfinite(x); })) {
      return Status::InvalidArgument("k_mean and k_smooth must be finite");
    }
  }
  if (!std::all_of(set.k_smooth.begin(), set.k_smooth.end(),
                   [](float x) { return x > 0.0F && std::isfinite(1.0F / x); })) {
    return Status::InvalidArgument("k_smooth must be above 0 and have a finite reciprocal");
  }
  return Status();
}

std::span<const float> ChannelsOf(std::span<const float> vector, uint64_t first, uint64_t count) {
  return vector.empty() ? vector : vector.subspan(first, count);
}

}  // namespace

Status Validate(const ScaleSet& set) {
  const BlockShape shape{.layer_count = set.layer_count,
                         .kv_head_count = set.kv_head_count,
                         .block_tokens = kBlockTokensMin,
                         .head_dim = set.head_dim};
  if (const Status status = Validate(shape); !status.ok()) return status;
  if (set.search != ScaleSearch::kAmax6 && set.search != ScaleSearch::kFourOverSix) {
    return Status::InvalidArgument("unknown scale search");
  }
  if (AnyIsNull(set.g_k, set.g_v, set.k_mean, set.k_smooth, set.layer_formats)) return NullSpan();
  if (!set.layer_formats.empty() && set.layer_formats.size() != set.layer_count) {
    return Status::InvalidArgument("layer_formats needs a format per layer");
  }
  const uint64_t head_count = uint64_t{set.layer_count} * set.kv_head_count;
  if (set.g_k.size() != head_count || set.g_v.size() != head_count) {
    return Status::InvalidArgument("g_k and g_v need a value per layer and kv head");
  }
  for (uint64_t i = 0; i < head_count; ++i) {
    const LayerFormat format = LayerFormatOf(set, static_cast<uint32_t>(i / set.kv_head_count));
    if (const Status status = Validate(format); !status.ok()) return status;
    if (!IsScaleOf(format.k, set.g_k[i]) || !IsScaleOf(format.v, set.g_v[i])) {
      return Status::InvalidArgument(
          "a global scale is not a power of two in [2^-100, 2^100] (NVFP4), above 0 and "
          "finite with its reciprocal (FP8) or 1 (BF16)");
    }
  }
  return ValidateTransform(set, head_count);
}

SealOptions SealOptionsOf(const ScaleSet& set, uint32_t layer_idx, uint32_t kv_head_idx, Isa isa) {
  const uint64_t head = uint64_t{layer_idx} * set.kv_head_count + kv_head_idx;
  SealOptions options;
  options.g_k = set.g_k[head];
  options.g_v = set.g_v[head];
  options.search = set.search;
  options.isa = isa;
  options.k_mean = ChannelsOf(set.k_mean, head * set.head_dim, set.head_dim);
  options.k_smooth = ChannelsOf(set.k_smooth, head * set.head_dim, set.head_dim);
  return options;
}

void SetScales(const ScaleSet& set, DecodeArgs* args) {
  const uint64_t first = uint64_t{args->layer_idx} * set.kv_head_count;
  const uint64_t channel_count = uint64_t{set.kv_head_count} * set.head_dim;
  args->g_k = set.g_k.subspan(first, set.kv_head_count);
  args->g_v = set.g_v.subspan(first, set.kv_head_count);
  args->k_mean = ChannelsOf(set.k_mean, first * set.head_dim, channel_count);
  args->k_smooth = ChannelsOf(set.k_smooth, first * set.head_dim, channel_count);
  args->layer_formats = set.layer_formats;
}

void StaleScaleMonitor::Add(uint64_t vector_count, const SealStats& stats) {
  vector_count_ += vector_count;
  saturated_count_ += stats.saturated_count;
  if (vector_count_ < options_.window_vectors || vector_count_ == 0) return;
  share_ = static_cast<double>(saturated_count_) / static_cast<double>(vector_count_);
  vector_count_ = 0;
  saturated_count_ = 0;
}

}  // namespace kvtier::kernels
