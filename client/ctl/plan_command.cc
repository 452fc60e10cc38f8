// SPDX-License-Identifier: Apache-2.0
#include "client/ctl/plan_command.h"

#include <cerrno>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <utility>

#include "proto/base/status_util.h"

namespace kvtier::ctl {
namespace {

constexpr const char* kPlanFooter = R"(
Examples:
  kvtierctl plan --layers 80 --kv-heads 8 --head-dim 128 --card "96 GiB" --card-share 0.9
  kvtierctl plan --layers 80 --kv-heads 8 --head-dim 128 --card 80GB --total-tokens 3M
  kvtierctl plan --model-config config.json --card 80GB --weights 16GB --bandwidth 3352GB
  kvtierctl plan --layers 32 --kv-heads 8 --head-dim 128 --card 80GB --host 1TB --nvme 8TB

A size is a number with B, KB, MB, GB, TB (decimal) or KiB, MiB, GiB, TiB (binary).)";

absl::StatusOr<std::string> ReadWhole(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return ErrnoStatus(errno, "open " + path);
  std::ostringstream text;
  text << file.rdbuf();
  return std::move(text).str();
}

absl::Status SetBytes(const char* option, const std::string& text, double* field) {
  if (text.empty()) return absl::OkStatus();
  const absl::StatusOr<double> bytes = ParsePlanBytes(text);
  if (!bytes.ok()) return Annotate(bytes.status(), option);
  *field = *bytes;
  return absl::OkStatus();
}

}  // namespace

void AddPlan(CLI::App* app, PlanCommand* command) {
  CLI::App* plan = app->add_subcommand(
      "plan",
      "What contexts cost in every codec, and what fits on cards, host and nvme; no daemon");
  plan->footer(kPlanFooter);
  PlanInput* input = &command->input;
  CLI::Option* config =
      plan->add_option("--model-config", command->model_config_path,
                       "A config.json of Hugging Face, for layers, KV heads and head size")
          ->check(CLI::ExistingFile);
  for (CLI::Option* option :
       {plan->add_option("--layers", input->layer_count, "Layers with attention"),
        plan->add_option("--kv-heads", input->kv_head_count, "KV heads of a layer, over all cards"),
        plan->add_option("--head-dim", input->head_dim, "Values of a head")}) {
    option->check(CLI::Range(1U, 65'536U))->excludes(config);
  }
  plan->add_option("--context", command->context_tokens, "Tokens of a context")
      ->capture_default_str();
  plan->add_option("--cards", input->card_count, "Cards that share the model (tensor parallel)")
      ->check(CLI::Range(1U, 1024U))
      ->capture_default_str();
  plan->add_option("--card", command->card, "Memory of a card");
  plan->add_option("--card-share", input->card_share, "Of that, what may be used")
      ->check(CLI::Range(0.01, 1.0))
      ->capture_default_str();
  plan->add_option("--runtime", command->runtime, "Of a card, for run time and workspace");
  plan->add_option("--weights", command->weights, "Weights of the model, over all cards");
  plan->add_option("--bandwidth", command->bandwidth,
                   "Bytes a second that a card reads: step times");
  plan->add_option("--step-contexts", input->step_contexts,
                   "Contexts in a decode step; 0: as many as fit in BF16")
      ->capture_default_str();
  plan->add_option("--total-tokens", command->total_tokens,
                   "Tokens to hold at once: cards for them");
  plan->add_option("--host", command->host, "Size of the host tier");
  plan->add_option("--nvme", command->nvme, "Size of the nvme tier");
}

absl::Status RunPlan(const PlanCommand& command, bool json) {
  PlanInput input = command.input;
  if (!command.model_config_path.empty()) {
    KVT_ASSIGN_OR_RETURN(const std::string text, ReadWhole(command.model_config_path));
    if (const absl::Status read = ReadModelConfig(text, &input); !read.ok()) {
      return Annotate(read, command.model_config_path);
    }
  }
  KVT_ASSIGN_OR_RETURN(const double context_tokens, ParsePlanTokens(command.context_tokens));
  input.context_tokens = static_cast<uint64_t>(context_tokens);
  if (!command.total_tokens.empty()) {
    KVT_ASSIGN_OR_RETURN(input.total_tokens, ParsePlanTokens(command.total_tokens));
  }
  KVT_RETURN_IF_ERROR(SetBytes("--card", command.card, &input.card_bytes));
  KVT_RETURN_IF_ERROR(SetBytes("--runtime", command.runtime, &input.runtime_bytes));
  KVT_RETURN_IF_ERROR(SetBytes("--weights", command.weights, &input.weight_bytes));
  KVT_RETURN_IF_ERROR(SetBytes("--bandwidth", command.bandwidth, &input.bandwidth));
  KVT_RETURN_IF_ERROR(SetBytes("--host", command.host, &input.host_bytes));
  KVT_RETURN_IF_ERROR(SetBytes("--nvme", command.nvme, &input.nvme_bytes));
  KVT_ASSIGN_OR_RETURN(const Plan plan, MakePlan(input));
  const std::string text = json ? PlanJson(plan).dump(2) + "\n" : PlanText(plan);
  std::fputs(text.c_str(), stdout);
  return absl::OkStatus();
}

}  // namespace kvtier::ctl
