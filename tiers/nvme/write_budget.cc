// SPDX-License-Identifier: Apache-2.0
#include "tiers/nvme/write_budget.h"

#include <algorithm>
#include <utility>

#include "proto/base/status_util.h"
#include "tiers/tier.h"

namespace kvtier::nvme {
namespace {

constexpr int64_t kSecondsPerDay = 24 * 60 * 60;

}  // namespace

uint64_t WriteBudget::DayOf(absl::Time time) {
  return static_cast<uint64_t>(std::max<int64_t>(0, absl::ToUnixSeconds(time)) / kSecondsPerDay);
}

WriteBudget::Spent WriteBudget::Later(const Spent& one, const Spent& other) {
  if (one.day != other.day) return one.day > other.day ? one : other;
  return one.bytes > other.bytes ? one : other;
}

void WriteBudget::Renew(absl::Time now) {
  const uint64_t today = DayOf(now);
  if (today > spent_.day) spent_ = {.day = today, .bytes = 0};
}

void WriteBudget::Spend(uint64_t bytes, absl::Time now) {
  Renew(now);
  spent_.bytes += bytes;
}

absl::Status WriteBudget::Check(absl::Time now) {
  Renew(now);
  if (bytes_per_day_ == 0 || spent_.bytes < bytes_per_day_) return absl::OkStatus();
  const absl::Time renewed =
      absl::FromUnixSeconds((static_cast<int64_t>(spent_.day) + 1) * kSecondsPerDay);
  absl::Status status =
      Exhausted("nvme: %d bytes were written today of %d allowed a day; more at %s", spent_.bytes,
                bytes_per_day_, absl::FormatTime(renewed, absl::UTCTimeZone()));
  return WriteBudgetSpent(std::move(status));
}

bool WriteBudget::is_keeping_due() const {
  const uint64_t unkept_bytes = spent_.bytes - (spent_.day == kept_.day ? kept_.bytes : 0);
  return unkept_bytes > 0 && unkept_bytes >= (bytes_per_day_ == 0 ? kUnkeptBytesWithoutLimit
                                                                  : bytes_per_day_ / kUnkeptPart);
}

}  // namespace kvtier::nvme
