// SPDX-License-Identifier: Apache-2.0
//
// The store core in virtual time: tiers that count room, links that take as long as bytes over
// bandwidth say. What it decides is what a daemon decides, since it is the same code.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "daemon/core/store_core.h"
#include "policy/policy.h"
#include "tiers/tier.h"

namespace kvtier::core {

struct VirtualTier {
  uint64_t capacity_bytes = 0;
  // What one block takes of it, with padding and header.
  uint64_t footprint_bytes = 1;
  policy::Watermarks marks{.high = 1.0, .low = 1.0};
};

// Bytes per millisecond; 0: moves take no time.
using LinkSpeeds = std::array<std::array<double, kTierCount>, kTierCount>;

struct VirtualCoreOptions {
  std::array<VirtualTier, kTierCount> tiers;
  policy::Admission nvme_admission = policy::Admission::kAll;
  policy::EvictionKind eviction = policy::EvictionKind::kLru;
  // Payload of one block.
  uint32_t block_bytes = 1;
  LinkSpeeds link_speeds{};
};

// Counts blocks of one size. Single-thread.
class CountedSlots final : public SlotSource {
 public:
  explicit CountedSlots(const VirtualTier& tier) : tier_(tier) {}

  absl::StatusOr<ReplicaId> Reserve(uint32_t payload_bytes, OwnerIdx owner) override;
  void Free(ReplicaId replica) override;
  uint64_t FootprintBytes(uint32_t payload_bytes) const override;
  TierUsage Usage() const override;

 private:
  const VirtualTier tier_;
  uint64_t used_count_ = 0;
  ReplicaId next_ = 1;
};

// One session with one namespace. Single-thread. Each link moves one block after the other in the
// order of their starts; nvme has one for all reads and one for all writes.
class VirtualCore {
 public:
  explicit VirtualCore(const VirtualCoreOptions& options);

  StoreCore& core() { return *core_; }
  SessionId session() const { return session_; }
  NamespaceIdx ns() const { return ns_; }
  TimeMs now_ms() const { return static_cast<TimeMs>(now_); }
  // For the next call of the core; then Settle.
  Effects* effects() { return &effects_; }

  // Starts the transfers and gives the replies that calls caused; what takes no time is done.
  void Settle();
  // Lets time pass until `at_ms`; not backwards.
  void AdvanceTo(double at_ms);
  // Lets time pass until `done` or the deadline, whichever comes first. Returns `done`.
  bool Await(const bool& done, TimeMs deadline_ms);
  // When the next transfer ends; infinite when none is under way.
  double NextEventMs() const;
  double now() const { return now_; }

 private:
  struct Link {
    std::deque<std::pair<double, JobId>> transfers;  // with the time of their ends
  };
  // Reads and writes of the drive, and both ways between hbm and host.
  static constexpr size_t kLinkCount = 4;
  static size_t LinkOf(size_t source, size_t target);

  // Ends what ends first. Requires: something is under way.
  void CompleteNext();

  std::array<CountedSlots, kTierCount> slots_;
  std::unique_ptr<StoreCore> core_;
  const VirtualCoreOptions options_;
  SessionId session_ = 0;
  NamespaceIdx ns_ = 0;
  Effects effects_;
  std::array<Link, kLinkCount> links_;
  double now_ = 0;
};

}  // namespace kvtier::core
