// SPDX-License-Identifier: Apache-2.0
//
// kvtierctl scales: scale sets from dumps and checkpoints, and a look at them.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace kvtier::ctl {

// What the command line says.
struct ScalesCommand {
  std::string out_path;
  std::string search = "amax6";
  std::string model;

  std::vector<std::string> k_paths;  // calibrate
  std::vector<std::string> v_paths;
  std::vector<std::string> safetensors_paths;
  bool uint16_is_bf16 = false;
  float k_scale = 0.0F;  // 0: not given
  float v_scale = 0.0F;
  bool mean = false;
  double smooth_alpha = 0.0;
  uint64_t token_count_min = 256;

  std::string checkpoint_path;  // import
  std::string convention;
  std::optional<uint32_t> layer_count;
  std::optional<uint32_t> kv_head_count;
  std::optional<uint32_t> head_dim;
  std::string prefix;
  bool force = false;

  std::string show_path;  // show
};

void AddScales(CLI::App* app, ScalesCommand* command);

// Runs the subcommand of `scales` that `app` got. Data goes to standard output, the rest to
// standard error. Errors: those of Calibration, ImportCheckpoint, ReadScaleSet and WriteScaleSet.
absl::Status RunScales(const CLI::App& app, const ScalesCommand& command, bool json);

}  // namespace kvtier::ctl
