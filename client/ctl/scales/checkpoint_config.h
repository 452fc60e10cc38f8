// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/ctl/scales/convention.h"

namespace kvtier::ctl {

// What the files beside a checkpoint's weights say of it.
struct CheckpointConfig {
  std::optional<uint32_t> layer_count;
  std::optional<uint32_t> kv_head_count;
  std::optional<uint32_t> head_dim;
  std::string model;  // "_name_or_path", or empty.

  // The convention that follows from the tool named there, if one does.
  std::optional<ScaleConvention> convention;
  // What was found and where, for messages; empty if nothing.
  std::string evidence;

  std::vector<std::string> files;  // That were read, full paths.
};

// Reads config.json and hf_quant_config.json in `folder`, of which none needs to be there.
// Errors: those of ReadStrictJson. Members of other types than expected are ignored: other programs
// write these files.
absl::StatusOr<CheckpointConfig> ReadCheckpointConfig(const std::string& folder);

}  // namespace kvtier::ctl
