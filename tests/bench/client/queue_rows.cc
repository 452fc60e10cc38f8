// SPDX-License-Identifier: Apache-2.0
#include <cstdio>

#include "kvtier/completion_queue.h"
#include "tests/bench/client/rig.h"
#include "tests/bench/client/rows.h"
#include "tests/bench/client/timing.h"

namespace kvtier::bench {
namespace {

constexpr uint32_t kBlockBytes = 16 << 10;
constexpr uint32_t kChainBlocks = 256;
// An engine asks that often while it waits for something else.
constexpr int kPollsPerCall = 10'000;

client::Completion Await(client::CompletionQueue& queue) {
  while (true) {
    if (auto completion = queue.Poll()) return std::move(*completion);
  }
}

}  // namespace

void MeasureQueue(const Settings& settings, std::vector<Row>* rows) {
  Rig rig({.kvtierd = settings.kvtierd,
           .memory_bytes = 128ULL << 20,
           .layout = RawLayout(kBlockBytes)});
  const std::vector<Key> chain = testing::MakeChain(rig.ns(), /*seed=*/1, kChainBlocks);
  PutBlocks(&rig.client(), rig.ns(), chain);
  const auto queue = ValueOf(client::CompletionQueue::Create(&rig.client(), {}));
  std::vector<double> poll_nanos;
  std::vector<double> ratios;
  for (int round = 0; round <= settings.round_count; ++round) {
    std::vector<double> blocking;
    std::vector<double> queued;
    for (int call = 0; call < settings.calls_per_round; ++call) {
      blocking.push_back(Seconds([&] { ValueOf(rig.client().Lookup(rig.ns(), chain)); }));
      queued.push_back(Seconds([&] {
        MustBeOk(queue->Lookup({.tag = 1}, rig.ns(), chain));
        MustBeOk(Await(*queue).status);
      }));
    }
    const double seconds = Seconds([&] {
      for (int i = 0; i < kPollsPerCall; ++i) {
        if (queue->Poll().has_value()) Die("a call that nobody made");
      }
    });
    if (round == 0) continue;  // the first one warms up
    poll_nanos.push_back(1e9 * seconds / kPollsPerCall);
    ratios.push_back(Percentile(queued, 0.5) / Percentile(blocking, 0.5));
  }
  rows->push_back({.name = "Poll of a completion queue that has nothing",
                   .value = Median(poll_nanos),
                   .unit = "ns",
                   .must = 1000,
                   .goal = 100,
                   .higher_is_better = false,
                   .is_ratio = false,
                   .note = ""});
  rows->push_back({.name = "Lookup through a completion queue: p50 over the blocking one",
                   .value = Median(ratios),
                   .unit = "x",
                   .must = 2,
                   .goal = 1,
                   .higher_is_better = false,
                   .note = ""});
}

}  // namespace kvtier::bench
