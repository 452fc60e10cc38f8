// SPDX-License-Identifier: Apache-2.0
#include "daemon/audit.h"

#include <atomic>
#include <cstdint>

#include "daemon/call_rate.h"
#include "daemon/log.h"
#include "daemon/monotonic.h"

namespace kvtier {
namespace {

constexpr uint32_t kRefusalsPerSecond = 10;

}  // namespace

void AuditAct(const AuditLine& line) {
  Log(LogLevel::kInfo, "audit",
      {{"who", line.who}, {"peer", line.peer}, {"what", line.what}, {"outcome", line.outcome}});
}

void AuditRefusal(const AuditLine& line) {
  static CallRate rate(kRefusalsPerSecond);
  static std::atomic<uint64_t> left_out_count{0};
  if (rate.TakeUs(MonotonicUs()) != 0) {
    left_out_count.fetch_add(1, std::memory_order_relaxed);
    return;
  }
  Log(LogLevel::kWarning, "audit",
      {{"who", line.who},
       {"peer", line.peer},
       {"what", line.what},
       {"outcome", line.outcome},
       {"left_out", left_out_count.exchange(0, std::memory_order_relaxed)}});
}

}  // namespace kvtier
