// SPDX-License-Identifier: Apache-2.0
#include "daemon/core/sim/replay.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <string>
#include <vector>

#include "proto/base/check.h"

namespace kvtier::core {
namespace {

// A call that waits longer than this for room or reads gives up, as the client's would.
constexpr TimeMs kCallTimeoutMs = 10'000;

uint64_t Mix(uint64_t a, uint64_t b) {  // splitmix64 of both
  uint64_t mixed = a * 0x9E3779B97F4A7C15 + b;
  mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9;
  mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB;
  return mixed ^ (mixed >> 31);
}

class ReplaySim {
 public:
  ReplaySim(const sim::Trace& trace, const sim::ReplayRules& rules,
            const VirtualCoreOptions& options)
      : trace_(trace),
        rules_(rules),
        store_(options),
        keys_(KeysOfTrace(trace)),
        chains_(trace.contexts.size()),
        started_(trace.contexts.size(), false),
        closed_(trace.contexts.size(), false) {}

  sim::SimHits Run(std::span<const uint64_t> at_ms) {
    const std::vector<sim::TraceEvent> events = ScheduleOf(trace_, rules_.schedule);
    KVT_CHECK(at_ms.empty() || at_ms.size() == events.size());
    for (size_t i = 0; i < events.size(); ++i) {
      store_.AdvanceTo(static_cast<double>(at_ms.empty() ? events[i].at_ms : at_ms[i]));
      Play(events[i]);
    }
    return hits_;
  }

 private:
  StoreCore& core() { return store_.core(); }
  TimeMs now_ms() const { return store_.now_ms(); }
  TimeMs deadline_ms() const { return now_ms() + kCallTimeoutMs; }
  static std::string NameOf(uint32_t context_idx) { return std::to_string(context_idx); }

  void Play(const sim::TraceEvent& event) {
    const std::string name = NameOf(event.context_idx);
    switch (event.kind) {
      case sim::TraceEventKind::kRequest:
        Serve(trace_.requests[event.request_idx], event.request_idx);
        break;
      case sim::TraceEventKind::kPause: {
        bool done = false;
        core().PauseContext(
            store_.session(), store_.ns(), name,
            {.returns_in_ms = rules_.say_returns ? event.next_request_in_ms : 0}, deadline_ms(),
            now_ms(), [&done](const auto&) { done = true; }, store_.effects());
        store_.Settle();
        store_.Await(done, deadline_ms());
        break;
      }
      case sim::TraceEventKind::kResume:
        Resume(name);
        break;
      case sim::TraceEventKind::kClose:
        core()
            .CloseContext(store_.session(), store_.ns(), name, false, now_ms(), store_.effects())
            .IgnoreError();
        closed_[event.context_idx] = true;
        store_.Settle();
        break;
    }
  }

  void Resume(const std::string& name) {
    const auto ticket = core().ResumeContext(store_.session(), store_.ns(), name,
                                             {.needed_in_ms = rules_.schedule.resume_ahead_ms},
                                             now_ms(), store_.effects());
    KVT_CHECK(ticket.ok());
    store_.Settle();
  }

  std::vector<Key> KeysOf(std::span<const sim::BlockRef> chain) const {
    std::vector<Key> keys;
    keys.reserve(chain.size());
    for (const sim::BlockRef block : chain) keys.push_back(keys_[block]);
    return keys;
  }

  void Start(const sim::TraceRequest& request) {
    const uint32_t context_idx = request.context_idx;
    started_[context_idx] = true;
    const uint32_t parent_idx = trace_.contexts[context_idx].parent_idx;
    if (parent_idx == sim::kNoContext || closed_[parent_idx]) {
      KVT_CHECK(
          core().CreateContext(store_.session(), store_.ns(), NameOf(context_idx), now_ms()).ok());
      return;
    }
    const std::vector<sim::BlockRef>& parent = chains_[parent_idx];
    const auto end =
        std::mismatch(parent.begin(), parent.end(), request.chain.begin(), request.chain.end());
    chains_[context_idx].assign(parent.begin(), end.first);
    KVT_CHECK(core()
                  .ForkContext(store_.session(), store_.ns(), NameOf(parent_idx),
                               NameOf(context_idx),
                               static_cast<uint32_t>(chains_[context_idx].size()), now_ms(),
                               store_.effects())
                  .ok());
    store_.Settle();
  }

  AcquireResult Acquire(std::span<const Key> keys) {
    AcquireResult acquired;
    if (keys.empty()) return acquired;
    bool done = false;
    core().Acquire(
        store_.session(), store_.ns(), keys, deadline_ms(), now_ms(),
        [&](absl::StatusOr<AcquireResult> result) {
          done = true;
          if (result.ok()) acquired = *std::move(result);
        },
        store_.effects());
    store_.Settle();
    store_.Await(done, deadline_ms() + 1);
    KVT_CHECK(done);
    return acquired;
  }

  // Blocks of keys[first..] that are stored afterwards, counted from the start of the chain.
  size_t FillFrom(size_t first, std::span<const Key> keys) {
    while (first < keys.size()) {
      const auto batch =
          keys.subspan(first, std::min<size_t>(rules_.commit_batch_blocks, keys.size() - first));
      std::optional<Key> parent;
      if (first > 0) parent = keys[first - 1];
      std::vector<PlacedBlock> slots;
      bool done = false;
      core().Reserve(
          store_.session(), store_.ns(), parent, batch, TierId::kHbm, deadline_ms(), now_ms(),
          [&](absl::StatusOr<std::vector<PlacedBlock>> blocks) {
            done = true;
            if (blocks.ok()) slots = *std::move(blocks);
          },
          store_.effects());
      store_.Settle();
      store_.Await(done, deadline_ms() + 1);
      KVT_CHECK(done && slots.size() == batch.size());
      std::vector<Key> filled;
      for (size_t i = 0; i < batch.size(); ++i) {
        if (slots[i].status == BlockStatus::kOk) filled.push_back(batch[i]);
      }
      KVT_CHECK(core()
                    .Commit(store_.session(), store_.ns(), filled,
                            std::vector<uint32_t>(filled.size()), now_ms(), store_.effects())
                    .ok());
      store_.Settle();
      for (const PlacedBlock& slot : slots) {
        if (slot.status != BlockStatus::kOk && slot.status != BlockStatus::kExists) return first;
        ++first;
      }
    }
    return first;
  }

  void Append(const sim::TraceRequest& request, std::span<const Key> keys, size_t stored_count) {
    std::vector<sim::BlockRef>& chain = chains_[request.context_idx];
    const auto wanted = std::span(request.chain).first(stored_count);
    const auto end = std::mismatch(chain.begin(), chain.end(), wanted.begin(), wanted.end());
    const auto kept_count = static_cast<size_t>(end.second - wanted.begin());
    KVT_CHECK(core()
                  .AppendContext(store_.session(), store_.ns(), NameOf(request.context_idx),
                                 static_cast<uint32_t>(kept_count),
                                 keys.first(stored_count).subspan(kept_count), now_ms(),
                                 store_.effects())
                  .ok());
    store_.Settle();
    chain.assign(wanted.begin(), wanted.end());
  }

  void Release(const AcquireResult& acquired) {
    if (acquired.lease == 0) return;
    KVT_CHECK(
        core().Release(store_.session(), {&acquired.lease, 1}, now_ms(), store_.effects()).ok());
    store_.Settle();
  }

  void Serve(const sim::TraceRequest& request, uint64_t request_number) {
    if (!started_[request.context_idx]) Start(request);
    const std::vector<Key> keys = KeysOf(request.chain);
    const auto found = core().Lookup(store_.session(), store_.ns(), keys);
    KVT_CHECK(found.ok());
    const AcquireResult head = Acquire(std::span(keys).first(found->residency.size()));
    size_t hit_count = 0;
    while (hit_count < head.blocks.size() && head.blocks[hit_count].status == BlockStatus::kOk) {
      ++hit_count;
    }
    ++hits_.request_count;
    hits_.token_count += request.token_count;
    for (size_t i = 0; i < hit_count; ++i) {
      const auto tier = static_cast<size_t>(std::countr_zero(found->residency[i]));
      hits_.tier_hit_token_count[tier] += trace_.TokensOfBlock(request, i);
    }
    const size_t stored_count = FillFrom(hit_count, keys);
    hits_.exhausted_block_count += keys.size() - stored_count;
    Append(request, keys, stored_count);
    AcquireResult rest;
    if (rules_.DecodesAt(request_number)) {
      rest = Acquire(std::span(keys).subspan(hit_count, stored_count - hit_count));
    }
    Release(rest);
    Release(head);
  }

  const sim::Trace& trace_;
  const sim::ReplayRules rules_;
  VirtualCore store_;
  const std::vector<Key> keys_;
  std::vector<std::vector<sim::BlockRef>> chains_;
  std::vector<bool> started_;
  std::vector<bool> closed_;
  sim::SimHits hits_;
};

}  // namespace

std::vector<Key> KeysOfTrace(const sim::Trace& trace) {
  std::vector<Key> keys;
  keys.reserve(trace.blocks.size());
  for (const sim::TraceBlock& block : trace.blocks) {
    uint64_t parent = 0;
    if (block.parent != sim::kNoBlock) {
      std::memcpy(&parent, keys[block.parent].bytes.data(), sizeof(parent));
    }
    uint64_t word = Mix(parent, block.hash_id);
    Key key;
    for (size_t at = 0; at < Key::kBytes; at += sizeof(word)) {
      std::memcpy(key.bytes.data() + at, &word, sizeof(word));
      word = Mix(word, at);
    }
    keys.push_back(key);
  }
  return keys;
}

sim::SimHits SimulateReplay(const sim::Trace& trace, const sim::ReplayRules& rules,
                            const VirtualCoreOptions& options, std::span<const uint64_t> at_ms) {
  return ReplaySim(trace, rules, options).Run(at_ms);
}

}  // namespace kvtier::core
