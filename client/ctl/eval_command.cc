// SPDX-License-Identifier: Apache-2.0
#include "client/ctl/eval_command.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <span>
#include <utility>
#include <vector>

#include "client/ctl/eval/dump.h"
#include "client/ctl/eval/eval_format.h"
#include "client/ctl/tensors/write_file.h"
#include "proto/base/status_util.h"

namespace kvtier::ctl {
namespace {

using eval::DatasetReport;

// "12 of 690 steps" on standard error, if that is a terminal.
class StepLine {
 public:
  explicit StepLine(uint64_t total) : total_(total), shown_(isatty(STDERR_FILENO) == 1) {}
  ~StepLine() {
    if (shown_ && done_ > 0) std::fputs("\r\033[K", stderr);
  }
  StepLine(const StepLine&) = delete;
  StepLine& operator=(const StepLine&) = delete;

  void Step() {
    ++done_;
    if (!shown_) return;
    std::fprintf(stderr, "\r%llu of %llu steps", static_cast<unsigned long long>(done_),
                 static_cast<unsigned long long>(total_));
  }

 private:
  uint64_t done_ = 0;
  uint64_t total_;
  bool shown_;
};

// A scale per kv head is a scale for all of them if there is one.
absl::StatusOr<std::vector<eval::Method>> ChooseMethods(const EvalCommand& command,
                                                        size_t kv_head_count) {
  if (!command.methods.empty()) return eval::ParseMethods(command.methods);
  std::vector<eval::Method> methods;
  for (const eval::Method& method : eval::AllMethods()) {
    if (kv_head_count > 1 || method.calibration != eval::Calibration::kTensor) {
      methods.push_back(method);
    }
  }
  return methods;
}

absl::StatusOr<std::vector<DatasetReport>> EvalSynthetic(const EvalCommand& command) {
  KVT_ASSIGN_OR_RETURN(const std::vector<eval::Family> families,
                       eval::ParseFamilies(command.families));
  KVT_ASSIGN_OR_RETURN(const std::vector<eval::Method> methods, ChooseMethods(command, 1));
  const eval::SyntheticShape shape{
      .token_count = command.token_count.value_or(command.quick ? 1024 : 4096),
      .head_dim = command.head_dim,
      .query_count = command.query_count,
      .sigma = command.sigma};
  const uint32_t seed_count = command.seed_count.value_or(command.quick ? 2 : 6);
  StepLine line(uint64_t{families.size()} * seed_count * methods.size());
  std::vector<DatasetReport> reports;
  for (const eval::Family family : families) {
    eval::Evaluation evaluation(methods, [&line] { line.Step(); });
    for (uint64_t seed = 0; seed < seed_count; ++seed) {
      eval::Layer layer;
      layer.heads.push_back(eval::MakeSynthetic(family, shape, seed));
      KVT_RETURN_IF_ERROR(evaluation.Add(layer));
    }
    reports.push_back({.name = std::string(eval::FamilyName(family)),
                       .synthetic = true,
                       .synthetic_queries = true,
                       .token_count = shape.token_count,
                       .head_dim = shape.head_dim,
                       .kv_head_count = 1,
                       .query_count = shape.query_count,
                       .seed_count = seed_count,
                       .results = evaluation.Results()});
  }
  return reports;
}

absl::StatusOr<std::vector<DatasetReport>> EvalDump(const EvalCommand& command) {
  const bool npy = command.safetensors_path.empty();
  KVT_ASSIGN_OR_RETURN(
      const eval::Dump dump,
      npy ? eval::OpenNpyDump(command.k_path, command.v_path, command.q_path,
                              {.uint16_is_bf16 = command.uint16_is_bf16})
          : eval::OpenSafetensorsDump(command.safetensors_path, command.tensor_names));
  KVT_ASSIGN_OR_RETURN(const eval::Layer layer, eval::ReadDump(dump, command.query_count));
  KVT_ASSIGN_OR_RETURN(const std::vector<eval::Method> methods,
                       ChooseMethods(command, layer.heads.size()));
  StepLine line(uint64_t{layer.heads.size()} * methods.size());
  eval::Evaluation evaluation(methods, [&line] { line.Step(); });
  KVT_RETURN_IF_ERROR(evaluation.Add(layer));
  const eval::Head& head = layer.heads.front();
  return std::vector<DatasetReport>{{.name = npy ? command.k_path : command.safetensors_path,
                                     .synthetic_queries = !dump.q.has_value(),
                                     .token_count = head.k.rows(),
                                     .head_dim = head.k.cols(),
                                     .kv_head_count = layer.heads.size(),
                                     .query_count = head.q.rows(),
                                     .seed_count = 1,
                                     .results = evaluation.Results()}};
}

}  // namespace

absl::Status RunEval(const GlobalOptions& global, const EvalCommand& command) {
  if (command.example) {
    const eval::ExampleResult example = eval::RunWorkedExample();
    return Print(global.json, eval::ExampleJson(example), eval::ExampleText(example));
  }
  const bool dump = !command.k_path.empty() || !command.safetensors_path.empty();
  KVT_ASSIGN_OR_RETURN(const std::vector<DatasetReport> reports,
                       dump ? EvalDump(command) : EvalSynthetic(command));
  KVT_RETURN_IF_ERROR(Print(global.json, eval::EvalJson(reports), eval::EvalText(reports)));
  if (command.plot_path.empty()) return absl::OkStatus();
  const std::string svg = eval::EvalPlot(reports);
  const std::span<const std::byte> parts[] = {std::as_bytes(std::span(svg.data(), svg.size()))};
  return WriteFile(command.plot_path, parts);
}

}  // namespace kvtier::ctl
