// SPDX-License-Identifier: Apache-2.0
//
// A workload generator with the shapes of recorded coding agents: sessions that share a system
// prompt, grow turn by turn, pause for tools (seconds) and users (minutes), and fork sub-agents.
#pragma once

#include <cstdint>

#include "policy/sim/trace.h"

namespace kvtier::ctl {

struct WorkloadOptions {
  uint64_t seed = 1;
  uint32_t session_count = 24;
  // Turns of a session vary around this.
  uint32_t turn_count = 12;
  // Different system prompts; each session has one of them.
  uint32_t system_prompt_count = 3;
  uint32_t system_prompt_blocks = 24;
  // Sessions start spread over this time.
  uint64_t start_spread_ms = 300'000;
  uint32_t block_tokens = 64;
};

// Deterministic: equal options give equal traces.
sim::Trace GenerateWorkload(const WorkloadOptions& options);

}  // namespace kvtier::ctl
