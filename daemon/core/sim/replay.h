// SPDX-License-Identifier: Apache-2.0
//
// The calls that `kvtierctl replay` makes for a workload, made to a store core in virtual time.
#pragma once

#include <cstdint>
#include <span>

#include "daemon/core/sim/virtual_core.h"
#include "policy/sim/replay_rules.h"
#include "policy/sim/trace.h"

namespace kvtier::core {

// `at_ms`: when each event of the schedule happened, as a run of a daemon measured it; empty: at
// the times of the trace.
sim::SimHits SimulateReplay(const sim::Trace& trace, const sim::ReplayRules& rules,
                            const VirtualCoreOptions& options,
                            std::span<const uint64_t> at_ms = {});

// Names block `block` of a trace, by its content and its parent's key.
std::vector<Key> KeysOfTrace(const sim::Trace& trace);

}  // namespace kvtier::core
