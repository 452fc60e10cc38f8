// SPDX-License-Identifier: Apache-2.0
#include "tests/bench/kernels/ratio.h"

#include <time.h>

#include <algorithm>
#include <fstream>
#include <thread>
#include <vector>

namespace kvtier::bench {
namespace {

double Now(clockid_t clock) {
  timespec time{};
  clock_gettime(clock, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

double SecondsOf(const std::function<void()>& function, clockid_t clock) {
  const double start = Now(clock);
  function();
  return Now(clock) - start;
}

double Median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

Ratio MeasureOn(clockid_t clock, const Pair& pair, uint32_t round_count) {
  pair.subject();
  pair.anchor();
  std::vector<double> subject;
  std::vector<double> anchor;
  std::vector<double> ratio;
  for (uint32_t round = 0; round < round_count; ++round) {
    const bool anchor_first = round % 2 != 0;
    if (anchor_first) anchor.push_back(SecondsOf(pair.anchor, clock));
    subject.push_back(SecondsOf(pair.subject, clock));
    if (!anchor_first) anchor.push_back(SecondsOf(pair.anchor, clock));
    ratio.push_back(subject.back() / anchor.back());
  }
  return {.subject_seconds = Median(subject),
          .anchor_seconds = Median(anchor),
          .subject_over_anchor = Median(ratio)};
}

}  // namespace

Ratio Measure(const Pair& pair, uint32_t round_count) {
  return MeasureOn(CLOCK_THREAD_CPUTIME_ID, pair, round_count);
}

Ratio MeasureWall(const Pair& pair, uint32_t round_count) {
  return MeasureOn(CLOCK_MONOTONIC, pair, round_count);
}

std::string MachineName() {
  std::ifstream cpuinfo("/proc/cpuinfo");
  for (std::string line; std::getline(cpuinfo, line);) {
    if (!line.starts_with("model name")) continue;
    const size_t colon = line.find(": ");
    if (colon == std::string::npos) break;
    return line.substr(colon + 2) + ", " + std::to_string(std::thread::hardware_concurrency()) +
           " cores";
  }
  return "unknown";
}

}  // namespace kvtier::bench
