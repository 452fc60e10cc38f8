// SPDX-License-Identifier: Apache-2.0
#include "policy/ghost_table.h"

#include <algorithm>
#include <bit>

namespace kvtier::policy {
namespace {

bool IsUnused(const Ghost& ghost) { return ghost.key_low == 0 && ghost.key_high == 0; }

bool HasKey(const Ghost& ghost, uint64_t key) {
  return ghost.key_low == static_cast<uint32_t>(key) &&
         ghost.key_high == static_cast<uint32_t>(key >> 32);
}

}  // namespace

GhostTable::GhostTable(uint32_t ghost_count_max)
    : ghosts_(std::max<size_t>(kWays, std::bit_ceil(size_t{ghost_count_max}))) {}

Ghost* GhostTable::SetOf(uint64_t key) {
  const size_t set_count = ghosts_.size() / kWays;
  return &ghosts_[(key & (set_count - 1)) * kWays];
}

std::optional<Ghost> GhostTable::Put(uint64_t key, Ghost ghost) {
  if (key == 0) return ghost;
  ghost.key_low = static_cast<uint32_t>(key);
  ghost.key_high = static_cast<uint32_t>(key >> 32);
  Ghost* const set = SetOf(key);
  Ghost* place = set;
  for (Ghost* way = set; way < set + kWays; ++way) {
    if (HasKey(*way, key)) {
      place = way;
      break;
    }
    if (IsUnused(*place)) continue;
    if (IsUnused(*way) || way->last_use < place->last_use) place = way;
  }
  const Ghost displaced = *place;
  *place = ghost;
  if (IsUnused(displaced)) return std::nullopt;
  return displaced;
}

std::optional<Ghost> GhostTable::Take(uint64_t key) {
  Ghost* const set = SetOf(key);
  for (Ghost* way = set; way < set + kWays; ++way) {
    if (key == 0 || !HasKey(*way, key)) continue;
    const Ghost found = *way;
    *way = Ghost();
    return found;
  }
  return std::nullopt;
}

}  // namespace kvtier::policy
