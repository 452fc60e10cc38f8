// SPDX-License-Identifier: Apache-2.0
//
// Measures the tiers against the raw device and memcpy in the same run and prints a table.
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string>

#include "tests/bench/tiers/meter.h"
#include "tests/bench/tiers/report.h"
#include "tests/bench/tiers/rows.h"

namespace kvtier::bench {
namespace {

constexpr char kUsage[] =
    "usage: bench_tiers [--dir DIR] [--quick] [--rounds N] [--only PART] [--blocks N]\n"
    "                   [--block-kib N] [--io-engine NAME] [--json] [--check FILE]\n"
    "                   [--tolerance SHARE]\n"
    "  --dir DIR      where a folder is made for the run, and removed: a file system with "
    "O_DIRECT\n"
    "                 ($TMPDIR or /tmp)\n"
    "  --quick        little data, one round: does it run at all; the figures mean nothing\n"
    "  --only PART    speed, order, blobs, memory, churn, lookup or start\n"
    "  --blocks N     in the indexes of lookup and start (1000000)\n"
    "  --block-kib N  of speed, the blocks of N KiB alone (64, 256, 1024 or 4096)\n"
    "  --json         for programs; FILE of --check is such output\n"
    "  --check FILE   exit 1 if a ratio is worse than FILE's by more than the tolerance (0.2)\n"
    "Without --check it exits 1 if a row misses what it must reach.\n";

struct Flags {
  std::string dir;
  bool is_quick = false;
  bool is_json = false;
  int round_count = 0;
  uint64_t indexed_block_count = 0;
  uint32_t block_kib = 0;
  std::string only;
  std::string io_engine = "auto";
  std::string recorded_path;
  double tolerance = 0.2;
};

[[noreturn]] void ExitWithUsage() {
  std::fputs(kUsage, stderr);
  std::exit(2);
}

Flags ParseFlags(int argc, char** argv) {
  Flags flags;
  const char* const tmpdir = std::getenv("TMPDIR");
  flags.dir = tmpdir != nullptr ? tmpdir : "/tmp";
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    if (flag == "--quick") {
      flags.is_quick = true;
    } else if (flag == "--json") {
      flags.is_json = true;
    } else if (i + 1 >= argc) {
      ExitWithUsage();
    } else if (flag == "--dir") {
      flags.dir = argv[++i];
    } else if (flag == "--rounds") {
      flags.round_count = std::max(1, std::atoi(argv[++i]));
    } else if (flag == "--block-kib") {
      flags.block_kib = static_cast<uint32_t>(std::atoi(argv[++i]));
    } else if (flag == "--only") {
      flags.only = argv[++i];
    } else if (flag == "--blocks") {
      flags.indexed_block_count = std::strtoull(argv[++i], nullptr, 10);
    } else if (flag == "--io-engine") {
      flags.io_engine = argv[++i];
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

// A folder that goes with the part of the run that needs it, or with the program when it dies.
class RunFolder {
 public:
  explicit RunFolder(const std::string& parent) {
    current_ = parent + "/kvtier-bench-XXXXXX";
    if (mkdtemp(current_.data()) == nullptr) Die("make a folder in " + parent);
    [[maybe_unused]] static const int at_exit = std::atexit(Remove);
  }
  ~RunFolder() { Remove(); }
  RunFolder(const RunFolder&) = delete;
  RunFolder& operator=(const RunFolder&) = delete;
  const std::string& path() const { return current_; }

 private:
  static void Remove() {
    std::error_code error;
    if (!current_.empty()) std::filesystem::remove_all(current_, error);
    current_.clear();
  }
  static inline std::string current_;
};

template <typename Function>
void InFolder(const Flags& flags, Settings settings, const char* part, Function&& function) {
  if (!flags.only.empty() && flags.only != part) return;
  const RunFolder folder(flags.dir);
  settings.dir = folder.path();
  const double begin = WallSeconds();
  function(settings);
  std::fprintf(stderr, "%s: %.1f s\n", part, WallSeconds() - begin);
}

std::vector<Row> RunAll(const Flags& flags) {
  Settings settings;
  settings.io_engine = flags.io_engine;
  if (flags.is_quick) {
    settings.pass_bytes = 32ULL << 20;
    settings.data_bytes = 64ULL << 20;
    settings.round_count = 1;
    settings.indexed_block_count = 20'000;
    settings.churn_segment_count = 32;
  }
  if (flags.round_count > 0) settings.round_count = flags.round_count;
  if (flags.indexed_block_count > 0) settings.indexed_block_count = flags.indexed_block_count;
  std::vector<Row> rows;
  for (const uint32_t kib : {64, 256, 1024, 4096}) {
    if (flags.block_kib != 0 && flags.block_kib != kib) continue;
    InFolder(flags, settings, "speed", [&](const Settings& here) {
      MeasureSpeed(here, kib << 10, /*has_limits=*/kib == 1024, &rows);
    });
  }
  InFolder(flags, settings, "order", [&](const Settings& here) { MeasureOrder(here, &rows); });
  InFolder(flags, settings, "blobs",
           [&](const Settings& here) { MeasureBlobStore(here, 1 << 20, &rows); });
  InFolder(flags, settings, "memory",
           [&](const Settings& here) { MeasureMemory(here, 1 << 20, &rows); });
  InFolder(flags, settings, "churn", [&](const Settings& here) { MeasureChurn(here, &rows); });
  InFolder(flags, settings, "lookup", [&](const Settings& here) { MeasureLookup(here, &rows); });
  InFolder(flags, settings, "start", [&](const Settings& here) { MeasureStart(here, &rows); });
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
  const Flags flags = ParseFlags(argc, argv);
  std::string command = "bench_tiers";
  for (int i = 1; i < argc; ++i) command += std::string(" ") + argv[i];
  const std::vector<Row> rows = RunAll(flags);
  if (flags.is_json) {
    PrintJson(rows,
              {.machine = MachineName(flags.dir), .date = Today(), .command = std::move(command)});
  } else {
    std::printf("%s, %s, `%s`\n\n", MachineName(flags.dir).c_str(), Today().c_str(),
                command.c_str());
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
