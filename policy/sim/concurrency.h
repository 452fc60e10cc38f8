// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "policy/sim/trace.h"

namespace kvtier::sim {

// The same contexts, so many at a time: in the order of their first requests, each starts when one
// of those before it has ended, and keeps its own pace. Requires: `context_count` > 0.
Trace WithConcurrency(const Trace& trace, uint32_t context_count);

}  // namespace kvtier::sim
