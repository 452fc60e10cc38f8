// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "policy/policy.h"
#include "policy/sim/trace.h"

namespace kvtier::sim {

// What a client says when a request ends.
struct RequestHint {
  policy::NextStep next = policy::NextStep::kUnknown;
  // 0: it does not say.
  uint64_t returns_in_ms = 0;
};

struct HintOptions {
  // The recorded next step.
  bool step = true;
  // That a context's last request was its last.
  bool finished = false;
  // When the context's next request comes, off by at most `return_error` of the time until then,
  // evenly distributed.
  bool returns = false;
  double return_error = 0.25;
  uint64_t seed = 1;
};

// The request of the same context that follows each request, or kNoRequest. In a trace without
// sessions a request continues the last one that used the deepest block it shares with the past, if
// it shares all of that one's blocks but the last, which may not have been full.
inline constexpr uint32_t kNoRequest = UINT32_MAX;
std::vector<uint32_t> SuccessorsOf(const Trace& trace);

// One hint per request, computed from what follows it in the trace.
std::vector<RequestHint> HintsOf(const Trace& trace, const HintOptions& options);

}  // namespace kvtier::sim
