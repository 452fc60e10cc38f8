// SPDX-License-Identifier: Apache-2.0
#include "client/ctl/scales/calibration.h"

#include <algorithm>
#include <optional>

#include "absl/strings/str_join.h"
#include "client/ctl/tensors/safetensors.h"
#include "proto/base/status_util.h"

namespace kvtier::ctl {
namespace {

using kernels::ChannelStats;

std::string ShapeText(const Tensor& tensor) {
  return "[" + absl::StrJoin(tensor.shape, ", ") + "]";
}

// Cuts a tensor of 2, 3 or 4 dimensions into layers of [token][kv head][dim].
absl::StatusOr<std::vector<Tensor>> SplitLayers(const Tensor& tensor) {
  std::vector<uint64_t> shape = tensor.shape;
  if (shape.size() == 2) shape.insert(shape.begin() + 1, 1);
  if (shape.size() == 3) shape.insert(shape.begin(), 1);
  if (shape.size() != 4 || ElementCountOf(shape).value_or(0) == 0) {
    return Invalid(
        "%s: shape %s; needed is [token][dim], [token][kv head][dim] or "
        "[layer][token][kv head][dim]",
        tensor.Where(), ShapeText(tensor));
  }
  // Before there is a tensor for each: a file of holes may claim any number.
  if (const absl::Status status = CheckChannelCount(shape[0], shape[2], shape[3]); !status.ok()) {
    return Annotate(status, absl::StrFormat("%s: shape %s", tensor.Where(), ShapeText(tensor)));
  }
  std::vector<Tensor> layers(shape[0], tensor);
  const size_t layer_bytes = tensor.bytes.size() / shape[0];
  for (size_t i = 0; i < layers.size(); ++i) {
    layers[i].shape = {shape[1], shape[2], shape[3]};
    layers[i].bytes = tensor.bytes.subspan(i * layer_bytes, layer_bytes);
  }
  return layers;
}

absl::StatusOr<std::vector<LayerDump>> Pair(const Tensor& k, const Tensor& v) {
  if (k.shape != v.shape) {
    return Invalid("%s: shape %s, but V is %s", k.Where(), ShapeText(k), ShapeText(v));
  }
  KVT_ASSIGN_OR_RETURN(std::vector<Tensor> k_layers, SplitLayers(k));
  KVT_ASSIGN_OR_RETURN(std::vector<Tensor> v_layers, SplitLayers(v));
  std::vector<LayerDump> layers(k_layers.size());
  for (size_t i = 0; i < layers.size(); ++i) {
    layers[i] = {.k = std::move(k_layers[i]), .v = std::move(v_layers[i])};
  }
  return layers;
}

// Whether kernels can read the values of one side.
absl::Status CheckType(const Tensor& tensor, float fp8_scale) {
  KVT_ASSIGN_OR_RETURN(const kernels::ElementType type, KernelTypeOf(tensor));
  if (type == kernels::ElementType::kFp8E4m3 && fp8_scale == 0.0F) {
    return Invalid("%s: FP8 values need their scale", tensor.Where());
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::vector<LayerDump>> ReadNpyLayers(const std::string& k_path,
                                                     const std::string& v_path,
                                                     const NpyOptions& options) {
  KVT_ASSIGN_OR_RETURN(const Tensor k, ReadNpy(k_path, options));
  KVT_ASSIGN_OR_RETURN(const Tensor v, ReadNpy(v_path, options));
  return Pair(k, v);
}

absl::StatusOr<std::vector<LayerDump>> ReadSafetensorsLayers(const std::string& path) {
  KVT_ASSIGN_OR_RETURN(const SafetensorsFile file, SafetensorsFile::Open(path));
  if (file.Find("k").ok()) {
    KVT_ASSIGN_OR_RETURN(const Tensor v, file.Find("v"));
    return Pair(*file.Find("k"), v);
  }
  std::vector<LayerDump> layers;
  while (true) {
    const std::string prefix = absl::StrFormat("layers.%d.", layers.size());
    const auto k = file.Find(prefix + "k");
    if (!k.ok()) break;
    KVT_ASSIGN_OR_RETURN(const Tensor v, file.Find(prefix + "v"));
    KVT_ASSIGN_OR_RETURN(const std::vector<LayerDump> layer, Pair(*k, v));
    if (layer.size() != 1) return Invalid("%s: more than one layer", k->Where());
    layers.push_back(layer[0]);
  }
  if (layers.empty()) {
    return Invalid("%s: no tensors k and v, or layers.0.k and layers.0.v", path);
  }
  return layers;
}

std::span<ChannelStats> Calibration::HeadOf(Stats* stats, size_t head) const {
  return std::span(*stats).subspan(head * head_dim_, head_dim_);
}

std::span<const ChannelStats> Calibration::HeadOf(const Stats& stats, size_t head) const {
  return std::span(stats).subspan(head * head_dim_, head_dim_);
}

absl::Status Calibration::Add(std::span<const LayerDump> layers, const Fp8Scales& fp8_scales) {
  if (layers.empty()) return Invalid("a dump without layers");
  const std::vector<uint64_t>& first = layers[0].k.shape;
  const kernels::BlockShape shape{
      .layer_count = static_cast<uint32_t>(std::min<size_t>(layers.size(), UINT32_MAX)),
      .kv_head_count = static_cast<uint32_t>(std::min<uint64_t>(first[1], UINT32_MAX)),
      .block_tokens = kernels::kBlockTokensMin,
      .head_dim = static_cast<uint32_t>(std::min<uint64_t>(first[2], UINT32_MAX))};
  if (const kernels::Status valid = kernels::Validate(shape); !valid.ok()) {
    return Invalid("%s: shape %s: %s", layers[0].k.Where(), ShapeText(layers[0].k),
                   valid.message());
  }
  KVT_RETURN_IF_ERROR(CheckChannelCount(layers.size(), first[1], first[2]));
  if (token_counts_.empty()) {
    kv_head_count_ = shape.kv_head_count;
    head_dim_ = shape.head_dim;
    token_counts_.resize(layers.size());
    k_.resize(layers.size() * kv_head_count_ * head_dim_);
    v_.resize(k_.size());
  }
  for (const LayerDump& layer : layers) {
    if (layers.size() != token_counts_.size() || layer.k.shape[1] != kv_head_count_ ||
        layer.k.shape[2] != head_dim_) {
      return Invalid("%s: %d layers of %s, but the first had %d of %d kv heads and head dim %d",
                     layer.k.Where(), layers.size(), ShapeText(layer.k), token_counts_.size(),
                     kv_head_count_, head_dim_);
    }
    KVT_RETURN_IF_ERROR(CheckType(layer.k, fp8_scales.k));
    KVT_RETURN_IF_ERROR(CheckType(layer.v, fp8_scales.v));
  }
  for (size_t i = 0; i < layers.size(); ++i) {
    KVT_RETURN_IF_ERROR(Observe(layers[i].k, i, fp8_scales.k, &k_));
    KVT_RETURN_IF_ERROR(Observe(layers[i].v, i, fp8_scales.v, &v_));
    token_counts_[i] += layers[i].k.shape[0];
  }
  return absl::OkStatus();
}

absl::Status Calibration::Observe(const Tensor& tensor, size_t layer, float fp8_scale,
                                  Stats* stats) {
  KVT_ASSIGN_OR_RETURN(const kernels::ElementType type, KernelTypeOf(tensor));
  const bool is_fp8 = type == kernels::ElementType::kFp8E4m3;
  const uint64_t row_elements = uint64_t{kv_head_count_} * head_dim_;
  const uint64_t element_bytes = kernels::ElementBytes(type);
  constexpr uint64_t kTokensMax = uint64_t{1} << 30;
  for (uint64_t begin = 0; begin < tensor.shape[0]; begin += kTokensMax) {
    const auto count = static_cast<uint32_t>(std::min(tensor.shape[0] - begin, kTokensMax));
    for (size_t h = 0; h < kv_head_count_; ++h) {
      const kernels::ConstRows rows{
          .type = type,
          .data = tensor.bytes.data() + (begin * row_elements + h * head_dim_) * element_bytes,
          .token_stride = row_elements,
          .scale = is_fp8 ? fp8_scale : 1.0F};
      const kernels::Status status =
          kernels::Observe(rows, count, HeadOf(stats, layer * kv_head_count_ + h));
      if (!status.ok()) return Invalid("%s: %s", tensor.Where(), status.message());
    }
  }
  return absl::OkStatus();
}

absl::Status Calibration::ChooseHead(const ScaleChoice& choice, size_t head,
                                     ScaleSetData* scales) const {
  const auto k = HeadOf(k_, head);
  const auto v = HeadOf(v_, head);
  const auto is_empty = [](const ChannelStats& channel) { return channel.count == 0; };
  if (std::all_of(k.begin(), k.end(), is_empty) || std::all_of(v.begin(), v.end(), is_empty)) {
    return FailedPrecondition("no finite value was seen");
  }
  const auto channels_of = [&](std::vector<float>* vector) {
    return vector->empty() ? std::span<float>()
                           : std::span(*vector).subspan(head * head_dim_, head_dim_);
  };
  const auto mean = channels_of(&scales->k_mean);
  const auto smooth = channels_of(&scales->k_smooth);
  if (!mean.empty() || !smooth.empty()) {
    const kernels::Status status = kernels::ChooseTransform(k, choice.transform, mean, smooth);
    if (!status.ok()) return FailedPrecondition("%s", status.message());
  }
  float amax = 0.0F;
  kernels::Status status = kernels::AmaxOf(k, mean, smooth, &amax);
  if (status.ok()) status = kernels::GlobalScaleFromAmax(amax, &scales->g_k[head]);
  if (status.ok()) status = kernels::AmaxOf(v, {}, {}, &amax);
  if (status.ok()) status = kernels::GlobalScaleFromAmax(amax, &scales->g_v[head]);
  return status.ok() ? absl::OkStatus() : FailedPrecondition("%s", status.message());
}

absl::StatusOr<ScaleSetData> Calibration::Choose(const ScaleChoice& choice) const {
  if (token_counts_.empty()) return FailedPrecondition("nothing was added");
  const float alpha = choice.transform.smooth_alpha;
  if (!(alpha >= 0.0F && alpha <= 1.0F)) return Invalid("smoothing by %g; allowed 0 to 1", alpha);
  ScaleSetData scales{.layer_count = static_cast<uint32_t>(token_counts_.size()),
                      .kv_head_count = kv_head_count_,
                      .head_dim = head_dim_,
                      .search = choice.search};
  const size_t head_count = token_counts_.size() * kv_head_count_;
  scales.g_k.resize(head_count);
  scales.g_v.resize(head_count);
  if (choice.transform.mean) scales.k_mean.resize(k_.size());
  if (alpha > 0.0F) scales.k_smooth.resize(k_.size());
  for (size_t head = 0; head < head_count; ++head) {
    const absl::Status status = ChooseHead(choice, head, &scales);
    if (!status.ok()) {
      return Annotate(status,
                      absl::StrFormat("layer %d, kv head %d (%d tokens)", head / kv_head_count_,
                                      head % kv_head_count_, token_counts_[head / kv_head_count_]));
    }
  }
  return scales;
}

uint64_t Calibration::token_count() const {
  return token_counts_.empty() ? 0 : *std::min_element(token_counts_.begin(), token_counts_.end());
}

uint64_t Calibration::nonfinite_count() const {
  uint64_t count = 0;
  for (const Stats* stats : {&k_, &v_}) {
    for (const ChannelStats& channel : *stats) count += channel.nonfinite_count;
  }
  return count;
}

}  // namespace kvtier::ctl
