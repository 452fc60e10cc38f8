// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_TESTS_BENCH_KERNELS_RATIO_H_
#define KVTIER_TESTS_BENCH_KERNELS_RATIO_H_

#include <cstdint>
#include <functional>
#include <string>

namespace kvtier::bench {

// Two things timed in turn, so that a machine that slows down slows both.
struct Pair {
  std::function<void()> subject;
  std::function<void()> anchor;
};

struct Ratio {
  double subject_seconds = 0;  // Medians.
  double anchor_seconds = 0;
  double subject_over_anchor = 0;  // Median of the ratios of the rounds.
};

// Runs both once unmeasured, then `round_count` rounds, each in the other order than the last.
// Measure takes the CPU time of the calling thread, which other programs on the machine disturb
// less; MeasureWall is for things that use several threads.
Ratio Measure(const Pair& pair, uint32_t round_count);
Ratio MeasureWall(const Pair& pair, uint32_t round_count);

// "AMD EPYC 9005, 2 cores" from /proc/cpuinfo; "unknown" where there is none.
std::string MachineName();

}  // namespace kvtier::bench

#endif  // KVTIER_TESTS_BENCH_KERNELS_RATIO_H_
