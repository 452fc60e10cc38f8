// SPDX-License-Identifier: Apache-2.0
//
// A recorded or generated workload: requests of contexts over shared chains of blocks, and the
// calls an engine makes for them in virtual time.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "policy/policy.h"

namespace kvtier::sim {

using policy::BlockRef;

inline constexpr BlockRef kNoBlock = UINT32_MAX;
inline constexpr uint32_t kNoContext = UINT32_MAX;

// One block of the workload: where it stands in its chain, and what names its content.
struct TraceBlock {
  uint64_t hash_id = 0;
  BlockRef parent = kNoBlock;
  uint32_t depth = 0;
};

struct TraceRequest {
  uint64_t arrival_ms = 0;
  // How long the engine works on it.
  uint64_t api_ms = 0;
  uint32_t context_idx = 0;
  // Of its prompt. The last ones may not fill a block.
  uint64_t token_count = 0;
  // What the client does after it, where the recorder knew.
  policy::NextStep next = policy::NextStep::kUnknown;
  std::vector<BlockRef> chain;
};

struct TraceContext {
  // The context this one was forked from, or kNoContext.
  uint32_t parent_idx = kNoContext;
};

// Immutable once built. Requests are in order of arrival.
struct Trace {
  std::vector<TraceBlock> blocks;  // by BlockRef
  std::vector<TraceRequest> requests;
  std::vector<TraceContext> contexts;
  // Tokens of one block in the system that was recorded; where blocks of another size stand in for
  // them, tokens are still counted as there.
  uint32_t block_tokens = 1;

  // Tokens of block `position` of the request's chain: fewer at the end, where a recorder counted a
  // part of a block as one.
  uint64_t TokensOfBlock(const TraceRequest& request, size_t position) const;
  // Keeps the first `request_count` requests.
  void Truncate(size_t request_count);
  uint64_t BlockReferenceCount() const;
};

// Numbers the blocks and contexts of a workload. A block is identified by its parent and its hash
// id: equal ids under equal prefixes are one block. Single-thread.
class TraceBuilder {
 public:
  // A context that `parent_idx` was forked into, or a fresh one.
  uint32_t AddContext(uint32_t parent_idx = kNoContext);
  // `token_count` 0: not recorded.
  void AddRequest(uint32_t context_idx, uint64_t arrival_ms, uint64_t api_ms, uint64_t token_count,
                  std::span<const uint64_t> hash_ids,
                  policy::NextStep next = policy::NextStep::kUnknown);
  // Sorts the requests by arrival (stable) and infers block_tokens: the power of two nearest to the
  // tokens per block of all requests, 1 without recorded tokens. The builder is not used
  // afterwards.
  Trace Build() &&;

 private:
  absl::flat_hash_map<std::pair<BlockRef, uint64_t>, BlockRef> refs_;
  Trace trace_;
};

enum class TraceEventKind : uint8_t { kRequest, kPause, kResume, kClose };

struct TraceEvent {
  uint64_t at_ms = 0;
  TraceEventKind kind = TraceEventKind::kRequest;
  uint32_t context_idx = 0;
  // kRequest only.
  uint32_t request_idx = 0;
  // kPause: when the context's next request comes, from now.
  uint64_t next_request_in_ms = 0;
};

struct ScheduleOptions {
  bool pauses = true;
  // A context whose next request comes later than this after the end of the last one is paused.
  uint64_t pause_gap_ms = 1000;
  // It is resumed this long before that request, if that is after the pause; else with the request.
  uint64_t resume_ahead_ms = 2000;
};

// What happens, in order. A context's last request is followed by its close; requests of one
// context that overlap in time are served one after the other without a pause.
std::vector<TraceEvent> ScheduleOf(const Trace& trace, const ScheduleOptions& options);

}  // namespace kvtier::sim
