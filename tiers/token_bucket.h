// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>

namespace kvtier {

// Says when bytes may go so that their rate stays below a limit. Holds 10 ms worth of bytes at
// most, so that idle time is no credit. What is larger than that may go as a whole; what comes
// after it waits for as long as it should have taken. No clock of its own. Thread-compatible.
class TokenBucket {
 public:
  // 0: no limit.
  explicit TokenBucket(uint64_t bytes_per_second)
      : bytes_per_ms_(static_cast<double>(bytes_per_second) / 1000.0), bytes_(bytes_max()) {}

  bool is_limited() const { return bytes_per_ms_ > 0.0; }
  // `now_ms` does not go back.
  bool MayGo(uint64_t now_ms) {
    bytes_ = std::min(bytes_max(),
                      bytes_ + bytes_per_ms_ * static_cast<double>(now_ms - refilled_at_ms_));
    refilled_at_ms_ = now_ms;
    return !is_limited() || bytes_ > 0.0;
  }
  void Take(uint64_t bytes) {
    if (is_limited()) bytes_ -= static_cast<double>(bytes);
  }

 private:
  double bytes_max() const { return bytes_per_ms_ * 10.0; }

  double bytes_per_ms_;
  double bytes_;
  uint64_t refilled_at_ms_ = 0;
};

}  // namespace kvtier
