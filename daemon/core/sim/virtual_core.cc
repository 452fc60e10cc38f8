// SPDX-License-Identifier: Apache-2.0
#include "daemon/core/sim/virtual_core.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "proto/base/check.h"
#include "proto/base/status_util.h"

namespace kvtier::core {
namespace {

// The core wants to know the time this often.
constexpr double kTickMs = 10;

CoreOptions OptionsOf(const VirtualCoreOptions& options) {
  CoreOptions core;
  for (size_t tier = 0; tier < kTierCount; ++tier)
    core.watermarks[tier] = options.tiers[tier].marks;
  core.nvme_admission = options.nvme_admission;
  return core;
}

}  // namespace

absl::StatusOr<ReplicaId> CountedSlots::Reserve(uint32_t /*payload_bytes*/, OwnerIdx /*owner*/) {
  if ((used_count_ + 1) * tier_.footprint_bytes > tier_.capacity_bytes) {
    return Exhausted("%d blocks fill the tier", used_count_);
  }
  ++used_count_;
  return next_++;
}

void CountedSlots::Free(ReplicaId /*replica*/) {
  KVT_CHECK(used_count_ > 0);
  --used_count_;
}

uint64_t CountedSlots::FootprintBytes(uint32_t /*payload_bytes*/) const {
  return tier_.footprint_bytes;
}

TierUsage CountedSlots::Usage() const {
  return {.capacity_bytes = tier_.capacity_bytes,
          .used_bytes = used_count_ * tier_.footprint_bytes};
}

VirtualCore::VirtualCore(const VirtualCoreOptions& options)
    : slots_{CountedSlots(options.tiers[0]), CountedSlots(options.tiers[1]),
             CountedSlots(options.tiers[2])},
      core_(std::make_unique<StoreCore>(OptionsOf(options), &slots_[0], &slots_[1],
                                        options.tiers[2].capacity_bytes > 0 ? &slots_[2] : nullptr,
                                        policy::NewEvictionPolicy(options.eviction))),
      options_(options) {
  const auto session = core_->OpenSession(0, 0);
  KVT_CHECK(session.ok());
  session_ = *session;
  const auto ns = core_->OpenNamespace(
      session_, {.hash = {}, .layout = {}, .block_bytes = options.block_bytes});
  KVT_CHECK(ns.ok());
  ns_ = *ns;
}

void VirtualCore::Settle() {
  while (!effects_.transfers.empty() || !effects_.replies.empty()) {
    const Effects effects = std::exchange(effects_, Effects());
    for (const Transfer& transfer : effects.transfers) {
      const auto source = static_cast<size_t>(transfer.source_tier);
      const auto target = static_cast<size_t>(transfer.target_tier);
      Link& link = links_[LinkOf(source, target)];
      const double speed = options_.link_speeds[source][target];
      const double begins = link.transfers.empty() ? now_ : link.transfers.back().first;
      const double takes = speed > 0 ? transfer.meta.payload_bytes / speed : 0;
      link.transfers.emplace_back(std::max(begins, now_) + takes, transfer.job);
    }
    for (const std::function<void()>& reply : effects.replies) reply();
    while (NextEventMs() <= now_) CompleteNext();
  }
}

size_t VirtualCore::LinkOf(size_t source, size_t target) {
  constexpr auto kNvme = static_cast<size_t>(TierId::kNvme);
  if (source == kNvme) return 0;
  if (target == kNvme) return 1;
  return source < target ? 2 : 3;
}

double VirtualCore::NextEventMs() const {
  double next = std::numeric_limits<double>::infinity();
  for (const Link& link : links_) {
    if (!link.transfers.empty()) next = std::min(next, link.transfers.front().first);
  }
  return next;
}

void VirtualCore::CompleteNext() {
  Link* first = nullptr;
  for (Link& link : links_) {
    if (link.transfers.empty()) continue;
    if (first == nullptr || link.transfers.front() < first->transfers.front()) first = &link;
  }
  KVT_CHECK(first != nullptr);
  const auto [ended, job] = first->transfers.front();
  first->transfers.pop_front();
  now_ = std::max(now_, ended);
  core_->OnTransferDone(job, absl::OkStatus(), now_ms(), &effects_);
}

void VirtualCore::AdvanceTo(double at_ms) {
  while (true) {
    const double event = NextEventMs();
    const double tick = core_->Waits() ? now_ + kTickMs : std::numeric_limits<double>::infinity();
    if (std::min(event, tick) > at_ms) break;
    if (event <= tick) {
      CompleteNext();
    } else {
      now_ = tick;
      core_->Tick(now_ms(), &effects_);
    }
    Settle();
  }
  now_ = std::max(now_, at_ms);
}

bool VirtualCore::Await(const bool& done, TimeMs deadline_ms) {
  const auto deadline = static_cast<double>(deadline_ms);
  while (!done && now_ < deadline) {
    const double next = NextEventMs();
    if (next <= std::min(deadline, now_ + kTickMs)) {
      CompleteNext();
    } else {
      now_ = std::min(deadline, now_ + kTickMs);
      core_->Tick(now_ms(), &effects_);
    }
    Settle();
  }
  return done;
}

}  // namespace kvtier::core
