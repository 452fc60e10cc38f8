// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "daemon/core/store_core.h"
#include "proto/base/check.h"

namespace kvtier::core {

// A block can be read on a tier from now on, or no more.
struct RingEvent {
  Key key;
  Key parent;
  NamespaceIdx ns = 0;
  TierId tier = TierId::kHbm;
  bool is_stored = false;
  bool has_parent = false;
};

// The last events of one tenant, numbered from 1: the earliest make room for the latest, so that
// whoever reads them slowly holds nobody up. Single-thread.
class EventRing {
 public:
  // Requires: event_count_max > 0.
  explicit EventRing(size_t event_count_max) : events_(event_count_max) {}

  void Push(const RingEvent& event) { events_[++last_ % events_.size()] = event; }

  // Number of the latest event; 0 before the first.
  uint64_t last() const { return last_; }
  // All events after that one are still there.
  bool HasAllAfter(uint64_t sequence) const {
    return sequence <= last_ && last_ - sequence <= events_.size();
  }
  // Requires: sequence is 1 to last(), and HasAllAfter(sequence - 1).
  const RingEvent& At(uint64_t sequence) const {
    KVT_CHECK(sequence > 0 && sequence <= last_ && HasAllAfter(sequence - 1));
    return events_[sequence % events_.size()];
  }

 private:
  std::vector<RingEvent> events_;
  uint64_t last_ = 0;
};

}  // namespace kvtier::core
