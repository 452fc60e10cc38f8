// SPDX-License-Identifier: Apache-2.0
#include "client/ctl/scales/checkpoint.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <system_error>

#include "absl/strings/escaping.h"
#include "absl/strings/str_join.h"
#include "client/ctl/scales/checkpoint_config.h"
#include "client/ctl/scales/strict_json.h"
#include "client/ctl/tensors/safetensors.h"
#include "kernels/nvfp4.h"
#include "proto/base/status_util.h"

namespace kvtier::ctl {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr uint64_t kIndexBytesMax = uint64_t{64} << 20;
constexpr const char* kIndexName = "model.safetensors.index.json";

// What follows "layers.N.<module>.", and whose scale it is.
struct Leaf {
  std::string_view name;
  bool is_k;
  bool is_v;
};
constexpr Leaf kLeaves[] = {
    {"k_scale", true, false},
    {"v_scale", false, true},
    {"k_proj.k_scale", true, false},
    {"v_proj.v_scale", false, true},
    {"qkv_proj.k_scale", true, false},
    {"qkv_proj.v_scale", false, true},
    {"attn.k_scale", true, false},
    {"attn.v_scale", false, true},
    {"k_proj.output_scale", true, false},
    {"v_proj.output_scale", false, true},
    {"k_global_scale", true, false},
    {"v_global_scale", false, true},
    {"kv_scale", true, true},
    {"attn.kv_scale", true, true},
};
constexpr std::string_view kModules[] = {"self_attn.", "attn.", "attention.", "self_attention.",
                                         "mixer."};

// The scales of one model in a checkpoint.
using ScaleTensors = std::map<std::pair<uint32_t, bool>, Tensor>;  // (layer, is K)

// The .safetensors files that hold scales, or all if no index says which.
absl::StatusOr<std::vector<std::string>> ShardsOf(const std::string& path,
                                                  std::vector<std::string>* read_files) {
  std::error_code error;
  if (!fs::is_directory(path, error)) return std::vector<std::string>{path};
  const std::string index_path = (fs::path(path) / kIndexName).string();
  std::set<std::string> shards;
  if (fs::exists(index_path, error)) {
    KVT_ASSIGN_OR_RETURN(const Json index, ReadStrictJson(index_path, kIndexBytesMax));
    read_files->push_back(index_path);
    const Json* weights =
        index.is_object() && index.contains("weight_map") ? &index["weight_map"] : nullptr;
    if (weights == nullptr || !weights->is_object()) {
      return DataLoss("%s: no weight_map", index_path);
    }
    for (const auto& [name, file] : weights->items()) {
      if (!ParseKvScaleName(name).has_value()) continue;
      const std::string shard = file.is_string() ? file.get<std::string>() : "";
      // The index must not lead out of its folder.
      if (shard.empty() || fs::path(shard).filename() != shard || shard == "." || shard == "..") {
        return DataLoss("%s: tensor %s lies in no file of this folder", index_path,
                        absl::CHexEscape(name));
      }
      shards.insert((fs::path(path) / shard).string());
    }
  } else {
    for (const auto& entry : fs::directory_iterator(path, error)) {
      if (entry.path().extension() == ".safetensors") shards.insert(entry.path().string());
    }
    if (error) return ErrnoStatus(error.value(), path);
  }
  return std::vector<std::string>(shards.begin(), shards.end());
}

// Every scale in the shards, by the prefix of its model.
absl::StatusOr<std::map<std::string, ScaleTensors>> FindScales(
    const std::vector<std::string>& shards) {
  std::map<std::string, ScaleTensors> models;
  for (const std::string& shard : shards) {
    KVT_ASSIGN_OR_RETURN(const SafetensorsFile file, SafetensorsFile::Open(shard));
    for (const auto& [text, tensor] : file.tensors()) {
      const auto name = ParseKvScaleName(text);
      if (!name.has_value()) continue;
      for (const bool is_k : {true, false}) {
        if (is_k ? !name->is_k : !name->is_v) continue;
        const auto [position, is_new] =
            models[name->prefix].emplace(std::pair(name->layer_idx, is_k), tensor);
        if (!is_new) {
          return FailedPrecondition("%s: and %s: two scales of one layer", tensor.Where(),
                                    position->second.Where());
        }
      }
    }
  }
  return models;
}

absl::StatusOr<ScaleTensors> ChooseModel(const std::map<std::string, ScaleTensors>& models,
                                         const std::string& prefix, const std::string& path) {
  if (models.empty()) return NotFound("%s: no scales of K and V", path);
  const auto list = [&models] {
    return absl::StrJoin(models, ", ", [](std::string* out, const auto& model) {
      *out += "\"" + absl::CHexEscape(model.first) + "\"";
    });
  };
  if (prefix.empty() && models.size() > 1) {
    return FailedPrecondition("%s: several models have scales; choose a prefix: %s", path, list());
  }
  const auto found = prefix.empty() ? models.begin() : models.find(prefix);
  if (found == models.end()) {
    return NotFound("%s: no scales under the prefix; there are: %s", path, list());
  }
  return found->second;
}

absl::StatusOr<ScaleConvention> ChooseConvention(const CheckpointOptions& options,
                                                 const CheckpointConfig& config) {
  if (!options.convention.has_value() && config.convention.has_value()) return *config.convention;
  if (!options.convention.has_value()) {
    return Invalid(
        "which convention do the scales follow? %s; say it with --convention",
        config.evidence.empty() ? "no configuration says" : config.evidence + " does not say");
  }
  if (config.convention.has_value() && !options.force) {
    const ConventionFacts& stated = FactsOf(*config.convention);
    const ConventionFacts& chosen = FactsOf(*options.convention);
    if (stated.factor != chosen.factor || stated.is_inverse != chosen.is_inverse) {
      return FailedPrecondition("convention %s, but %s means %s; --force if you know better",
                                chosen.name, config.evidence, stated.name);
    }
  }
  return *options.convention;
}

absl::StatusOr<uint32_t> ChooseCount(const char* name, const std::optional<uint32_t>& given,
                                     const std::optional<uint32_t>& configured) {
  if (given.has_value()) return *given;
  if (configured.has_value()) return *configured;
  return Invalid("%s is neither given nor in a config.json", name);
}

// Imports tensors into one set, and remembers the range of what it saw.
class Importer {
 public:
  Importer(bool force, CheckpointScales* out) : force_(force), out_(out) {}

  // The scales of K or V of one layer.
  absl::Status Add(const Tensor& tensor, uint32_t layer_idx, std::vector<float>* g) {
    KVT_ASSIGN_OR_RETURN(const std::vector<float> stored, ToFloats(tensor));
    const uint32_t heads = out_->scales.kv_head_count;
    if (stored.size() != 1 && stored.size() != heads) {
      return FailedPrecondition("%s: %d values, neither one nor one for each of %d kv heads",
                                tensor.Where(), stored.size(), heads);
    }
    for (uint32_t h = 0; h < heads; ++h) {
      KVT_ASSIGN_OR_RETURN(const float amax, Amax(tensor, stored[stored.size() == 1 ? 0 : h]));
      float* const target = &(*g)[size_t{layer_idx} * heads + h];
      if (const auto status = kernels::GlobalScaleFromAmax(amax, target); !status.ok()) {
        return FailedPrecondition("%s: %s", tensor.Where(), status.message());
      }
    }
    return absl::OkStatus();
  }

  void Finish() {
    if (one_count_ == 0) return;
    out_->warnings.push_back(absl::StrFormat(
        "%d of %d scales are 1: placeholders, or raised to 1 by the exporter, but not what was "
        "measured; calibrate from dumps instead",
        one_count_, count_));
  }

 private:
  absl::StatusOr<float> Amax(const Tensor& tensor, float stored) {
    if (!std::isfinite(stored) || stored <= 0.0F) {
      return FailedPrecondition("%s: %g is no scale", tensor.Where(), stored);
    }
    ++count_;
    if (stored == 1.0F) ++one_count_;
    const float amax = AmaxOfStored(out_->convention, stored);
    if (!force_ && !(amax >= kPlausibleAmaxMin && amax <= kPlausibleAmaxMax)) {
      return FailedPrecondition(
          "%s: %g means values up to %g under convention %s, which is implausible: is it another "
          "convention, or an inverse? --force if you know better",
          tensor.Where(), stored, amax, FactsOf(out_->convention).name);
    }
    const bool is_first = out_->amax_max == 0.0F;
    out_->amax_min = is_first ? amax : std::min(out_->amax_min, amax);
    out_->amax_max = std::max(out_->amax_max, amax);
    return amax;
  }

  const bool force_;
  CheckpointScales* const out_;
  uint64_t count_ = 0;      // Scales, one for each (layer, kv head, side).
  uint64_t one_count_ = 0;  // That are 1.
};

absl::Status ImportLayers(const ScaleTensors& tensors, const std::string& path, bool force,
                          CheckpointScales* out) {
  ScaleSetData* scales = &out->scales;
  const size_t head_count = size_t{scales->layer_count} * scales->kv_head_count;
  scales->g_k.resize(head_count);
  scales->g_v.resize(head_count);
  Importer importer(force, out);
  for (const auto& [key, tensor] : tensors) {
    if (key.first >= scales->layer_count) {
      return FailedPrecondition("%s: a model of %d layers has no layer %d", tensor.Where(),
                                scales->layer_count, key.first);
    }
    KVT_RETURN_IF_ERROR(importer.Add(tensor, key.first, key.second ? &scales->g_k : &scales->g_v));
  }
  for (uint32_t layer = 0; layer < scales->layer_count; ++layer) {
    for (const bool is_k : {true, false}) {
      if (tensors.contains(std::pair(layer, is_k))) continue;
      return FailedPrecondition("%s: layer %d of %d has no scale of %s", path, layer,
                                scales->layer_count, is_k ? "K" : "V");
    }
  }
  importer.Finish();
  return absl::OkStatus();
}

}  // namespace

std::optional<KvScaleName> ParseKvScaleName(std::string_view name) {
  constexpr std::string_view kLayers = "layers.";
  // The last one: a prefix may hold the word too.
  const size_t start = name.rfind(kLayers);
  if (start == std::string_view::npos || (start > 0 && name[start - 1] != '.')) return std::nullopt;
  KvScaleName result{.prefix = std::string(name.substr(0, start))};
  std::string_view rest = name.substr(start + kLayers.size());
  const auto [next, error] =
      std::from_chars(rest.data(), rest.data() + rest.size(), result.layer_idx);
  const auto digits = static_cast<size_t>(next - rest.data());
  if (error != std::errc() || digits == rest.size() || rest[digits] != '.') return std::nullopt;
  rest.remove_prefix(digits + 1);
  for (const std::string_view module : kModules) {
    if (!rest.starts_with(module)) continue;
    for (const Leaf& leaf : kLeaves) {
      if (rest.substr(module.size()) != leaf.name) continue;
      result.is_k = leaf.is_k;
      result.is_v = leaf.is_v;
      return result;
    }
  }
  return std::nullopt;
}

absl::StatusOr<CheckpointScales> ImportCheckpoint(const std::string& path,
                                                  const CheckpointOptions& options) {
  CheckpointScales result;
  std::error_code error;
  const bool is_folder = fs::is_directory(path, error);
  const fs::path parent = fs::path(path).parent_path();
  const std::string folder = is_folder ? path : parent.empty() ? "." : parent.string();
  KVT_ASSIGN_OR_RETURN(const CheckpointConfig config, ReadCheckpointConfig(folder));
  result.files = config.files;
  result.model = config.model;
  KVT_ASSIGN_OR_RETURN(const std::vector<std::string> shards, ShardsOf(path, &result.files));
  result.files.insert(result.files.end(), shards.begin(), shards.end());
  KVT_ASSIGN_OR_RETURN(const auto models, FindScales(shards));
  KVT_ASSIGN_OR_RETURN(const ScaleTensors tensors, ChooseModel(models, options.prefix, path));
  KVT_ASSIGN_OR_RETURN(result.convention, ChooseConvention(options, config));
  ScaleSetData* scales = &result.scales;
  KVT_ASSIGN_OR_RETURN(scales->layer_count, ChooseCount("the number of layers", options.layer_count,
                                                        config.layer_count));
  KVT_ASSIGN_OR_RETURN(
      scales->kv_head_count,
      ChooseCount("the number of kv heads", options.kv_head_count, config.kv_head_count));
  KVT_ASSIGN_OR_RETURN(scales->head_dim,
                       ChooseCount("the head dim", options.head_dim, config.head_dim));
  const kernels::BlockShape shape{.layer_count = scales->layer_count,
                                  .kv_head_count = scales->kv_head_count,
                                  .block_tokens = kernels::kBlockTokensMin,
                                  .head_dim = scales->head_dim};
  if (const kernels::Status valid = kernels::Validate(shape); !valid.ok()) {
    return Invalid("%s: %s", path, valid.message());
  }
  KVT_RETURN_IF_ERROR(
      CheckChannelCount(scales->layer_count, scales->kv_head_count, scales->head_dim));
  KVT_RETURN_IF_ERROR(ImportLayers(tensors, path, options.force, &result));
  return result;
}

}  // namespace kvtier::ctl
