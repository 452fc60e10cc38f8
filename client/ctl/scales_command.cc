// SPDX-License-Identifier: Apache-2.0
#include "client/ctl/scales_command.h"

#include <cerrno>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/ctl/scales/calibration.h"
#include "client/ctl/scales/checkpoint.h"
#include "client/ctl/scales/scale_set_file.h"
#include "client/ctl/scales/scales_format.h"
#include "proto/base/status_util.h"
#include "proto/base/version.h"

namespace kvtier::ctl {
namespace {

constexpr const char* kCalibrateFooter = R"(
Dumps are [token][dim], [token][kv head][dim] or [layer][token][kv head][dim], K after RoPE; several
dumps of one model add up. A .safetensors file holds them as tensors k and v, or layers.N.k and
layers.N.v.

Examples:
  kvtierctl scales calibrate --k K.npy --v V.npy --out scales.json
  kvtierctl scales calibrate --safetensors a.safetensors b.safetensors --mean --smooth 0.5 \
    --search 4over6 --model my-model --out scales.json)";

constexpr const char* kImportFooter = R"(
CHECKPOINT is a folder or a .safetensors file. Conventions, where amax is the largest magnitude:
  modelopt        amax / 448     ModelOpt from 0.43
  modelopt-2688   amax / 2688    NVFP4 KV of ModelOpt up to 0.40
  auto-round      amax / 2688    NVFP4 KV of auto-round
  llm-compressor  amax / 6       NVFP4 KV of llm-compressor
  trtllm          amax / 448
  fp8             amax / 448     FP8 KV of any tool
  encode-2688     2688 / amax
Without --convention the checkpoint's config.json and hf_quant_config.json must say it.

Example:
  kvtierctl scales import Qwen3-8B-NVFP4 --out scales.json)";

void AddOutput(CLI::App* app, ScalesCommand* command) {
  app->add_option("--out", command->out_path, "The scale set to write")->required();
  app->add_option("--search", command->search, "How seal chooses the scale of 16 values")
      ->check(CLI::IsMember({"amax6", "4over6"}))
      ->capture_default_str();
  app->add_option("--model", command->model, "Name of the model, for people");
}

void AddCalibrate(CLI::App* app, ScalesCommand* command) {
  app->footer(kCalibrateFooter);
  CLI::Option* k = app->add_option("--k", command->k_paths, "Keys, .npy files");
  CLI::Option* v = app->add_option("--v", command->v_paths, "Values, as many .npy files");
  k->needs(v);
  v->needs(k);
  app->add_option("--safetensors", command->safetensors_paths,
                  "Keys and values, .safetensors files");
  app->add_flag("--uint16-is-bf16", command->uint16_is_bf16, "Read .npy files of uint16 as BF16");
  app->add_option("--k-scale", command->k_scale, "Multiplies FP8 keys")->check(CLI::PositiveNumber);
  app->add_option("--v-scale", command->v_scale, "Multiplies FP8 values")
      ->check(CLI::PositiveNumber);
  app->add_flag("--mean", command->mean, "Subtract each channel's mean from K");
  app->add_option("--smooth", command->smooth_alpha,
                  "Divide each channel of K by about amax^ALPHA; 0: not, 0.5 to begin with")
      ->check(CLI::Range(0.0, 1.0))
      ->type_name("ALPHA");
  app->add_option("--min-tokens", command->token_count_min, "Fewest tokens for --mean and --smooth")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  AddOutput(app, command);
}

void AddImport(CLI::App* app, ScalesCommand* command) {
  app->footer(kImportFooter);
  app->add_option("CHECKPOINT", command->checkpoint_path, "Folder or file")->required();
  std::vector<std::string> names;
  for (const ConventionFacts& facts : AllConventions()) names.emplace_back(facts.name);
  app->add_option("--convention", command->convention, "What a stored scale means")
      ->check(CLI::IsMember(names));
  app->add_option("--layers", command->layer_count, "Layers, if config.json does not say")
      ->check(CLI::Range(1U, 65'536U));
  app->add_option("--kv-heads", command->kv_head_count, "KV heads, if config.json does not say")
      ->check(CLI::Range(1U, 65'536U));
  app->add_option("--head-dim", command->head_dim, "Head dim, if config.json does not say")
      ->check(CLI::Range(1U, 65'536U));
  app->add_option("--prefix", command->prefix,
                  "What stands before \"layers.\" in the names, if there are several models");
  app->add_flag("--force", command->force, "Import although convention or magnitudes look wrong");
  AddOutput(app, command);
}

kernels::ScaleSearch SearchOf(const ScalesCommand& command) {
  return command.search == "4over6" ? kernels::ScaleSearch::kFourOverSix
                                    : kernels::ScaleSearch::kAmax6;
}

Provenance NewProvenance(const std::string& kind, const std::string& model) {
  return {.kind = kind,
          .tool = std::string("kvtierctl ") + kVersion,
          .created = absl::FormatTime("%Y-%m-%dT%H:%M:%SZ", absl::Now(), absl::UTCTimeZone()),
          .model = model};
}

absl::Status Describe(const std::vector<std::string>& paths, Provenance* provenance) {
  for (const std::string& path : paths) {
    KVT_ASSIGN_OR_RETURN(Provenance::File file, DescribeFile(path));
    provenance->files.push_back(std::move(file));
  }
  return absl::OkStatus();
}

absl::Status Print(const ScaleSetFile& file, bool json) {
  using Json = nlohmann::json;
  const std::string out =
      json ? ScalesJson(file).dump(2, ' ', false, Json::error_handler_t::replace) + "\n"
           : ScalesText(file);
  if (std::fwrite(out.data(), 1, out.size(), stdout) != out.size() || std::fflush(stdout) != 0) {
    return ErrnoStatus(errno, "write to standard output");
  }
  return absl::OkStatus();
}

void Warn(const std::string& text) {
  std::fprintf(stderr, "kvtierctl: warning: %s\n", text.c_str());
}

absl::Status Calibrate(const ScalesCommand& command, bool json) {
  if (command.k_paths.size() != command.v_paths.size()) {
    return Invalid("%d files of keys, but %d of values", command.k_paths.size(),
                   command.v_paths.size());
  }
  // NaN passes every check of the command line.
  if (std::isnan(command.k_scale) || std::isnan(command.v_scale)) {
    return Invalid("--k-scale and --v-scale must be numbers");
  }
  if (command.k_paths.empty() && command.safetensors_paths.empty()) {
    return Invalid("no dumps: --k and --v, or --safetensors");
  }
  ScaleSetFile file{.provenance = NewProvenance("calibration", command.model)};
  Calibration calibration;
  const Calibration::Fp8Scales fp8_scales{.k = command.k_scale, .v = command.v_scale};
  for (size_t i = 0; i < command.k_paths.size(); ++i) {
    KVT_ASSIGN_OR_RETURN(
        const std::vector<LayerDump> layers,
        ReadNpyLayers(command.k_paths[i], command.v_paths[i],
                      {.uint16_is_bf16 = command.uint16_is_bf16,
                       .uint8_is_fp8_e4m3 = command.k_scale > 0.0F || command.v_scale > 0.0F}));
    KVT_RETURN_IF_ERROR(calibration.Add(layers, fp8_scales));
    KVT_RETURN_IF_ERROR(Describe({command.k_paths[i], command.v_paths[i]}, &file.provenance));
  }
  for (const std::string& path : command.safetensors_paths) {
    KVT_ASSIGN_OR_RETURN(const std::vector<LayerDump> layers, ReadSafetensorsLayers(path));
    KVT_RETURN_IF_ERROR(calibration.Add(layers, fp8_scales));
    KVT_RETURN_IF_ERROR(Describe({path}, &file.provenance));
  }
  KVT_ASSIGN_OR_RETURN(
      file.scales,
      calibration.Choose({.search = SearchOf(command),
                          .transform = {.mean = command.mean,
                                        .smooth_alpha = static_cast<float>(command.smooth_alpha),
                                        .token_count_min = command.token_count_min}}));
  file.provenance.token_count = calibration.token_count();
  file.provenance.nonfinite_count = calibration.nonfinite_count();
  file.provenance.smooth_alpha = command.smooth_alpha;
  if (file.provenance.token_count < file.scales.kv_head_count) {
    Warn(absl::StrFormat("%d tokens of %d kv heads: is the order [token][kv head][dim]?",
                         file.provenance.token_count, file.scales.kv_head_count));
  }
  if (file.provenance.nonfinite_count > 0) {
    Warn(absl::StrFormat("%d values that are not finite were left out",
                         file.provenance.nonfinite_count));
  }
  KVT_RETURN_IF_ERROR(WriteScaleSet(command.out_path, file));
  return Print(file, json);
}

absl::Status Import(const ScalesCommand& command, bool json) {
  CheckpointOptions options{.layer_count = command.layer_count,
                            .kv_head_count = command.kv_head_count,
                            .head_dim = command.head_dim,
                            .prefix = command.prefix,
                            .force = command.force};
  if (!command.convention.empty()) {
    KVT_ASSIGN_OR_RETURN(options.convention, ParseConvention(command.convention));
  }
  KVT_ASSIGN_OR_RETURN(CheckpointScales imported,
                       ImportCheckpoint(command.checkpoint_path, options));
  for (const std::string& warning : imported.warnings) Warn(warning);
  const std::string& model = command.model.empty() ? imported.model : command.model;
  ScaleSetFile file{.scales = std::move(imported.scales),
                    .provenance = NewProvenance("checkpoint", model)};
  file.scales.search = SearchOf(command);
  file.provenance.convention = FactsOf(imported.convention).name;
  KVT_RETURN_IF_ERROR(Describe(imported.files, &file.provenance));
  KVT_RETURN_IF_ERROR(WriteScaleSet(command.out_path, file));
  std::fprintf(stderr, "kvtierctl: convention %s, magnitudes up to %.4g (least %.4g)\n",
               file.provenance.convention.c_str(), static_cast<double>(imported.amax_max),
               static_cast<double>(imported.amax_min));
  return Print(file, json);
}

}  // namespace

void AddScales(CLI::App* app, ScalesCommand* command) {
  CLI::App* scales = app->add_subcommand("scales", "Scale sets: what blocks are quantized with");
  scales->require_subcommand(1);
  AddCalibrate(scales->add_subcommand("calibrate", "Make a scale set from keys and values"),
               command);
  AddImport(scales->add_subcommand("import", "Make a scale set from a quantized checkpoint"),
            command);
  scales->add_subcommand("show", "Show a scale set")
      ->add_option("FILE", command->show_path, "The scale set")
      ->required();
}

absl::Status RunScales(const CLI::App& app, const ScalesCommand& command, bool json) {
  const CLI::App* scales = app.get_subcommand("scales");
  if (scales->got_subcommand("calibrate")) return Calibrate(command, json);
  if (scales->got_subcommand("import")) return Import(command, json);
  KVT_ASSIGN_OR_RETURN(const ScaleSetFile file, ReadScaleSet(command.show_path));
  return Print(file, json);
}

}  // namespace kvtier::ctl
