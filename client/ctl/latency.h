// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <vector>

namespace kvtier::ctl {

// Every duration of one kind of call, in microseconds. Single-thread.
class LatencyRecorder {
 public:
  void Record(std::chrono::steady_clock::duration duration) {
    micros_.push_back(static_cast<uint64_t>(
        std::chrono::duration_cast<std::chrono::microseconds>(duration).count()));
  }

  uint64_t count() const { return micros_.size(); }

  // The smallest value that `share` of all are not above; 0 without any.
  uint64_t QuantileMicros(double share) const {
    if (micros_.empty()) return 0;
    std::vector<uint64_t> sorted = micros_;
    const auto rank = static_cast<size_t>(share * static_cast<double>(sorted.size() - 1));
    const auto place = sorted.begin() + static_cast<std::ptrdiff_t>(rank);
    std::nth_element(sorted.begin(), place, sorted.end());
    return *place;
  }

 private:
  std::vector<uint64_t> micros_;
};

}  // namespace kvtier::ctl
