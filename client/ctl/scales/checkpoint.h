// SPDX-License-Identifier: Apache-2.0
//
// The scales of K and V that quantization tools store in checkpoints, as a scale set.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "client/ctl/scales/convention.h"
#include "client/ctl/scales/scale_set_file.h"

namespace kvtier::ctl {

// A name such as "model.layers.7.self_attn.k_proj.k_scale", taken apart.
struct KvScaleName {
  std::string prefix;  // "model.", before "layers."
  uint32_t layer_idx = 0;
  bool is_k = false;  // A deprecated kv_scale is both.
  bool is_v = false;
};
// Nothing if it is not the name of a scale of K or V. Names are those in convention.h, in modules
// called self_attn, attn, attention, self_attention or mixer.
std::optional<KvScaleName> ParseKvScaleName(std::string_view name);

struct CheckpointOptions {
  // Unset: what the checkpoint's configuration says.
  std::optional<ScaleConvention> convention = {};
  std::optional<uint32_t> layer_count = {};
  std::optional<uint32_t> kv_head_count = {};
  std::optional<uint32_t> head_dim = {};
  std::string prefix = {};  // Of the tensors' names, when a checkpoint has several models.
  // Import although the configuration names another convention, or magnitudes are implausible.
  bool force = false;
};

struct CheckpointScales {
  ScaleSetData scales;
  ScaleConvention convention = ScaleConvention::kModelOpt;
  std::string model;
  float amax_min = 0.0F;  // Over all layers, K and V.
  float amax_max = 0.0F;
  std::vector<std::string> warnings;
  std::vector<std::string> files;  // That were read, full paths.
};

// Imports from a .safetensors file, or from a folder with model.safetensors.index.json or with
// .safetensors files; of the index's files only those with scales are opened. A scale of one value
// holds for all kv heads of its layer. Blocks on the disk. Errors: those of the readers; NOT_FOUND
// if there are no scales; INVALID_ARGUMENT if convention or shape are neither given nor configured;
// FAILED_PRECONDITION, naming the tensor where there is one, for layers without scales, scales that
// are not finite and above 0, several models, and what `force` is for.
absl::StatusOr<CheckpointScales> ImportCheckpoint(const std::string& path,
                                                  const CheckpointOptions& options);

}  // namespace kvtier::ctl
