// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "policy/hazard_model.h"

namespace kvtier::policy {

// What is remembered of a block that left every tier, so that its return teaches something.
struct Ghost {
  // Two halves: a 64-bit member would pad the record to 24 bytes.
  uint32_t key_low = 0;
  uint32_t key_high = 0;  // both 0: unused
  Tick last_use = 0;
  CohortIdx cohort = kNoCohort;
  ClassIdx class_idx = 0;
  uint8_t use_count = 0;
  uint8_t gap_class = 0;
};
static_assert(sizeof(Ghost) == 20);

// A bounded table of ghosts, eight ways: where a set is full, the one unused for longest goes.
// Single-thread. Keys are evenly distributed (hashes); key 0 is not remembered.
class GhostTable {
 public:
  // Room for `ghost_count_max`, rounded up to a power of two and 8 at least. It is allocated at
  // once.
  explicit GhostTable(uint32_t ghost_count_max);

  // Returns what is not remembered any more.
  std::optional<Ghost> Put(uint64_t key, Ghost ghost);
  // Removes and returns it.
  std::optional<Ghost> Take(uint64_t key);
  uint64_t memory_bytes() const { return ghosts_.size() * sizeof(Ghost); }

 private:
  static constexpr size_t kWays = 8;
  Ghost* SetOf(uint64_t key);

  std::vector<Ghost> ghosts_;
};

}  // namespace kvtier::policy
