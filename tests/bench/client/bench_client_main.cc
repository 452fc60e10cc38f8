// SPDX-License-Identifier: Apache-2.0
//
// Measures the client path against gRPC and the seal kernel alone, in the same run, and prints a
// table.
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "tests/bench/client/bare_server.h"
#include "tests/bench/client/rows.h"
#include "tests/bench/tiers/meter.h"
#include "tests/bench/tiers/report.h"

namespace kvtier::bench {
namespace {

constexpr char kUsage[] =
    "usage: bench_client [--kvtierd FILE] [--quick] [--rounds N] [--only PART]\n"
    "                    [--json] [--check FILE] [--tolerance SHARE]\n"
    "  --kvtierd FILE  the daemon to measure (the one that was built with this program)\n"
    "  --quick         few calls, one round: does it run at all; the figures mean nothing\n"
    "  --only PART     calls, put, streams, queue or sessions\n"
    "  --json          for programs; FILE of --check is such output\n"
    "  --check FILE    exit 1 if a ratio is worse than FILE's by more than the tolerance (0.2)\n"
    "Without --check it exits 1 if a row misses what it must reach.\n";

struct Flags {
  std::string kvtierd = KVTIERD_PATH;
  bool is_quick = false;
  bool is_json = false;
  int round_count = 0;
  std::string only;
  std::string recorded_path;
  double tolerance = 0.2;
};

[[noreturn]] void ExitWithUsage() {
  std::fputs(kUsage, stderr);
  std::exit(2);
}

Flags ParseFlags(int argc, char** argv) {
  Flags flags;
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    if (flag == "--quick") {
      flags.is_quick = true;
    } else if (flag == "--json") {
      flags.is_json = true;
    } else if (i + 1 >= argc) {
      ExitWithUsage();
    } else if (flag == "--kvtierd") {
      flags.kvtierd = argv[++i];
    } else if (flag == "--rounds") {
      flags.round_count = std::max(1, std::atoi(argv[++i]));
    } else if (flag == "--only") {
      flags.only = argv[++i];
    } else if (flag == "--check") {
      flags.recorded_path = argv[++i];
    } else if (flag == "--tolerance") {
      flags.tolerance = std::atof(argv[++i]);
    } else {
      ExitWithUsage();
    }
  }
  return flags;
}

std::vector<Row> RunAll(const Flags& flags) {
  Settings settings;
  settings.kvtierd = flags.kvtierd;
  if (flags.is_quick) {
    settings.round_count = 1;
    settings.calls_per_round = 10;
    settings.stream_bytes = 8ULL << 20;
    settings.put_block_count = 1;
    settings.session_count = 8;
    settings.paced_calls_per_round = 50;
  }
  if (flags.round_count > 0) settings.round_count = flags.round_count;
  std::vector<Row> rows;
  const auto run = [&](const char* part, auto measure) {
    if (!flags.only.empty() && flags.only != part) return;
    const double begin = WallSeconds();
    measure(settings, &rows);
    std::fprintf(stderr, "%s: %.1f s\n", part, WallSeconds() - begin);
  };
  run("calls", MeasureCalls);
  run("put", MeasurePut);
  run("streams", MeasureStreams);
  run("queue", MeasureQueue);
  run("sessions", MeasureSessions);
  return rows;
}

std::string Today() {
  const time_t now = time(nullptr);
  tm day{};
  gmtime_r(&now, &day);
  char text[16];
  strftime(text, sizeof(text), "%Y-%m-%d", &day);
  return text;
}

int Main(int argc, char** argv) {
  if (argc == 3 && std::strcmp(argv[1], BareServer::kFlag) == 0) BareServer::Serve(argv[2]);
  const Flags flags = ParseFlags(argc, argv);
  std::string command = "bench_client";
  for (int i = 1; i < argc; ++i) command += std::string(" ") + argv[i];
  const std::vector<Row> rows = RunAll(flags);
  const std::string machine = MachineName("/tmp");
  if (flags.is_json) {
    PrintJson(rows, {.machine = machine, .date = Today(), .command = std::move(command)});
  } else {
    std::printf("%s, %s, `%s`\n\n", machine.c_str(), Today().c_str(), command.c_str());
    PrintTable(rows);
  }
  if (!flags.recorded_path.empty()) {
    const int worse_count = CountRegressions(rows, flags.recorded_path, flags.tolerance);
    if (worse_count < 0) Die("cannot read " + flags.recorded_path);
    return worse_count > 0 ? 1 : 0;
  }
  if (flags.is_quick) return 0;
  return std::any_of(rows.begin(), rows.end(),
                     [](const Row& row) { return Verdict(row) == "MISSED"; })
             ? 1
             : 0;
}

}  // namespace
}  // namespace kvtier::bench

int main(int argc, char** argv) { return kvtier::bench::Main(argc, argv); }
