// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace kvtier {

// How often something may happen: a bucket that gains `per_second` tokens a second and holds those
// of one second, at least one. Full at first. Thread-safe; never blocks.
//
// It is kept as the time at which it would be full again (GCRA), so that one atomic is enough.
class CallRate {
 public:
  // Requires: 0 < per_second <= 1,000,000.
  explicit CallRate(uint32_t per_second)
      : interval_us_(1'000'000 / per_second),
        burst_us_(std::max(interval_us_, uint64_t{1'000'000})) {}

  // Takes a token and answers 0, or answers in how many microseconds there will be one. `now_us`:
  // of a clock that does not go back.
  uint64_t TakeUs(uint64_t now_us) {
    // Relaxed: no other data is published with it.
    uint64_t full_at_us = full_at_us_.load(std::memory_order_relaxed);
    while (true) {
      const uint64_t next_us = std::max(full_at_us, now_us) + interval_us_;
      if (next_us > now_us + burst_us_) return next_us - now_us - burst_us_;
      if (full_at_us_.compare_exchange_weak(full_at_us, next_us, std::memory_order_relaxed)) {
        return 0;
      }
    }
  }

 private:
  const uint64_t interval_us_;
  const uint64_t burst_us_;
  std::atomic<uint64_t> full_at_us_{0};
};

}  // namespace kvtier
