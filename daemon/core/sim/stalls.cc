// SPDX-License-Identifier: Apache-2.0
#include "daemon/core/sim/stalls.h"

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "daemon/core/sim/replay.h"
#include "policy/prefetch.h"
#include "policy/sim/hints.h"
#include "proto/base/check.h"

namespace kvtier::core {
namespace {

// No call of the simulated engine gives up before this.
constexpr TimeMs kStallTimeoutMs = 600'000;
constexpr size_t kCommitBatch = 128;

class StallSim {
 public:
  StallSim(const sim::Trace& trace, const StallOptions& options)
      : trace_(trace),
        options_(options),
        store_(options.store),
        keys_(KeysOfTrace(trace)),
        next_of_(sim::SuccessorsOf(trace)),
        context_of_(trace.requests.size()),
        created_(trace.requests.size(), false),
        random_(options.seed) {
    for (uint32_t i = 0; i < context_of_.size(); ++i) context_of_[i] = i;
    for (uint32_t i = 0; i < context_of_.size(); ++i) {
      if (next_of_[i] != sim::kNoRequest) context_of_[next_of_[i]] = context_of_[i];
    }
  }

  StallReport Run() {
    for (uint32_t i = 0; i < trace_.requests.size(); ++i) Serve(i);
    Finish();
    return report_;
  }

 private:
  StoreCore& core() { return store_.core(); }
  std::string NameOf(uint32_t request_idx) const {
    return std::to_string(context_of_[request_idx]);
  }
  std::vector<Key> KeysOf(uint32_t request_idx) const {
    std::vector<Key> keys;
    for (const sim::BlockRef block : trace_.requests[request_idx].chain) {
      keys.push_back(keys_[block]);
    }
    return keys;
  }

  // Signals are given in the order of arrivals, which is that of their times.
  double NextSignalMs() const {
    if (options_.signal == Signal::kNever || signalled_ >= trace_.requests.size()) return 1e300;
    const uint64_t arrival_ms = trace_.requests[signalled_].arrival_ms;
    const uint64_t ahead_ms = options_.signal == Signal::kAhead ? options_.ahead_ms : 0;
    return static_cast<double>(arrival_ms - std::min(arrival_ms, ahead_ms));
  }

  void GiveSignal() {
    const uint32_t request_idx = signalled_++;
    const auto arrival = static_cast<double>(trace_.requests[request_idx].arrival_ms);
    const double needed_at = std::max(arrival, engine_free_);
    core()
        .Prefetch(store_.session(), store_.ns(), KeysOf(request_idx),
                  {.needed_in_ms = static_cast<uint64_t>(std::max(0.0, needed_at - store_.now()))},
                  store_.now_ms(), store_.effects())
        .IgnoreError();
    store_.Settle();
  }

  void AdvanceTo(double at_ms) {
    while (NextSignalMs() <= at_ms) {
      store_.AdvanceTo(NextSignalMs());
      GiveSignal();
    }
    store_.AdvanceTo(at_ms);
  }

  void Await(const bool& done) {
    store_.Settle();
    while (!done) {
      const double signal_ms = NextSignalMs();
      const double until = std::min(signal_ms, store_.now() + kStallTimeoutMs);
      if (store_.Await(done, static_cast<TimeMs>(until) + 1)) break;
      if (signal_ms <= store_.now()) GiveSignal();
    }
  }

  AcquireResult Acquire(std::span<const Key> keys) {
    AcquireResult acquired;
    if (keys.empty()) return acquired;
    bool done = false;
    core().Acquire(
        store_.session(), store_.ns(), keys, store_.now_ms() + kStallTimeoutMs, store_.now_ms(),
        [&](absl::StatusOr<AcquireResult> result) {
          done = true;
          if (result.ok()) acquired = *std::move(result);
        },
        store_.effects());
    Await(done);
    return acquired;
  }

  double PrefillMs(uint64_t from_tokens, uint64_t token_count) const {
    const auto tokens = static_cast<double>(token_count);
    const double middle = static_cast<double>(from_tokens) + tokens / 2;
    return 1000 * tokens / options_.prefill_tokens_per_second *
           (1 + middle / policy::kAttentionTokens);
  }

  void Fill(std::span<const Key> keys, size_t first) {
    while (first < keys.size()) {
      const auto batch = keys.subspan(first, std::min(kCommitBatch, keys.size() - first));
      std::optional<Key> parent;
      if (first > 0) parent = keys[first - 1];
      std::vector<Key> filled;
      bool done = false;
      core().Reserve(
          store_.session(), store_.ns(), parent, batch, TierId::kHbm,
          store_.now_ms() + kStallTimeoutMs, store_.now_ms(),
          [&](absl::StatusOr<std::vector<PlacedBlock>> blocks) {
            done = true;
            for (size_t i = 0; blocks.ok() && i < batch.size(); ++i) {
              if ((*blocks)[i].status == BlockStatus::kOk) filled.push_back(batch[i]);
            }
          },
          store_.effects());
      Await(done);
      KVT_CHECK(core()
                    .Commit(store_.session(), store_.ns(), filled,
                            std::vector<uint32_t>(filled.size()), store_.now_ms(), store_.effects())
                    .ok());
      store_.Settle();
      first += batch.size();
    }
  }

  void Leave(uint32_t request_idx, std::span<const Key> keys) {
    const std::string name = NameOf(request_idx);
    core()
        .AppendContext(store_.session(), store_.ns(), name, 0, keys, store_.now_ms(),
                       store_.effects())
        .IgnoreError();
    const uint32_t next = next_of_[request_idx];
    if (next == sim::kNoRequest) {
      core()
          .CloseContext(store_.session(), store_.ns(), name, false, store_.now_ms(),
                        store_.effects())
          .IgnoreError();
      store_.Settle();
      return;
    }
    Expectation expectation;
    const auto returns_at = static_cast<double>(trace_.requests[next].arrival_ms);
    if (options_.signal == Signal::kReturn && returns_at > store_.now()) {
      std::uniform_real_distribution<double> error(-options_.return_error, options_.return_error);
      expectation.returns_in_ms = std::max<uint64_t>(
          1, static_cast<uint64_t>((returns_at - store_.now()) * (1 + error(random_))));
    }
    core().PauseContext(
        store_.session(), store_.ns(), name, expectation, store_.now_ms() + kStallTimeoutMs,
        store_.now_ms(), [](const auto&) {}, store_.effects());
    store_.Settle();  // nobody waits for it
  }

  void Serve(uint32_t request_idx) {
    const sim::TraceRequest& request = trace_.requests[request_idx];
    AdvanceTo(std::max(static_cast<double>(request.arrival_ms), engine_free_));
    const std::vector<Key> keys = KeysOf(request_idx);
    const double scheduled = store_.now();
    const auto found = core().Lookup(store_.session(), store_.ns(), keys);
    KVT_CHECK(found.ok());
    const AcquireResult head = Acquire(std::span(keys).first(found->residency.size()));
    if (const double stall = store_.now() - scheduled; stall > 0) stalls_.push_back(stall);
    size_t hit_count = 0;
    uint64_t hit_tokens = 0;
    while (hit_count < head.blocks.size() && head.blocks[hit_count].status == BlockStatus::kOk) {
      hit_tokens += trace_.TokensOfBlock(request, hit_count++);
    }
    ++report_.request_count;
    token_count_ += request.token_count;
    hit_token_count_ += hit_tokens;
    engine_free_ = store_.now() + PrefillMs(hit_tokens, request.token_count - hit_tokens);
    AdvanceTo(engine_free_);
    if (!created_[context_of_[request_idx]]) {
      created_[context_of_[request_idx]] = true;
      core()
          .CreateContext(store_.session(), store_.ns(), NameOf(request_idx), store_.now_ms())
          .IgnoreError();
    } else {
      // It is active since it was scheduled; its blocks are leased, so nothing moves for it now.
      core()
          .ResumeContext(store_.session(), store_.ns(), NameOf(request_idx), {}, store_.now_ms(),
                         store_.effects())
          .IgnoreError();
    }
    Fill(keys, hit_count);
    if (head.lease != 0) {
      core()
          .Release(store_.session(), {&head.lease, 1}, store_.now_ms(), store_.effects())
          .IgnoreError();
      store_.Settle();
    }
    Leave(request_idx, keys);
    engine_free_ = std::max(engine_free_, store_.now());
  }

  void Finish() {
    report_.hit_rate = token_count_ == 0 ? 0
                                         : static_cast<double>(hit_token_count_) /
                                               static_cast<double>(token_count_);
    const CoreCounters counters = core().Counters();
    for (const LinkCounters& link : counters.links[static_cast<size_t>(TierId::kNvme)]) {
      report_.read_block_count += link.moved_block_count;
    }
    report_.stall_count = stalls_.size();
    if (stalls_.empty()) return;
    std::sort(stalls_.begin(), stalls_.end());
    for (const double stall : stalls_) report_.stall_ms += stall;
    report_.stall_p50_ms = stalls_[stalls_.size() / 2];
    report_.stall_p99_ms = stalls_[stalls_.size() * 99 / 100];
    const size_t above = report_.request_count / 100;
    if (above < stalls_.size()) report_.request_p99_ms = stalls_[stalls_.size() - 1 - above];
  }

  const sim::Trace& trace_;
  const StallOptions options_;
  VirtualCore store_;
  const std::vector<Key> keys_;
  const std::vector<uint32_t> next_of_;
  std::vector<uint32_t> context_of_;  // by request: the first one of its context
  std::vector<bool> created_;
  std::mt19937_64 random_;
  std::vector<double> stalls_;
  double engine_free_ = 0;
  uint32_t signalled_ = 0;
  uint64_t token_count_ = 0;
  uint64_t hit_token_count_ = 0;
  StallReport report_;
};

}  // namespace

StallReport SimulateStalls(const sim::Trace& trace, const StallOptions& options) {
  return StallSim(trace, options).Run();
}

}  // namespace kvtier::core
