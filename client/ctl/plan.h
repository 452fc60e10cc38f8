// SPDX-License-Identifier: Apache-2.0
//
// Capacity arithmetic for a model and its machines: what a token, a context and a decode step cost
// in every codec. No daemon, no measurement; pure.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace kvtier::ctl {

// A model with grouped-query attention, and the machine it runs on.
struct PlanInput {
  uint32_t layer_count = 0;
  uint32_t kv_head_count = 0;
  uint32_t head_dim = 0;
  uint64_t context_tokens = 128 * 1024;
  // Cards that share the model by tensor parallelism: each holds 1/n of the KV heads and weights.
  uint32_t card_count = 1;
  // Memory of one card, and what of it is not for KV.
  double card_bytes = 0;
  double card_share = 1;
  double runtime_bytes = 0;
  double weight_bytes = 0;
  // Memory bandwidth of one card in bytes a second. 0: no step times.
  double bandwidth = 0;
  // Contexts in the decode step. 0: as many as fit in BF16, at least one.
  uint32_t step_contexts = 0;
  // Tokens to be held at once. 0: no answer to how many cards that takes.
  double total_tokens = 0;
  double host_bytes = 0;
  double nvme_bytes = 0;
};

// One codec. Counts of contexts are over all cards of the input.
struct PlanRow {
  std::string codec;
  double bits_per_value = 0;
  double token_bytes = 0;
  double context_bytes = 0;
  // Contexts whose KV fits beside weights and run time: `ideal` is division; `practical` takes
  // whole blocks of kvtier with their slots, up to hbm's default high watermark. Practical figures
  // are there only for codecs that kvtier stores.
  uint64_t ideal_contexts = 0;
  std::optional<uint64_t> practical_contexts = {};
  std::optional<uint64_t> host_contexts = {};
  std::optional<uint64_t> nvme_contexts = {};
  // Of cards with this much memory for KV.
  std::optional<uint64_t> total_cards = {};
  double total_bytes = 0;
  // Lower bound of one decode step: weights and the KV of step_contexts read once.
  std::optional<double> step_seconds = {};
};

struct Plan {
  PlanInput input;
  // Bytes of all cards that are left for KV.
  double kv_bytes = 0;
  std::vector<PlanRow> rows = {};
};

// INVALID_ARGUMENT names what is missing or out of range.
absl::StatusOr<Plan> MakePlan(const PlanInput& input);

// "96 GiB", "80GB", "1.5TB": decimal and binary units, as data sheets and operating systems use.
absl::StatusOr<double> ParsePlanBytes(std::string_view text);
// "131072", "128K" (x 1024), "3M" (x 1,000,000): contexts are named in binary, totals in decimal.
absl::StatusOr<double> ParsePlanTokens(std::string_view text);
// Layers, KV heads and head size from a Hugging Face config.json. UNIMPLEMENTED: latent attention.
absl::Status ReadModelConfig(std::string_view json_text, PlanInput* input);

std::string PlanText(const Plan& plan);
nlohmann::ordered_json PlanJson(const Plan& plan);

}  // namespace kvtier::ctl
