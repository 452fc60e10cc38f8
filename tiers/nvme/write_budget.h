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

  // What a process that dies may leave unkept: this part of a budget, or so much without one.
  static constexpr uint64_t kUnkeptPart = 128;
  static constexpr uint64_t kUnkeptBytesWithoutLimit = 1ULL << 30;

  // Since 1970, UTC.
  static uint64_t DayOf(absl::Time time);
  // What was spent, told by two who may each have missed the latest.
  static Spent Later(const Spent& one, const Spent& other);

  // 0: no limit.
  explicit WriteBudget(uint64_t bytes_per_day) : bytes_per_day_(bytes_per_day) {}

  void Load(const Spent& spent) { spent_ = spent; }
  void Spend(uint64_t bytes, absl::Time now);
  // OK, or RESOURCE_EXHAUSTED that IsWriteBudgetSpent knows, with the time it is renewed.
  absl::Status Check(absl::Time now);
  const Spent& spent() const { return spent_; }

  // So much was spent since NoteKept that it has to be kept again.
  bool is_keeping_due() const;
  bool has_unkept() const { return spent_ != kept_; }
  void NoteKept() { kept_ = spent_; }

 private:
  // A clock that was put back renews nothing.
  void Renew(absl::Time now);

  const uint64_t bytes_per_day_;
  Spent spent_;
  Spent kept_;
};

}  // namespace kvtier::nvme
