// SPDX-License-Identifier: Apache-2.0
//
// How long a read that somebody waits for takes while the tier reads ahead as fast as it can.
#include <cstdio>
#include <numeric>
#include <random>
#include <vector>

#include "tests/bench/tiers/meter.h"
#include "tests/bench/tiers/nvme_rig.h"
#include "tests/bench/tiers/rows.h"

namespace kvtier::bench {
namespace {

constexpr uint64_t kSegmentBytes = 64ULL << 20;
constexpr uint32_t kBlockBytes = 1 << 20;
// Reads ahead that are in flight all the time; the place that is left is the demand read's.
constexpr int kAheadDepth = NvmeRig::kDepthMax - 1;
constexpr double kShare = 0.99;

}  // namespace

void MeasureOrder(const Settings& settings, std::vector<Row>* rows) {
  const uint64_t data_count = settings.data_bytes / kBlockBytes;
  const uint64_t pass_count = settings.pass_bytes / kBlockBytes;
  NvmeRig rig({.dir = settings.dir + "/order",
               .capacity_bytes = 2 * settings.data_bytes + 10 * kSegmentBytes,
               .segment_bytes = kSegmentBytes,
               .block_bytes = kBlockBytes,
               .io_engine = settings.io_engine});
  std::vector<uint64_t> all(data_count);
  std::iota(all.begin(), all.end(), 0);
  rig.Write(all, NvmeRig::kDepthMax);
  std::mt19937_64 random(1);
  // In turn: nothing else; reads ahead; the same reads, as if somebody waited for each.
  std::vector<double> seconds[3];
  const auto pass = [&](std::vector<double>& taken) {
    for (uint64_t i = 0; i < pass_count; ++i) {
      const double begin = WallSeconds();
      rig.ReadOne(random() % data_count);
      taken.push_back(WallSeconds() - begin);
    }
  };
  for (int round = 0; round < settings.round_count; ++round) {
    pass(seconds[0]);
    rig.KeepReading(kAheadDepth, /*is_ahead=*/true, random());
    pass(seconds[1]);
    rig.StopReading();
    rig.KeepReading(kAheadDepth, /*is_ahead=*/false, random());
    pass(seconds[2]);
    rig.StopReading();
  }
  double p99_ms[3];
  double p50_ms[3];
  for (int i = 0; i < 3; ++i) {
    p99_ms[i] = 1e3 * Percentile(seconds[i], kShare);
    p50_ms[i] = 1e3 * Percentile(seconds[i], 0.5);
  }
  char note[192];
  std::snprintf(note, sizeof(note),
                "%.1f and %.1f ms, of the medians %.1f and %.1f ms; beside as many reads of equal "
                "urgency %.1f and %.1f ms",
                p99_ms[1], p99_ms[0], p50_ms[1], p50_ms[0], p99_ms[2], p50_ms[2]);
  rows->push_back(
      {.name = "demand read 1 MiB, p99 beside a full read-ahead queue over its p99 alone",
       .value = p99_ms[1] / p99_ms[0],
       .unit = "x",
       .higher_is_better = false,
       // Of tails, which differ by half from run to run.
       .is_ratio = false,
       .note = note});
  rows->push_back(
      {.name = "demand read 1 MiB, p99 beside a full read-ahead queue over equal urgency",
       .value = p99_ms[1] / p99_ms[2],
       .unit = "x",
       .higher_is_better = false,
       .is_ratio = false});
}

}  // namespace kvtier::bench
