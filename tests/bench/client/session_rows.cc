// SPDX-License-Identifier: Apache-2.0
#include <time.h>

#include <atomic>
#include <cstdio>
#include <thread>

#include "tests/bench/client/rig.h"
#include "tests/bench/client/rows.h"
#include "tests/bench/client/timing.h"

namespace kvtier::bench {
namespace {

constexpr uint32_t kBlockBytes = 16 << 10;
// What is looked up and acquired: 16 K tokens.
constexpr uint32_t kChainBlocks = 256;
constexpr uint32_t kPutBlocks = 4;
constexpr double kProbeSeconds = 0.002;
constexpr double kStepSeconds = 0.1;

void SleepUntil(double seconds) {
  const timespec until{.tv_sec = static_cast<time_t>(seconds),
                       .tv_nsec = static_cast<long>(
                           1e9 * (seconds - static_cast<double>(static_cast<time_t>(seconds))))};
  while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, nullptr) != 0) {
  }
}

// An engine to which ten requests a second come: each is looked up, its prefix leased and given
// back, and every fourth one puts new blocks, which go away again. One thread, while `is_on`.
class Engine {
 public:
  Engine(const Rig& rig, std::vector<Key> chain, uint32_t idx, const std::atomic<bool>& is_on)
      : client_(rig.Connect("engine " + std::to_string(idx))),
        ns_(ValueOf(client_->RegisterLayout(rig.layout()))),
        chain_(std::move(chain)),
        idx_(idx),
        is_on_(is_on),
        thread_([this](const std::stop_token& stop) { Run(stop); }) {}

 private:
  void Run(const std::stop_token& stop) {
    // All begin somewhere else in their steps.
    double next = WallSeconds() + kStepSeconds * idx_ / 64;
    for (uint32_t step = 0; !stop.stop_requested(); ++step, next += kStepSeconds) {
      SleepUntil(next);
      if (is_on_.load(std::memory_order_relaxed)) Serve(step);
    }
  }
  void Serve(uint32_t step) {
    ValueOf(client_->Lookup(ns_, chain_));
    client::Lease lease = ValueOf(client_->Acquire(ns_, chain_));
    lease.Release();
    if (step % 4 != 0) return;
    const std::vector<Key> keys = testing::MakeChain(ns_, 1000 * (idx_ + 1) + step, kPutBlocks);
    PutBlocks(client_.get(), ns_, keys);
    MustBeOk(client_->ReportBad(ns_, keys));
  }

  const std::unique_ptr<client::Client> client_;
  const client::Namespace ns_;
  const std::vector<Key> chain_;
  const uint32_t idx_;
  const std::atomic<bool>& is_on_;
  std::jthread thread_;
};

// p99 of so many lookups, one every two milliseconds.
double ProbeP99(Rig& rig, const std::vector<Key>& chain, int call_count) {
  std::vector<double> seconds;
  double next = WallSeconds();
  for (int call = 0; call < call_count; ++call, next += kProbeSeconds) {
    SleepUntil(next);
    seconds.push_back(Seconds([&] { ValueOf(rig.client().Lookup(rig.ns(), chain)); }));
  }
  return Percentile(std::move(seconds), 0.99);
}

}  // namespace

void MeasureSessions(const Settings& settings, std::vector<Row>* rows) {
  Rig rig({.kvtierd = settings.kvtierd,
           .memory_bytes = 128ULL << 20,
           .layout = RawLayout(kBlockBytes)});
  const std::vector<Key> chain = testing::MakeChain(rig.ns(), /*seed=*/1, kChainBlocks);
  PutBlocks(&rig.client(), rig.ns(), chain);
  std::atomic<bool> is_on = false;
  std::vector<std::unique_ptr<Engine>> engines;
  for (uint32_t i = 1; i < settings.session_count; ++i) {
    engines.push_back(std::make_unique<Engine>(rig, chain, i, is_on));
  }
  std::vector<double> ratios;
  std::vector<double> alone_micros;
  std::vector<double> together_micros;
  for (int round = 0; round <= settings.round_count; ++round) {
    is_on = false;
    const double alone = ProbeP99(rig, chain, settings.paced_calls_per_round);
    is_on = true;
    const double together = ProbeP99(rig, chain, settings.paced_calls_per_round);
    if (round == 0) continue;  // the first one warms up
    ratios.push_back(together / alone);
    alone_micros.push_back(1e6 * alone);
    together_micros.push_back(1e6 * together);
  }
  char note[64];
  std::snprintf(note, sizeof(note), "%.0f and %.0f us", Median(together_micros),
                Median(alone_micros));
  rows->push_back({.name = "Lookup with " + std::to_string(settings.session_count) +
                           " sessions at work: p99 over its p99 alone",
                   .value = Median(ratios),
                   .unit = "x",
                   .must = 5,
                   .goal = 2,
                   .higher_is_better = false,
                   .note = note});
}

}  // namespace kvtier::bench
