// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace kvtier::nvme {

// How many bytes may still be written to a drive today (UTC), so that it lasts as long as it
// should. A pure state machine; the time is given. Thread-compatible.
class WriteBudget {
 public:
  // What the next process has to know.
  struct Spent {
    uint64_t day = 0;  // since 1970
    uint64_t bytes = 0;
    friend bool operator==(const Spent&, const Spent&) = default;
  };

  // 0: no limit.
  explicit WriteBudget(uint64_t bytes_per_day) : bytes_per_day_(bytes_per_day) {}

  void Load(const Spent& spent) { spent_ = spent; }
  void Spend(uint64_t bytes, absl::Time now);
  // OK, or RESOURCE_EXHAUSTED that IsWriteBudgetSpent knows, with the time it is renewed.
  absl::Status Check(absl::Time now);
  const Spent& spent() const { return spent_; }

 private:
  // A clock that was put back renews nothing.
  void Renew(absl::Time now);

  const uint64_t bytes_per_day_;
  Spent spent_;
};

}  // namespace kvtier::nvme
