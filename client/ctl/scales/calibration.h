// SPDX-License-Identifier: Apache-2.0
//
// From dumps of keys and values to a scale set.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/ctl/scales/scale_set_file.h"
#include "client/ctl/tensors/npy.h"
#include "client/ctl/tensors/tensor.h"
#include "kernels/calibrate.h"

namespace kvtier::ctl {

// K and V of one layer as a model computed them, [token][kv head][dim], K as it is cached: after
// RoPE. Both have the same shape; K and V may differ in type.
struct LayerDump {
  Tensor k;
  Tensor v;
};

// The layers of one dump, in order. Tensors are [token][dim] (one layer of one kv head),
// [token][kv head][dim] (one layer) or [layer][token][kv head][dim].
// Errors: those of ReadNpy; INVALID_ARGUMENT naming the tensor for other shapes, or if K and V
// differ.
absl::StatusOr<std::vector<LayerDump>> ReadNpyLayers(const std::string& k_path,
                                                     const std::string& v_path,
                                                     const NpyOptions& options);
// From the tensors "k" and "v", shaped as above, or "layers.N.k" and "layers.N.v" with N from 0,
// each [token][kv head][dim]; token counts of layers may differ then. Other tensors are ignored.
// Errors: those of SafetensorsFile; INVALID_ARGUMENT as above, or if none of these tensors is
// there.
absl::StatusOr<std::vector<LayerDump>> ReadSafetensorsLayers(const std::string& path);

struct ScaleChoice {
  kernels::ScaleSearch search = kernels::ScaleSearch::kAmax6;
  kernels::TransformOptions transform = {};
};

// Collects statistics over any number of dumps of one model. Thread-compatible; blocks while it
// reads.
class Calibration {
 public:
  // What FP8 values of K and of V are multiplied with; 0: FP8 is refused, for its scale is not in
  // the file.
  struct Fp8Scales {
    float k = 0.0F;
    float v = 0.0F;
  };

  // Adds one dump; the first one fixes the shape. Nothing is added on an error. Errors:
  // INVALID_ARGUMENT for a shape that the format does not have or that is not that of the first;
  // UNIMPLEMENTED for a type that kernels do not read.
  absl::Status Add(std::span<const LayerDump> layers, const Fp8Scales& fp8_scales);

  // The scales of what was added. Errors: FAILED_PRECONDITION naming layer and kv head if nothing
  // finite was added, or too few tokens for a transform; INVALID_ARGUMENT for a bad choice.
  absl::StatusOr<ScaleSetData> Choose(const ScaleChoice& choice) const;

  // Of the layer that had the fewest.
  uint64_t token_count() const;
  // Values that were left out, of K and V together.
  uint64_t nonfinite_count() const;

 private:
  using Stats = std::vector<kernels::ChannelStats>;

  std::span<kernels::ChannelStats> HeadOf(Stats* stats, size_t head) const;
  std::span<const kernels::ChannelStats> HeadOf(const Stats& stats, size_t head) const;
  absl::Status Observe(const Tensor& tensor, size_t layer, float fp8_scale, Stats* stats);
  absl::Status ChooseHead(const ScaleChoice& choice, size_t head, ScaleSetData* scales) const;

  uint32_t kv_head_count_ = 0;
  uint32_t head_dim_ = 0;
  std::vector<uint64_t> token_counts_;  // [layer]
  Stats k_;                             // [layer][kv head][dim]
  Stats v_;
};

}  // namespace kvtier::ctl
