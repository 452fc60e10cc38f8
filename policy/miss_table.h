// SPDX-License-Identifier: Apache-2.0
//
// Why a block is not here: a bounded memory of blocks that left every tier.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "policy/policy.h"

namespace kvtier::policy {

enum class MissReason : uint8_t {
  kNone,
  // Its room was needed, on `tier`.
  kEvicted,
  // Its room on host was needed, and nvme.admission did not let it in.
  kNotAdmitted,
  kCorrupt,
  // A client closed its context and asked for that.
  kDropped,
  // The tier that held it failed.
  kTierLost,
};
inline constexpr size_t kMissReasonCount = 6;

struct Departure {
  uint64_t at_ms = 0;
  uint64_t last_use_ms = 0;
  uint32_t use_count = 0;
  MissReason reason = MissReason::kNone;
  uint8_t tier = 0;
  // It was looked up since.
  bool regretted = false;
};

// Eight ways: where a set is full, the earliest departure is forgotten. Keys are evenly distributed
// (hashes). Single-thread. 32 bytes each, allocated at once.
class MissTable {
 public:
  explicit MissTable(uint32_t departure_count_max);

  void Put(uint64_t key, const Departure& departure);
  std::optional<Departure> Find(uint64_t key) const;
  // It is back.
  void Erase(uint64_t key);
  uint64_t memory_bytes() const { return slots_.size() * sizeof(Slot); }

 private:
  static constexpr size_t kWays = 8;
  struct Slot {
    uint64_t key = 0;
    Departure departure;
  };
  static_assert(sizeof(Slot) == 32);

  Slot* SetOf(uint64_t key);

  std::vector<Slot> slots_;
};

}  // namespace kvtier::policy
