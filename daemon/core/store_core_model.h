// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "policy/policy.h"

namespace kvtier::core {

// The store core beside a model of what every slot holds: three clients call, transfers end or
// fail, time passes, tiers fill up and are lost, as somebody picks. Breaches of a rule, of the
// core's own or of what its users rely on, are GoogleTest failures. Single-thread.
class StoreCoreModel {
 public:
  struct Options {
    policy::EvictionKind eviction = policy::EvictionKind::kLru;
    // Blocks that fit.
    uint64_t hbm_slots = 0;
    uint64_t host_slots = 0;
    uint64_t nvme_slots = 0;
    // The clients are of two tenants with quotas, beside a third that has a reserve and does
    // nothing. Needs two slots on hbm.
    bool has_tenants = false;
  };
  // A number below `bound`, which is 1 or more. The same numbers give the same run.
  using PickNumber = std::function<size_t(size_t bound)>;

  StoreCoreModel(const Options& options, PickNumber pick);
  ~StoreCoreModel();
  StoreCoreModel(const StoreCoreModel&) = delete;
  StoreCoreModel& operator=(const StoreCoreModel&) = delete;

  // One event, and what follows from it; then the rules are checked.
  void Step();
  // Ends every session and completes everything: nothing may be left but unpinned blocks.
  void Finish();

  // Slots of leases and fills whose contents were looked at.
  uint64_t verified() const;
  // How often a watcher's picture was compared with what can be read.
  uint64_t watched_count() const;
  // Of everything that moved, in order.
  size_t moves_hash() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvtier::core
