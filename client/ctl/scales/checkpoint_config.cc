// SPDX-License-Identifier: Apache-2.0
#include "client/ctl/scales/checkpoint_config.h"

#include <charconv>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "absl/strings/escaping.h"
#include "client/ctl/scales/strict_json.h"
#include "proto/base/status_util.h"

namespace kvtier::ctl {
namespace {

using Json = nlohmann::json;

constexpr uint64_t kConfigBytesMax = uint64_t{16} << 20;

// A member if `json` is an object that has it, else null.
const Json& MemberOf(const Json& json, const char* name) {
  static const Json kNull;
  if (!json.is_object()) return kNull;
  const auto found = json.find(name);
  return found == json.end() ? kNull : *found;
}

std::string TextOf(const Json& json, const char* name) {
  const Json& member = MemberOf(json, name);
  return member.is_string() ? absl::CHexEscape(member.get<std::string>()) : "";
}

std::optional<uint32_t> CountOf(const Json& json, const char* name) {
  const Json& member = MemberOf(json, name);
  if (!member.is_number_unsigned() || member.get<uint64_t>() > 65'536) return std::nullopt;
  return static_cast<uint32_t>(member.get<uint64_t>());
}

void ReadShape(const Json& json, CheckpointConfig* config) {
  // Models that also see or hear keep the language model's shape in a member.
  const Json& text = MemberOf(json, "text_config");
  const Json& shape = text.is_object() ? text : json;
  config->layer_count = CountOf(shape, "num_hidden_layers");
  const auto heads = CountOf(shape, "num_attention_heads");
  config->kv_head_count = CountOf(shape, "num_key_value_heads");
  if (!config->kv_head_count.has_value()) config->kv_head_count = heads;
  config->head_dim = CountOf(shape, "head_dim");
  const auto hidden = CountOf(shape, "hidden_size");
  if (!config->head_dim.has_value() && hidden.has_value() && heads.value_or(0) > 0) {
    config->head_dim = *hidden / *heads;
  }
  config->model = TextOf(json, "_name_or_path");
}

// The minor version of "0.43.0": 43; nothing for other texts.
std::optional<uint32_t> MinorOf(const std::string& version) {
  if (!version.starts_with("0.")) return std::nullopt;
  uint32_t minor = 0;
  const char* end = version.data() + version.size();
  const auto [next, error] = std::from_chars(version.data() + 2, end, minor);
  const bool is_number = error == std::errc() && (next == end || *next == '.');
  return is_number ? std::optional(minor) : std::nullopt;
}

// ModelOpt's divisor for NVFP4 follows from the version that exported, see convention.h.
std::optional<ScaleConvention> ModelOptConvention(const std::string& kv_algorithm,
                                                  const std::string& version) {
  if (kv_algorithm == "FP8") return ScaleConvention::kFp8;
  if (!kv_algorithm.starts_with("NVFP4")) return std::nullopt;
  const auto minor = MinorOf(version);
  if (!minor.has_value()) {
    return version.starts_with("1.") ? std::optional(ScaleConvention::kModelOpt) : std::nullopt;
  }
  if (*minor >= 43) return ScaleConvention::kModelOpt;
  if (*minor <= 40) return ScaleConvention::kModelOpt2688;
  return std::nullopt;
}

void ReadModelOpt(const Json& quantization, const Json& producer, const std::string& file,
                  CheckpointConfig* config) {
  std::string kv_algorithm = TextOf(quantization, "kv_cache_quant_algo");
  const Json& scheme = MemberOf(quantization, "kv_cache_scheme");
  if (kv_algorithm.empty() && scheme.is_string()) {
    kv_algorithm = TextOf(quantization, "kv_cache_scheme");
  } else if (kv_algorithm.empty() && CountOf(scheme, "num_bits") == 8U) {
    kv_algorithm = "FP8";
  }
  if (kv_algorithm.empty()) return;
  const std::string version = TextOf(producer, "version");
  config->convention = ModelOptConvention(kv_algorithm, version);
  config->evidence = absl::StrFormat("%s: modelopt %s, kv cache %s", file, version, kv_algorithm);
}

// config.json's quantization_config.
void ReadQuantization(const Json& quantization, CheckpointConfig* config) {
  const std::string method = TextOf(quantization, "quant_method");
  if (method.starts_with("modelopt")) {
    ReadModelOpt(quantization, MemberOf(quantization, "producer"), "config.json", config);
    return;
  }
  const auto bits = CountOf(MemberOf(quantization, "kv_cache_scheme"), "num_bits");
  const bool by_auto_round =
      TextOf(quantization, "provider") == "auto-round" || method == "auto-round";
  if (method == "fp8") {
    config->convention = ScaleConvention::kFp8;
  } else if (bits == 8U) {
    config->convention = ScaleConvention::kFp8;
  } else if (bits == 4U) {
    config->convention =
        by_auto_round ? ScaleConvention::kAutoRound : ScaleConvention::kLlmCompressor;
  } else {
    return;
  }
  config->evidence = absl::StrFormat("config.json: %s%s, kv cache of %d bits", method,
                                     by_auto_round ? " by auto-round" : "", bits.value_or(8));
}

}  // namespace

absl::StatusOr<CheckpointConfig> ReadCheckpointConfig(const std::string& folder) {
  CheckpointConfig config;
  for (const char* name : {"config.json", "hf_quant_config.json"}) {
    const std::string path = (std::filesystem::path(folder) / name).string();
    const auto json = ReadStrictJson(path, kConfigBytesMax);
    if (absl::IsNotFound(json.status())) continue;
    KVT_RETURN_IF_ERROR(json.status());
    config.files.push_back(path);
    if (std::string_view(name) == "config.json") {
      ReadShape(*json, &config);
      ReadQuantization(MemberOf(*json, "quantization_config"), &config);
    } else {
      ReadModelOpt(MemberOf(*json, "quantization"), MemberOf(*json, "producer"), name, &config);
    }
  }
  return config;
}

}  // namespace kvtier::ctl
