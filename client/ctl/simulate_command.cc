// SPDX-License-Identifier: Apache-2.0
#include "client/ctl/simulate_command.h"

#include <cerrno>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "client/ctl/simulate.h"
#include "policy/sim/trace_file.h"
#include "proto/base/status_util.h"

namespace kvtier::ctl {
namespace {

constexpr const char* kSweep = "0.5%,1%,2%,3%,5%,7%,10%,15%,20%,30%,50%,70%,100%";

absl::Status WriteWhole(const std::string& path, const std::string& text) {
  std::FILE* const file = std::fopen(path.c_str(), "wb");
  if (file == nullptr) return ErrnoStatus(errno, "open " + path);
  const bool written = std::fwrite(text.data(), 1, text.size(), file) == text.size();
  if (std::fclose(file) != 0 || !written) return ErrnoStatus(errno, "write " + path);
  return absl::OkStatus();
}

}  // namespace

absl::Status RunSimulate(const GlobalOptions& global, const SimulateCommand& command) {
  const bool what_if = !command.what_if_path.empty();
  SimulateOptions options;
  const bool sweep = what_if && command.concurrency.empty();
  KVT_ASSIGN_OR_RETURN(options.sizes, ParseCacheSizes(sweep ? kSweep : command.sizes));
  KVT_ASSIGN_OR_RETURN(options.codecs, ParseCodecs(command.codecs));
  options.concurrency = command.concurrency;
  options.token_bytes = command.token_bytes;
  options.hints = command.hints;
  options.make_room_first = command.make_room_first;
  KVT_ASSIGN_OR_RETURN(const sim::Trace trace,
                       sim::ReadTraceFile(command.trace_path, command.request_count_max));
  const std::vector<SimulateRow> rows = RunSimulations(trace, options);
  const std::string text = global.json ? SimulateJson(rows).dump(2) + "\n" : SimulateText(rows);
  std::fputs(text.c_str(), stdout);
  if (!what_if) return absl::OkStatus();
  return WriteWhole(command.what_if_path, SimulateSvg(rows, trace));
}

}  // namespace kvtier::ctl
