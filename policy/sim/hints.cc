// SPDX-License-Identifier: Apache-2.0
#include "policy/sim/hints.h"

#include <algorithm>
#include <random>

namespace kvtier::sim {
namespace {

std::vector<uint32_t> SuccessorsByContext(const Trace& trace) {
  std::vector<uint32_t> next(trace.requests.size(), kNoRequest);
  std::vector<uint32_t> last_of(trace.contexts.size(), kNoRequest);
  for (uint32_t i = 0; i < trace.requests.size(); ++i) {
    uint32_t& last = last_of[trace.requests[i].context_idx];
    if (last != kNoRequest) next[last] = i;
    last = i;
  }
  return next;
}

std::vector<uint32_t> SuccessorsByChain(const Trace& trace) {
  std::vector<uint32_t> next(trace.requests.size(), kNoRequest);
  std::vector<uint32_t> last_user(trace.blocks.size(), kNoRequest);
  for (uint32_t i = 0; i < trace.requests.size(); ++i) {
    const std::vector<BlockRef>& chain = trace.requests[i].chain;
    size_t shared = chain.size();
    while (shared > 0 && last_user[chain[shared - 1]] == kNoRequest) --shared;
    if (shared > 0) {
      const uint32_t before = last_user[chain[shared - 1]];
      const bool continues = shared + 1 >= trace.requests[before].chain.size();
      if (continues && next[before] == kNoRequest) next[before] = i;
    }
    for (const BlockRef block : chain) last_user[block] = i;
  }
  return next;
}

}  // namespace

std::vector<uint32_t> SuccessorsOf(const Trace& trace) {
  const bool has_sessions = trace.contexts.size() < trace.requests.size();
  return has_sessions ? SuccessorsByContext(trace) : SuccessorsByChain(trace);
}

std::vector<RequestHint> HintsOf(const Trace& trace, const HintOptions& options) {
  const std::vector<uint32_t> successors = SuccessorsOf(trace);
  std::mt19937_64 random(options.seed);
  std::uniform_real_distribution<double> error(-options.return_error, options.return_error);
  std::vector<RequestHint> hints(trace.requests.size());
  for (size_t i = 0; i < hints.size(); ++i) {
    const TraceRequest& request = trace.requests[i];
    if (options.step) hints[i].next = request.next;
    if (successors[i] == kNoRequest) {
      if (options.finished) hints[i].next = policy::NextStep::kFinished;
    } else if (options.returns) {
      const auto away =
          static_cast<double>(trace.requests[successors[i]].arrival_ms - request.arrival_ms);
      hints[i].returns_in_ms =
          std::max<uint64_t>(1, static_cast<uint64_t>(away * (1 + error(random))));
    }
  }
  return hints;
}

}  // namespace kvtier::sim
