// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "client/ctl/commands.h"

namespace kvtier::ctl {

// What is measured: a dump if a path is set, the worked example, or else synthetic data.
struct EvalCommand {
  std::string k_path;
  std::string v_path;
  std::string q_path;
  std::string safetensors_path;
  std::string tensor_names;
  bool uint16_is_bf16 = false;  // of .npy files
  bool example = false;
  std::string families = "all";
  std::string methods;  // empty: all
  // Of synthetic data; not set: 4096 and 6, with `quick` 1024 and 2.
  std::optional<uint32_t> token_count;
  std::optional<uint32_t> seed_count;
  bool quick = false;
  uint32_t head_dim = 128;
  uint32_t query_count = 16;  // of dumps too, see eval::ReadDump
  double sigma = 1.0;
  std::string plot_path;
};
// Needs no daemon.
absl::Status RunEval(const GlobalOptions& global, const EvalCommand& command);

}  // namespace kvtier::ctl
