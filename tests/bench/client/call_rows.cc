// SPDX-License-Identifier: Apache-2.0
#include <cstdio>
#include <memory>
#include <string>

#include "client/src/channel.h"
#include "client/src/device_map.h"
#include "client/src/session.h"
#include "tests/bench/client/rig.h"
#include "tests/bench/client/rows.h"
#include "tests/bench/client/timing.h"

namespace kvtier::bench {
namespace {

constexpr uint32_t kBlockBytes = 16 << 10;
constexpr int kPollsPerRound = 100'000;

// What one kind of call took in one round.
struct Round {
  std::vector<double> seconds;
  double cpu_seconds = 0;

  template <typename Act>
  void Time(const Rig& rig, Act&& act) {
    const double cpu_begin = rig.CpuSeconds();
    seconds.push_back(Seconds(act));
    cpu_seconds += rig.CpuSeconds() - cpu_begin;
  }
};

// The same in all rounds.
struct Calls {
  std::vector<double> medians;
  std::vector<double> ratios;
  std::vector<double> cpu_ratios;

  void Add(const Round& round, const Round& empty) {
    medians.push_back(Median(round.seconds));
    ratios.push_back(medians.back() / Median(empty.seconds));
    cpu_ratios.push_back(round.cpu_seconds / empty.cpu_seconds);
  }
  double Micros() const { return Median(medians) * 1e6; }
};

// A session without the library, for the empty call: Release of no lease. Of all calls it has the
// shortest messages, and the daemon does no more for it than find the session.
class EmptyCall {
 public:
  explicit EmptyCall(const std::string& run_dir)
      : session_(ValueOf(
            client::Session::Open({.run_dir = run_dir,
                                   .client_name = "empty",
                                   .timeout_ms = 10'000,
                                   .generation = 1,
                                   .devices = std::make_shared<client::DeviceMap>(nullptr)}))) {
    request_.set_session_id(session_->session_id());
  }
  void operator()() {
    grpc::ClientContext context;
    client::SetDeadline(context, 10'000);
    const grpc::Status status = session_->stub().Release(&context, request_, &response_);
    if (!status.ok()) Die(status.error_message());
  }

 private:
  std::shared_ptr<client::Session> session_;
  v1::ReleaseRequest request_;
  v1::ReleaseResponse response_;
};

uint64_t MovedBytes(const v1::GetTiersResponse& tiers) {
  uint64_t bytes = 0;
  for (const v1::LinkStats& link : tiers.links()) bytes += link.moved_bytes();
  return bytes;
}

void ReadInPlace(const client::Lease& lease, size_t block_count) {
  if (lease.ok_prefix_count() != block_count) Die("a block is not resident");
  for (const client::MappedBlock& block : lease.blocks()) {
    if (block.bytes.front() != std::byte{0x5A}) Die("wrong bytes");
  }
}

struct Limits {
  double must = 0;
  double goal = 0;
};

void AddRows(const std::string& name, const Calls& calls, const Calls& empty, const Limits& limits,
             std::vector<Row>* rows) {
  char note[64];
  std::snprintf(note, sizeof(note), "%.0f and %.0f us", calls.Micros(), empty.Micros());
  rows->push_back({.name = name + ": p50 over an empty call",
                   .value = Median(calls.ratios),
                   .unit = "x",
                   .must = limits.must,
                   .goal = limits.goal,
                   .higher_is_better = false,
                   .note = note});
  rows->push_back({.name = name + ": CPU over an empty call",
                   .value = Median(calls.cpu_ratios),
                   .unit = "x",
                   .higher_is_better = false,
                   .note = "of the daemon and the client"});
}

}  // namespace

void MeasureCalls(const Settings& settings, std::vector<Row>* rows) {
  const uint64_t chain_bytes = uint64_t{settings.chain_block_count} * kBlockBytes;
  Rig rig({.kvtierd = settings.kvtierd,
           .memory_bytes = 2 * chain_bytes,
           .layout = RawLayout(kBlockBytes)});
  const std::vector<Key> keys =
      testing::MakeChain(rig.ns(), /*seed=*/1, settings.chain_block_count);
  PutBlocks(&rig.client(), rig.ns(), keys);
  EmptyCall empty_call(rig.run_dir());
  const uint64_t moved_bytes = MovedBytes(rig.Tiers());

  Calls empty;
  Calls lookup;
  Calls acquire;
  for (int number = 0; number <= settings.round_count; ++number) {
    Round empty_round;
    Round lookup_round;
    Round acquire_round;
    for (int call = 0; call < settings.calls_per_round; ++call) {
      empty_round.Time(rig, empty_call);
      lookup_round.Time(rig, [&] {
        if (ValueOf(rig.client().Lookup(rig.ns(), keys)).size() != keys.size()) Die("a miss");
      });
      client::Lease lease;
      acquire_round.Time(rig, [&] { lease = ValueOf(rig.client().Acquire(rig.ns(), keys)); });
      ReadInPlace(lease, keys.size());
    }
    if (number == 0) continue;  // the first one warms up
    empty.Add(empty_round, empty_round);
    lookup.Add(lookup_round, empty_round);
    acquire.Add(acquire_round, empty_round);
  }
  const std::string blocks = std::to_string(settings.chain_block_count) + " blocks";
  AddRows("Lookup of " + blocks, lookup, empty, {.must = 3, .goal = 1.5}, rows);
  AddRows("Acquire of " + blocks + " in memory", acquire, empty, {.must = 5, .goal = 2}, rows);
  const uint64_t copied_bytes =
      rig.client().stats().copied_bytes + MovedBytes(rig.Tiers()) - moved_bytes;
  rows->push_back({.name = "bytes copied by acquiring and reading blocks in memory",
                   .value = static_cast<double>(copied_bytes),
                   .unit = "B",
                   .must = 0,
                   .goal = 0,
                   .higher_is_better = false,
                   .is_ratio = false,
                   .note = "counters of the daemon's links and of the client"});
  const client::Ticket ticket = ValueOf(rig.client().Prefetch(rig.ns(), keys));
  std::vector<double> polls;
  for (int number = 0; number <= settings.round_count; ++number) {
    polls.push_back(Seconds([&] {
                      for (int poll = 0; poll < kPollsPerRound; ++poll) {
                        if (ticket.Poll() != client::TicketPoll::kDone) Die("it moves");
                      }
                    }) /
                    kPollsPerRound);
  }
  char note[64];
  std::snprintf(note, sizeof(note), "%.1f ns and %.0f us", Median(polls) * 1e9, empty.Micros());
  rows->push_back({.name = "asking how a ticket stands: over an empty call",
                   .value = Median(polls) * 1e6 / empty.Micros(),
                   .unit = "x",
                   .must = 0.01,
                   .goal = 0.001,
                   .higher_is_better = false,
                   .note = note});
}

}  // namespace kvtier::bench
