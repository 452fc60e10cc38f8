// SPDX-License-Identifier: Apache-2.0
#include "policy/sim/concurrency.h"

#include <algorithm>
#include <functional>
#include <queue>
#include <utility>
#include <vector>

#include "proto/base/check.h"

namespace kvtier::sim {

Trace WithConcurrency(const Trace& trace, uint32_t context_count) {
  KVT_CHECK(context_count > 0);
  struct Span {
    uint64_t first_ms = UINT64_MAX;
    uint64_t end_ms = 0;
    uint64_t starts_ms = 0;
    bool started = false;
  };
  std::vector<Span> spans(trace.contexts.size());
  for (const TraceRequest& request : trace.requests) {
    Span& span = spans[request.context_idx];
    span.first_ms = std::min(span.first_ms, request.arrival_ms);
    span.end_ms = std::max(span.end_ms, request.arrival_ms + request.api_ms);
  }
  // When each place is free again.
  std::priority_queue<uint64_t, std::vector<uint64_t>, std::greater<>> free_at;
  for (uint32_t i = 0; i < context_count; ++i) free_at.push(0);
  Trace moved = trace;
  for (TraceRequest& request : moved.requests) {
    Span& span = spans[request.context_idx];
    if (!span.started) {
      span.started = true;
      span.starts_ms = free_at.top();
      free_at.pop();
      free_at.push(span.starts_ms + (span.end_ms - span.first_ms) + 1);
    }
    request.arrival_ms = span.starts_ms + (request.arrival_ms - span.first_ms);
  }
  std::vector<size_t> order(moved.requests.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::sort(order.begin(), order.end(), [&moved](size_t a, size_t b) {
    return std::pair(moved.requests[a].arrival_ms, a) < std::pair(moved.requests[b].arrival_ms, b);
  });
  std::vector<TraceRequest> sorted;
  sorted.reserve(order.size());
  for (const size_t i : order) sorted.push_back(std::move(moved.requests[i]));
  moved.requests = std::move(sorted);
  return moved;
}

}  // namespace kvtier::sim
