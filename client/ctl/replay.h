// SPDX-License-Identifier: Apache-2.0
//
// Drives a daemon with a workload as an engine would, and checks every byte it gives back.
// docs/replay.md describes what is done and counted.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/ctl/block_oracle.h"
#include "client/ctl/kv_generator.h"
#include "client/ctl/latency.h"
#include "client/ctl/traffic_meter.h"
#include "client/src/admin_client.h"
#include "kvtier/client.h"
#include "policy/sim/replay_rules.h"
#include "policy/sim/trace.h"

namespace kvtier::ctl {

struct ReplayOptions {
  std::string run_dir = "/run/kvtierd";
  LayoutPreset layout;
  sim::ReplayRules rules;
  // 0: as fast as possible; else virtual time passes `speed` times as fast as real time.
  double speed = 0;
  // Of queries and tails, and of the namespace: runs of different seeds share no block.
  uint64_t seed = 1;
  // Memory for recomputed blocks.
  uint64_t oracle_cache_bytes = 1ULL << 30;
  // Deadline of calls that may move bytes.
  uint32_t transfer_timeout_ms = 10'000;
  // How long one step is tried again while the daemon is gone or new.
  uint32_t restart_timeout_ms = 60'000;
  // Called now and then with the number of requests served. May be empty.
  std::function<void(uint64_t served, uint64_t total)> progress;
};

enum class ReplayCall : uint8_t { kLookup, kAcquire, kReserve, kCommit, kAppend, kPause, kResume };
inline constexpr std::array<const char*, 7> kReplayCallNames = {
    "lookup", "acquire", "reserve", "commit", "append", "pause", "resume"};

struct EpochReport {
  uint64_t request_count = 0;
  uint64_t token_count = 0;
  uint64_t nvme_hit_token_count = 0;
  // Hits on blocks that this replay did not store in this epoch: they outlived a daemon. On any
  // tier, as they may have been read ahead.
  uint64_t recovered_hit_token_count = 0;
};

struct ReplayReport {
  sim::SimHits hits;
  uint64_t verified_block_count = 0;
  uint64_t wrong_block_count = 0;
  // Found by Lookup, but not delivered by Acquire.
  uint64_t undelivered_block_count = 0;
  uint64_t committed_block_count = 0;
  uint64_t decode_check_count = 0;
  double decode_error_max = 0;
  uint64_t pause_count = 0;
  uint64_t pause_freed_bytes = 0;
  uint64_t pause_resident_bytes = 0;
  uint64_t resume_count = 0;
  // Steps begun again because the daemon was gone or new.
  uint64_t retry_count = 0;
  client::ClientStats client;
  std::vector<LinkTraffic> links;
  // In order of first use.
  std::vector<std::pair<uint64_t, EpochReport>> epochs;
  std::array<LatencyRecorder, kReplayCallNames.size()> latencies;
  double wall_seconds = 0;
  // When each event of the schedule began, from the first.
  std::vector<uint64_t> event_ms;
};

// What ResumeAll found.
struct ResumeReport {
  uint64_t context_count = 0;
  uint64_t block_count = 0;
  // By the fastest tier before the resume.
  std::array<uint64_t, policy::kTierCount> tier_block_count{};
  uint64_t missing_block_count = 0;
  uint64_t verified_block_count = 0;
};

// Single-thread. Contexts and counts live as long as the object, over daemon restarts.
class Replayer {
 public:
  // `trace` and `admin` outlive the object. Errors: those of Client::Connect and RegisterLayout.
  static absl::StatusOr<std::unique_ptr<Replayer>> Create(const sim::Trace* trace,
                                                          client::AdminClient* admin,
                                                          ReplayOptions options);

  // Makes the calls of these events. Errors: DATA_LOSS for a wrong byte or a wrong decode, naming
  // block, tier and offset; otherwise the error that did not go away within restart_timeout_ms.
  absl::Status Play(std::span<const sim::TraceEvent> events);

  // Resumes each open context, reads and checks its whole chain, and pauses it again.
  absl::StatusOr<ResumeReport> ResumeAll();

  ReplayReport Report() const;

 private:
  struct ContextState {
    std::string name;
    // Epoch in which the daemon knows the context; 0 for none.
    uint64_t epoch = 0;
    bool started = false;
    bool closed = false;
    std::vector<sim::BlockRef> chain;
  };
  // Blocks of one lease, checked.
  struct Checked {
    client::Lease lease;
    size_t ok_prefix_count = 0;
  };

  Replayer(const sim::Trace* trace, client::AdminClient* admin, ReplayOptions options);

  absl::Status PlayEvent(const sim::TraceEvent& event);
  // Repeats `step` while its error is one that a restart of the daemon explains.
  absl::Status OverRestarts(const std::function<absl::Status()>& step);
  absl::Status ServeOnce(const sim::TraceRequest& request, uint64_t request_number);
  absl::Status PauseOnce(ContextState* context, uint64_t next_request_in_ms);
  absl::Status ResumeOnce(ContextState* context);
  absl::Status CloseOnce(ContextState* context);
  absl::Status ResumeAndReadOnce(ContextState* context, ResumeReport* report);
  absl::Status WaitForTicket(const client::Ticket& ticket);

  // Makes the daemon know the context with its chain, if it does not.
  absl::Status Ensure(ContextState* context);
  absl::Status Start(ContextState* context, const sim::TraceRequest& request);
  absl::Status SetChain(ContextState* context, std::span<const sim::BlockRef> chain);
  absl::StatusOr<std::vector<policy::TierIdx>> LookUp(std::span<const Key> keys);
  absl::StatusOr<Checked> AcquireAndCheck(std::span<const sim::BlockRef> chain,
                                          std::span<const Key> keys);
  absl::Status Check(sim::BlockRef block, const Key& key, const client::MappedBlock& mapped);
  // Fills chain[first..]; returns how many blocks from the start of the chain are stored then.
  absl::StatusOr<size_t> FillFrom(size_t first, std::span<const Key> keys);
  absl::Status CheckDecode(uint64_t request_number, std::span<const Key> keys, const Checked& head,
                           const Checked& rest);
  void NoteCommitted(const Key& key);
  void CountRequest(const sim::TraceRequest& request, uint64_t epoch, std::span<const Key> keys,
                    std::span<const policy::TierIdx> found, size_t hit_count);

  std::vector<Key> KeysOf(std::span<const sim::BlockRef> chain) const;
  void WaitUntil(uint64_t at_ms);
  void SampleTraffic();
  template <typename Call>
  auto Timed(ReplayCall kind, Call call);

  const sim::Trace* trace_;
  client::AdminClient* admin_;
  const ReplayOptions options_;
  const KvGenerator generator_;
  BlockOracle oracle_;
  std::unique_ptr<client::Client> client_;
  client::Namespace namespace_;
  std::vector<Key> keys_;  // by BlockRef
  std::vector<ContextState> contexts_;
  // What was stored in the last epoch in which anything was.
  uint64_t committed_epoch_ = 0;
  absl::flat_hash_set<Key> committed_in_epoch_;
  TrafficMeter traffic_;
  ReplayReport report_;
  std::chrono::steady_clock::time_point start_;
  std::optional<uint64_t> first_event_ms_;
};

}  // namespace kvtier::ctl
