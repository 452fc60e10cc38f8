// SPDX-License-Identifier: Apache-2.0
#include "policy/sim/trace.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "proto/base/check.h"

namespace kvtier::sim {
namespace {

// No system has blocks of a million tokens; whoever says so is taken at that.
constexpr long kBlockTokensLogMax = 20;

// Not std::stable_sort: clang warns of a deprecated function inside it.
template <typename Item>
void SortStably(std::vector<Item>* items, uint64_t Item::* time) {
  std::vector<size_t> order(items->size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    const uint64_t time_a = (*items)[a].*time;
    const uint64_t time_b = (*items)[b].*time;
    return time_a != time_b ? time_a < time_b : a < b;
  });
  std::vector<Item> sorted;
  sorted.reserve(items->size());
  for (const size_t i : order) sorted.push_back(std::move((*items)[i]));
  *items = std::move(sorted);
}

}  // namespace

void Trace::Truncate(size_t request_count) {
  if (request_count < requests.size()) requests.resize(request_count);
}

uint64_t Trace::TokensOfBlock(const TraceRequest& request, size_t position) const {
  const uint64_t before = uint64_t{block_tokens} * position;
  if (before >= request.token_count) return 0;
  return std::min<uint64_t>(block_tokens, request.token_count - before);
}

uint64_t Trace::BlockReferenceCount() const {
  uint64_t count = 0;
  for (const TraceRequest& request : requests) count += request.chain.size();
  return count;
}

uint32_t TraceBuilder::AddContext(uint32_t parent_idx) {
  KVT_CHECK(parent_idx == kNoContext || parent_idx < trace_.contexts.size());
  trace_.contexts.push_back({.parent_idx = parent_idx});
  return static_cast<uint32_t>(trace_.contexts.size() - 1);
}

void TraceBuilder::AddRequest(uint32_t context_idx, uint64_t arrival_ms, uint64_t api_ms,
                              uint64_t token_count, std::span<const uint64_t> hash_ids,
                              policy::NextStep next) {
  KVT_CHECK(context_idx < trace_.contexts.size());
  TraceRequest request{.arrival_ms = arrival_ms,
                       .api_ms = api_ms,
                       .context_idx = context_idx,
                       .token_count = token_count,
                       .next = next,
                       .chain = {}};
  request.chain.reserve(hash_ids.size());
  BlockRef parent = kNoBlock;
  for (const uint64_t hash_id : hash_ids) {
    const auto unused = static_cast<BlockRef>(trace_.blocks.size());
    const auto [place, inserted] = refs_.try_emplace({parent, hash_id}, unused);
    if (inserted) {
      trace_.blocks.push_back({.hash_id = hash_id,
                               .parent = parent,
                               .depth = static_cast<uint32_t>(request.chain.size())});
    }
    parent = place->second;
    request.chain.push_back(parent);
  }
  trace_.requests.push_back(std::move(request));
}

Trace TraceBuilder::Build() && {
  SortStably(&trace_.requests, &TraceRequest::arrival_ms);
  double token_count = 0;
  double block_count = 0;
  for (const TraceRequest& request : trace_.requests) {
    if (request.token_count == 0) continue;
    token_count += static_cast<double>(request.token_count);
    block_count += static_cast<double>(request.chain.size());
  }
  if (block_count > 0) {
    const long log = std::lround(std::log2(token_count / block_count));
    trace_.block_tokens = 1U << std::clamp(log, 0L, kBlockTokensLogMax);
  }
  for (TraceRequest& request : trace_.requests) {
    if (request.token_count == 0) {
      request.token_count = uint64_t{trace_.block_tokens} * request.chain.size();
    }
  }
  return std::move(trace_);
}

std::vector<TraceEvent> ScheduleOf(const Trace& trace, const ScheduleOptions& options) {
  const auto request_count = static_cast<uint32_t>(trace.requests.size());
  constexpr uint32_t kNone = UINT32_MAX;
  std::vector<uint32_t> next_of(request_count, kNone);
  std::vector<uint32_t> last_of(trace.contexts.size(), kNone);
  for (uint32_t i = 0; i < request_count; ++i) {
    uint32_t& last = last_of[trace.requests[i].context_idx];
    if (last != kNone) next_of[last] = i;
    last = i;
  }

  // Events of one context are pushed in their order, so a stable sort by time keeps it.
  std::vector<TraceEvent> events;
  for (uint32_t i = 0; i < request_count; ++i) {
    const TraceRequest& request = trace.requests[i];
    const uint32_t context_idx = request.context_idx;
    events.push_back({.at_ms = request.arrival_ms,
                      .kind = TraceEventKind::kRequest,
                      .context_idx = context_idx,
                      .request_idx = i});
    const uint64_t end_ms = request.arrival_ms + request.api_ms;
    if (next_of[i] == kNone) {
      events.push_back(
          {.at_ms = end_ms, .kind = TraceEventKind::kClose, .context_idx = context_idx});
      continue;
    }
    const uint64_t next_ms = trace.requests[next_of[i]].arrival_ms;
    if (!options.pauses || next_ms <= end_ms + options.pause_gap_ms) continue;
    events.push_back({.at_ms = end_ms,
                      .kind = TraceEventKind::kPause,
                      .context_idx = context_idx,
                      .next_request_in_ms = next_ms - end_ms});
    const bool ahead = next_ms > end_ms + options.resume_ahead_ms;
    events.push_back({.at_ms = ahead ? next_ms - options.resume_ahead_ms : next_ms,
                      .kind = TraceEventKind::kResume,
                      .context_idx = context_idx});
  }
  SortStably(&events, &TraceEvent::at_ms);
  return events;
}

}  // namespace kvtier::sim
