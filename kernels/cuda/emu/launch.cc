// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/emu/launch.h"

#include <algorithm>

namespace kvtier::kernels::cuda::emu {
namespace {

const char* NameOf(AccessKind kind) {
  switch (kind) {
    case AccessKind::kGlobalRead:
      return "global read";
    case AccessKind::kGlobalWrite:
      return "global write";
    case AccessKind::kSharedRead:
      return "shared read";
    case AccessKind::kSharedWrite:
      return "shared write";
  }
  return "";
}

}  // namespace

void Memory::Add(const Range& range) {
  if (range.bytes == 0) return;
  const auto at =
      std::lower_bound(ranges_.begin(), ranges_.end(), range,
                       [](const Range& a, const Range& b) { return a.begin < b.begin; });
  ranges_.insert(at, range);
}

uint64_t Report::BankConflicts() const {
  uint64_t count = 0;
  for (const SiteCounters& site : sites) {
    if (IsShared(site.kind)) count += site.unit_count - site.ideal_unit_count;
  }
  return count;
}

uint64_t Report::ExtraSectors(AccessKind kind) const {
  uint64_t count = 0;
  for (const SiteCounters& site : sites) {
    if (site.kind == kind) count += site.unit_count - site.ideal_unit_count;
  }
  return count;
}

std::string Report::ToString() const {
  std::string text;
  for (const Finding& finding : findings) text += finding.message + "\n";
  for (const SiteCounters& site : sites) {
    if (site.unit_count == site.ideal_unit_count) continue;
    text += site.place + ": " + NameOf(site.kind) + " of " + std::to_string(site.access_bytes) +
            " bytes, " + std::to_string(site.request_count) + " requests, " +
            std::to_string(site.unit_count) + (IsShared(site.kind) ? " wavefronts" : " sectors") +
            ", ideal " + std::to_string(site.ideal_unit_count) + "\n";
  }
  return text;
}

}  // namespace kvtier::kernels::cuda::emu
