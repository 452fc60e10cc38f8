// SPDX-License-Identifier: Apache-2.0
#include "policy/miss_table.h"

#include <algorithm>
#include <bit>

namespace kvtier::policy {

MissTable::MissTable(uint32_t departure_count_max)
    : slots_(std::bit_ceil(std::max<size_t>(departure_count_max, kWays))) {}

MissTable::Slot* MissTable::SetOf(uint64_t key) {
  return &slots_[key % (slots_.size() / kWays) * kWays];
}

void MissTable::Put(uint64_t key, const Departure& departure) {
  Slot* const set = SetOf(key);
  Slot* place = set;
  for (Slot* slot = set; slot != set + kWays; ++slot) {
    if (slot->departure.reason != MissReason::kNone && slot->key == key) {
      place = slot;
      break;
    }
    if (slot->departure.at_ms < place->departure.at_ms) place = slot;
  }
  *place = {.key = key, .departure = departure};
}

std::optional<Departure> MissTable::Find(uint64_t key) const {
  const size_t set = key % (slots_.size() / kWays) * kWays;
  for (size_t i = set; i < set + kWays; ++i) {
    if (slots_[i].departure.reason != MissReason::kNone && slots_[i].key == key) {
      return slots_[i].departure;
    }
  }
  return std::nullopt;
}

void MissTable::Erase(uint64_t key) {
  Slot* const set = SetOf(key);
  for (Slot* slot = set; slot != set + kWays; ++slot) {
    if (slot->key == key) *slot = Slot();
  }
}

}  // namespace kvtier::policy
