// SPDX-License-Identifier: Apache-2.0
#include "client/ctl/plan.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/str_format.h"
#include "client/ctl/table.h"
#include "proto/base/layout.h"
#include "proto/base/status_util.h"

namespace kvtier::ctl {
namespace {

constexpr uint64_t kSlotAlignBytes = 4096;
// Records of the nvme tier start with one page.
constexpr uint64_t kRecordHeaderBytes = 4096;
// The defaults of hbm, host and nvme.high_watermark.
constexpr double kHighWatermark = 0.95;
constexpr double kBytesMax = 0x1p60;

struct CodecOfPlan {
  const char* name;
  double bits_per_value;
  // Nothing: shown for comparison, kvtier does not store it.
  std::optional<Codec> stored;
};

// INT4 and INT2 carry an FP16 scale and zero point for every 32 values.
const std::array<CodecOfPlan, 5> kCodecs = {{{"bf16", 16, Codec::kBf16},
                                             {"fp8", 8, Codec::kFp8},
                                             {"nvfp4", 4.5, Codec::kNvfp4},
                                             {"int4", 5, std::nullopt},
                                             {"int2", 3, std::nullopt}}};

// The number that `text` starts with, and what follows without spaces.
std::optional<std::pair<double, std::string_view>> NumberAndUnit(std::string_view text) {
  double number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || !std::isfinite(number) || number <= 0) return std::nullopt;
  text.remove_prefix(static_cast<size_t>(end - text.data()));
  while (text.starts_with(' ')) text.remove_prefix(1);
  return std::pair(number, text);
}

template <size_t kCount>
std::optional<double> Scaled(std::string_view text,
                             const std::array<std::pair<std::string_view, double>, kCount>& units) {
  const auto parsed = NumberAndUnit(text);
  if (!parsed.has_value()) return std::nullopt;
  const auto unit =
      std::ranges::find_if(units, [&](const auto& each) { return each.first == parsed->second; });
  if (unit == units.end() || parsed->first * unit->second > kBytesMax) return std::nullopt;
  return parsed->first * unit->second;
}

uint64_t CountOf(double room, double each) {
  return room <= 0 ? 0 : static_cast<uint64_t>(std::floor(room / each));
}

absl::Status CheckInput(const PlanInput& input) {
  if (input.layer_count == 0 || input.kv_head_count == 0 || input.head_dim == 0) {
    return Invalid("plan: give --layers, --kv-heads and --head-dim, or --model-config FILE");
  }
  if (input.context_tokens == 0) return Invalid("plan: a context has at least one token");
  if (input.card_share <= 0 || input.card_share > 1) {
    return Invalid("plan: the share of a card is above 0 and at most 1");
  }
  if (input.card_count == 0 || input.kv_head_count % input.card_count != 0) {
    return Invalid("plan: %d KV heads cannot be shared equally by %d cards", input.kv_head_count,
                   input.card_count);
  }
  if (input.card_bytes > 0 && input.card_bytes * input.card_share <=
                                  input.runtime_bytes + input.weight_bytes / input.card_count) {
    return Invalid("plan: weights and run time leave no room for KV on a card");
  }
  return absl::OkStatus();
}

// Payload bytes of one block on one card, and its tokens; nothing where kvtier has no such layout.
std::optional<std::pair<uint64_t, uint32_t>> BlockOf(const PlanInput& input, Codec codec) {
  Layout layout;
  layout.model = "plan";
  layout.weights_revision = "plan";
  layout.tokenizer = "plan";
  layout.layer_count = input.layer_count;
  layout.kv_head_count = input.kv_head_count / input.card_count;
  layout.head_dim = input.head_dim;
  layout.codec = codec;
  if (!layout.Validate().ok()) return std::nullopt;
  return std::pair(uint64_t{layout.BlockBytes()}, layout.block_tokens);
}

void AddPractical(const Plan& plan, Codec codec, PlanRow* row) {
  const PlanInput& input = plan.input;
  const auto block = BlockOf(input, codec);
  if (!block.has_value()) return;
  const auto [block_bytes, block_tokens] = *block;
  const uint64_t block_count = (input.context_tokens + block_tokens - 1) / block_tokens;
  const uint64_t slot_bytes =
      (block_bytes + kSlotAlignBytes - 1) / kSlotAlignBytes * kSlotAlignBytes;
  const double context_bytes = static_cast<double>(block_count * input.card_count * slot_bytes);
  const double record_bytes =
      static_cast<double>(block_count * input.card_count * (slot_bytes + kRecordHeaderBytes));
  if (input.card_bytes > 0) {
    row->practical_contexts = CountOf(plan.kv_bytes * kHighWatermark, context_bytes);
  }
  if (input.host_bytes > 0) {
    row->host_contexts = CountOf(input.host_bytes * kHighWatermark, context_bytes);
  }
  if (input.nvme_bytes > 0) {
    row->nvme_contexts = CountOf(input.nvme_bytes * kHighWatermark, record_bytes);
  }
}

std::string CountText(const std::optional<uint64_t>& count) {
  return count.has_value() ? HumanCount(*count) : "-";
}

// Trailing zeros say nothing: 90, 11.25, 257.5.
std::string UnitText(double bytes, double unit, const char* name) {
  std::string number = absl::StrFormat("%.2f", bytes / unit);
  while (number.ends_with('0')) number.pop_back();
  if (number.ends_with('.')) number.pop_back();
  return number + " " + name;
}

std::string BytesText(double bytes) {
  if (bytes >= 0x1p40) return UnitText(bytes, 0x1p40, "TiB");
  return bytes >= 0x1p30 ? UnitText(bytes, 0x1p30, "GiB") : UnitText(bytes, 0x1p20, "MiB");
}

// Whole bytes. 0 is what nobody asked for: null.
nlohmann::ordered_json BytesOrNull(double bytes) {
  return bytes > 0 ? nlohmann::ordered_json(static_cast<uint64_t>(std::llround(bytes)))
                   : nlohmann::ordered_json();
}

template <typename Value>
nlohmann::ordered_json OrNull(const std::optional<Value>& value) {
  return value.has_value() ? nlohmann::ordered_json(*value) : nlohmann::ordered_json();
}

}  // namespace

absl::StatusOr<double> ParsePlanBytes(std::string_view text) {
  constexpr std::array<std::pair<std::string_view, double>, 11> kUnits = {{{"", 1},
                                                                           {"B", 1},
                                                                           {"KB", 1e3},
                                                                           {"MB", 1e6},
                                                                           {"GB", 1e9},
                                                                           {"TB", 1e12},
                                                                           {"PB", 1e15},
                                                                           {"KiB", 0x1p10},
                                                                           {"MiB", 0x1p20},
                                                                           {"GiB", 0x1p30},
                                                                           {"TiB", 0x1p40}}};
  const auto bytes = Scaled(text, kUnits);
  if (!bytes.has_value()) return Invalid("size \"%s\" is none; write 80GB or \"96 GiB\"", text);
  return *bytes;
}

absl::StatusOr<double> ParsePlanTokens(std::string_view text) {
  constexpr std::array<std::pair<std::string_view, double>, 4> kUnits = {
      {{"", 1}, {"K", 1024}, {"M", 1e6}, {"G", 1e9}}};
  const auto tokens = Scaled(text, kUnits);
  if (!tokens.has_value() || *tokens < 1) {
    return Invalid("\"%s\" is no number of tokens; write 131072, 128K (x 1024) or 3M (x 10^6)",
                   text);
  }
  return std::floor(*tokens);
}

absl::Status ReadModelConfig(std::string_view json_text, PlanInput* input) {
  const nlohmann::json whole = nlohmann::json::parse(json_text, nullptr, false);
  if (!whole.is_object()) return Invalid("the model configuration is no JSON object");
  // Models that also see or hear keep the language model's part below this name.
  const nlohmann::json& config = whole.contains("text_config") && whole["text_config"].is_object()
                                     ? whole["text_config"]
                                     : whole;
  if (config.contains("kv_lora_rank") && config["kv_lora_rank"].is_number()) {
    return Unimplemented("plan: latent attention (kv_lora_rank) has no per-head KV to plan for");
  }
  const auto number = [&config](const char* name) -> uint32_t {
    const auto it = config.find(name);
    return it != config.end() && it->is_number_unsigned() && it->get<uint64_t>() < (1U << 20)
               ? it->get<uint32_t>()
               : 0;
  };
  const uint32_t query_heads = number("num_attention_heads");
  const uint32_t kv_heads = number("num_key_value_heads");
  uint32_t head_dim = number("head_dim");
  if (head_dim == 0 && query_heads > 0) head_dim = number("hidden_size") / query_heads;
  input->layer_count = number("num_hidden_layers");
  input->kv_head_count = kv_heads > 0 ? kv_heads : query_heads;
  input->head_dim = head_dim;
  if (input->layer_count == 0 || input->kv_head_count == 0 || head_dim == 0) {
    return Invalid("the model configuration lacks num_hidden_layers, attention heads or head_dim");
  }
  return absl::OkStatus();
}

absl::StatusOr<Plan> MakePlan(const PlanInput& input) {
  KVT_RETURN_IF_ERROR(CheckInput(input));
  Plan plan = {.input = input};
  const double card_kv_bytes = input.card_bytes * input.card_share - input.runtime_bytes -
                               input.weight_bytes / input.card_count;
  if (input.card_bytes > 0) plan.kv_bytes = card_kv_bytes * input.card_count;
  for (const CodecOfPlan& codec : kCodecs) {
    PlanRow row = {.codec = codec.name, .bits_per_value = codec.bits_per_value};
    row.token_bytes =
        2.0 * input.layer_count * input.kv_head_count * input.head_dim * codec.bits_per_value / 8;
    row.context_bytes = row.token_bytes * static_cast<double>(input.context_tokens);
    row.ideal_contexts = CountOf(plan.kv_bytes, row.context_bytes);
    if (input.total_tokens > 0) {
      row.total_bytes = row.token_bytes * input.total_tokens;
      if (input.card_bytes > 0) {
        row.total_cards = static_cast<uint64_t>(std::ceil(row.total_bytes / card_kv_bytes));
      }
    }
    if (codec.stored.has_value()) AddPractical(plan, *codec.stored, &row);
    plan.rows.push_back(std::move(row));
  }
  if (plan.input.step_contexts == 0) {
    plan.input.step_contexts = static_cast<uint32_t>(
        std::clamp<uint64_t>(plan.rows.front().ideal_contexts, 1, UINT32_MAX));
  }
  for (PlanRow& row : plan.rows) {
    if (input.bandwidth <= 0) break;
    row.step_seconds = (input.weight_bytes + row.context_bytes * plan.input.step_contexts) /
                       (input.bandwidth * input.card_count);
  }
  return plan;
}

std::string PlanText(const Plan& plan) {
  const PlanInput& input = plan.input;
  std::string text =
      absl::StrFormat("%d layers, %d KV heads of %d; contexts of %s tokens\n", input.layer_count,
                      input.kv_head_count, input.head_dim, HumanCount(input.context_tokens));
  if (input.card_bytes > 0) {
    text += absl::StrFormat("%d x %s x %.0f %%, less run time and weights: %s for KV\n",
                            input.card_count, BytesText(input.card_bytes), 100 * input.card_share,
                            BytesText(plan.kv_bytes));
  }
  std::vector<std::string> headers = {"CODEC", "A TOKEN>", "A CONTEXT>"};
  const bool has_card = input.card_bytes > 0;
  if (has_card) headers.insert(headers.end(), {"CONTEXTS>", "PRACTICAL>"});
  if (input.host_bytes > 0) headers.emplace_back("ON HOST>");
  if (input.nvme_bytes > 0) headers.emplace_back("ON NVME>");
  if (input.total_tokens > 0) headers.emplace_back("ALL TOKENS>");
  if (input.total_tokens > 0 && has_card) headers.emplace_back("CARDS>");
  if (input.bandwidth > 0) headers.emplace_back("STEP>");
  TextTable table(headers);
  for (const PlanRow& row : plan.rows) {
    std::vector<std::string> cells = {row.codec, UnitText(row.token_bytes, 0x1p10, "KiB"),
                                      BytesText(row.context_bytes)};
    if (has_card) {
      cells.push_back(HumanCount(row.ideal_contexts));
      cells.push_back(CountText(row.practical_contexts));
    }
    if (input.host_bytes > 0) cells.push_back(CountText(row.host_contexts));
    if (input.nvme_bytes > 0) cells.push_back(CountText(row.nvme_contexts));
    if (input.total_tokens > 0) cells.push_back(BytesText(row.total_bytes));
    if (input.total_tokens > 0 && has_card) cells.push_back(CountText(row.total_cards));
    if (input.bandwidth > 0) cells.push_back(absl::StrFormat("%.1f ms", 1e3 * *row.step_seconds));
    table.Add(std::move(cells));
  }
  text += table.Print();
  text += absl::StrFormat(
      "\nint4 and int2 (groups of 32) for comparison; kvtier does not store them. PRACTICAL, ON "
      "HOST, ON NVME:\nwhole blocks in their slots, filled up to the default high watermark of "
      "%.0f %%.\n",
      100 * kHighWatermark);
  if (input.bandwidth > 0) {
    text += absl::StrFormat(
        "STEP: weights and the KV of %d contexts read once at full bandwidth; no step is faster.\n",
        input.step_contexts);
  }
  return text;
}

nlohmann::ordered_json PlanJson(const Plan& plan) {
  const PlanInput& input = plan.input;
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  for (const PlanRow& row : plan.rows) {
    rows.push_back({{"codec", row.codec},
                    {"bits_per_value", row.bits_per_value},
                    {"token_bytes", BytesOrNull(row.token_bytes)},
                    {"context_bytes", BytesOrNull(row.context_bytes)},
                    {"ideal_contexts", row.ideal_contexts},
                    {"practical_contexts", OrNull(row.practical_contexts)},
                    {"host_contexts", OrNull(row.host_contexts)},
                    {"nvme_contexts", OrNull(row.nvme_contexts)},
                    {"total_bytes", BytesOrNull(row.total_bytes)},
                    {"total_cards", OrNull(row.total_cards)},
                    {"step_seconds", OrNull(row.step_seconds)}});
  }
  return {{"layer_count", input.layer_count},     {"kv_head_count", input.kv_head_count},
          {"head_dim", input.head_dim},           {"context_tokens", input.context_tokens},
          {"card_count", input.card_count},       {"kv_bytes", BytesOrNull(plan.kv_bytes)},
          {"step_contexts", input.step_contexts}, {"rows", std::move(rows)}};
}

}  // namespace kvtier::ctl
