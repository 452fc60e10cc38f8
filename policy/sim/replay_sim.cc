// SPDX-License-Identifier: Apache-2.0
#include "policy/sim/replay_sim.h"

#include <algorithm>
#include <vector>

namespace kvtier::sim {
namespace {

class ReplaySim {
 public:
  ReplaySim(const Trace& trace, const ReplayRules& rules, const TieredSimOptions& options)
      : trace_(trace),
        rules_(rules),
        store_(options, trace.blocks, trace.contexts.size(), policy::NewLruPolicy()),
        started_(trace.contexts.size(), false),
        chains_(trace.contexts.size()) {}

  SimHits Run() {
    for (const TraceEvent& event : ScheduleOf(trace_, rules_.schedule)) {
      switch (event.kind) {
        case TraceEventKind::kRequest:
          Serve(trace_.requests[event.request_idx], event.request_idx);
          break;
        case TraceEventKind::kPause:
          store_.Pause(event.context_idx);
          break;
        case TraceEventKind::kResume:
          store_.Resume(event.context_idx);
          break;
        case TraceEventKind::kClose:
          store_.Close(event.context_idx);
          break;
      }
    }
    return hits_;
  }

 private:
  void Fork(const TraceRequest& request) {
    started_[request.context_idx] = true;
    const uint32_t parent_idx = trace_.contexts[request.context_idx].parent_idx;
    if (parent_idx == kNoContext) return;
    const std::vector<BlockRef>& parent = chains_[parent_idx];
    const auto end =
        std::mismatch(parent.begin(), parent.end(), request.chain.begin(), request.chain.end());
    store_.SetChain(request.context_idx, {parent.begin(), end.first});
  }

  void Serve(const TraceRequest& request, uint64_t request_number) {
    if (!started_[request.context_idx]) Fork(request);
    const uint64_t now_ms = request.arrival_ms;
    const std::span<const BlockRef> chain(request.chain);
    const std::vector<TierIdx> found = store_.Lookup(chain);
    const SimLease lease = store_.Acquire(chain.first(found.size()), now_ms);
    const size_t hit_count = lease.ok_prefix_count;
    ++hits_.request_count;
    hits_.token_count += request.token_count;
    for (size_t i = 0; i < hit_count; ++i) {
      hits_.tier_hit_token_count[found[i]] += trace_.TokensOfBlock(request, i);
    }

    size_t stored_count = hit_count;
    while (stored_count < chain.size()) {
      const size_t batch_count =
          std::min<size_t>(rules_.commit_batch_blocks, chain.size() - stored_count);
      const size_t done = store_.Commit(chain.subspan(stored_count, batch_count), kHbm, now_ms);
      stored_count += done;
      if (done < batch_count) break;
    }
    hits_.exhausted_block_count += chain.size() - stored_count;
    store_.SetChain(request.context_idx, chain.first(stored_count));
    chains_[request.context_idx].assign(chain.begin(), chain.begin() + stored_count);
    SimLease fresh;
    if (rules_.DecodesAt(request_number)) {
      fresh = store_.Acquire(chain.subspan(hit_count, stored_count - hit_count), now_ms);
    }
    store_.Release(fresh);
    store_.Release(lease);
  }

  const Trace& trace_;
  const ReplayRules rules_;
  TieredSim store_;
  std::vector<bool> started_;
  std::vector<std::vector<BlockRef>> chains_;
  SimHits hits_;
};

double ShareOf(uint64_t part, uint64_t whole) {
  return whole == 0 ? 0.0 : static_cast<double>(part) / static_cast<double>(whole);
}

}  // namespace

double SimHits::HitRate() const {
  uint64_t hit_count = 0;
  for (const uint64_t count : tier_hit_token_count) hit_count += count;
  return ShareOf(hit_count, token_count);
}

double SimHits::TierHitRate(TierIdx tier) const {
  return ShareOf(tier_hit_token_count[tier], token_count);
}

SimHits SimulateReplay(const Trace& trace, const ReplayRules& rules,
                       const TieredSimOptions& options) {
  return ReplaySim(trace, rules, options).Run();
}

SimHits SimulateSingleCache(const Trace& trace, uint64_t capacity_blocks) {
  // A host tier alone: its victims are forgotten.
  TieredSimOptions options;
  options.tiers[kHost] = {
      .capacity_bytes = capacity_blocks, .footprint_bytes = 1, .marks = {.high = 1.0, .low = 1.0}};
  options.room_ahead_block_count = 1;
  TieredSim store(options, trace.blocks, trace.contexts.size(), policy::NewLruPolicy());
  SimHits hits;
  for (const TraceRequest& request : trace.requests) {
    const std::span<const BlockRef> chain(request.chain);
    const size_t found_count = store.Lookup(chain).size();
    std::vector<SimLease> leases;
    leases.push_back(store.Acquire(chain.first(found_count), request.arrival_ms));
    ++hits.request_count;
    hits.token_count += request.token_count;
    for (size_t i = 0; i < found_count; ++i) {
      hits.tier_hit_token_count[kHost] += trace.TokensOfBlock(request, i);
    }
    for (size_t i = found_count; i < chain.size(); ++i) {
      if (store.Commit(chain.subspan(i, 1), kHost, request.arrival_ms) == 0) break;
      leases.push_back(store.Acquire(chain.subspan(i, 1), request.arrival_ms));
    }
    for (const SimLease& lease : leases) store.Release(lease);
  }
  return hits;
}

}  // namespace kvtier::sim
