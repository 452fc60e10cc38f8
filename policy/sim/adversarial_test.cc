// SPDX-License-Identifier: Apache-2.0
//
// Workloads made to mislead a policy that learns. It must hit nearly as much as LRU on every one,
// whatever it believes by then.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "policy/sim/cache_sim.h"

namespace kvtier::sim {
namespace {

constexpr double kShareOfLru = 0.9;
constexpr uint64_t kCapacityBlocks = 1000;
constexpr uint64_t kChainBlocks = 20;

// Requests one after the other; every chain is kChainBlocks long and named by a number.
class Requests {
 public:
  explicit Requests(uint32_t seed) : random_(seed) {}

  void Ask(uint64_t chain, uint64_t gap_ms = 500) {
    std::vector<uint64_t> ids;
    for (uint64_t i = 0; i < kChainBlocks; ++i) ids.push_back(chain * 1000 + i);
    AskFor(ids, gap_ms);
  }
  // `shared` blocks that all such chains begin with, then `own` of this chain's own.
  void AskBehind(uint64_t shared, uint64_t chain, uint64_t own) {
    std::vector<uint64_t> ids;
    for (uint64_t i = 0; i < shared; ++i) ids.push_back(i);
    for (uint64_t i = 0; i < own; ++i) ids.push_back((chain + 1) * 1'000'000 + i);
    AskFor(ids, 500);
  }
  uint64_t Draw(uint64_t count) { return random_() % count; }
  uint64_t Fresh() { return fresh_++; }

  sim::Trace Build() && { return std::move(builder_).Build(); }

 private:
  void AskFor(const std::vector<uint64_t>& ids, uint64_t gap_ms) {
    builder_.AddRequest(builder_.AddContext(), now_ms_, 0, ids.size(), ids);
    now_ms_ += gap_ms;
  }

  TraceBuilder builder_;
  std::mt19937_64 random_;
  uint64_t now_ms_ = 0;
  uint64_t fresh_ = 1'000'000'000;
};

constexpr uint64_t kHeldChains = kCapacityBlocks / kChainBlocks;

// A working set that fits, and scans of twice the cache through it.
void Scans(Requests* requests) {
  for (int round = 0; round < 20; ++round) {
    for (int i = 0; i < 300; ++i) requests->Ask(requests->Draw(kHeldChains / 2));
    for (uint64_t i = 0; i < 2 * kHeldChains; ++i) requests->Ask(requests->Fresh());
  }
}

// A loop over a little more than fits, and before and after it one that fits.
void LoopJustOverCapacity(Requests* requests) {
  for (const uint64_t percent : {110, 90, 105, 80, 120, 95}) {
    const uint64_t length = kHeldChains * percent / 100;
    for (uint64_t i = 0; i < 20 * length; ++i) requests->Ask(i % length);
  }
}

// Each phase has chains of its own and the opposite habit: what was used often is never used again,
// what was used once is.
void PhaseChanges(Requests* requests) {
  for (uint64_t phase = 0; phase < 10; ++phase) {
    const uint64_t first = 10'000 * (phase + 1);
    for (uint64_t i = 0; i < 600; ++i) {
      if (phase % 2 == 0) {
        // Popular chains: the fewer the number, the more often.
        requests->Ask(first + std::min(requests->Draw(kHeldChains), requests->Draw(kHeldChains)));
      } else {
        // Every chain twice, half a cache apart, then never again.
        const uint64_t behind = kHeldChains / 2;
        requests->Ask(first + (i % 2 == 0 || i < behind ? i : i - behind));
      }
    }
  }
}

// Uses of a chain come in a burst, and once the policy has learned that, no burst ever ends twice
// alike: gaps grow from phase to phase.
void GapsThatGrow(Requests* requests) {
  for (uint64_t phase = 0; phase < 12; ++phase) {
    for (uint64_t i = 0; i < 300; ++i) {
      requests->Ask(10'000 * (phase + 1) + requests->Draw(kHeldChains * 3 / 4), 50U << phase);
    }
  }
}

void AllUnique(Requests* requests) {
  for (int i = 0; i < 3000; ++i) requests->Ask(requests->Fresh());
}

// Everybody shares a prefix of half the cache; all else is used once.
void OneHotPrefix(Requests* requests) {
  for (int i = 0; i < 1000; ++i) {
    requests->AskBehind(kCapacityBlocks / 2, requests->Fresh(), 1 + requests->Draw(40));
  }
}

// A working set of nine tenths of the cache in a random order, after the policy has seen that what
// is used twice never comes back.
void LiesThenWorkingSet(Requests* requests) {
  for (int i = 0; i < 2000; ++i) {
    const uint64_t chain = requests->Fresh();
    requests->Ask(chain);
    requests->Ask(chain);
  }
  for (int i = 0; i < 4000; ++i) requests->Ask(requests->Draw(kHeldChains * 9 / 10));
}

// A popular working set under a clock that steps by days, by months, or not at all.
void ClockJumps(Requests* requests) {
  constexpr uint64_t kDayMs = 86'400'000;
  for (int i = 0; i < 6000; ++i) {
    uint64_t gap_ms = 500;
    if (i % 500 == 499) gap_ms = (i % 1000 == 999 ? 100 : 1) * kDayMs;
    if (i % 500 > 400) gap_ms = 0;
    const uint64_t count = 2 * kHeldChains;
    requests->Ask(std::min({requests->Draw(count), requests->Draw(count), requests->Draw(count)}),
                  gap_ms);
  }
}

struct Workload {
  const char* name;
  void (*make)(Requests*);
};

class AdversarialTest : public testing::TestWithParam<Workload> {
 protected:
  static void Check(const Trace& trace, const std::vector<RequestHint>& hints) {
    for (const bool room_first : {false, true}) {
      const auto rate = [&](CachePolicy policy) {
        return SimulateCache(trace, policy,
                             {.capacity_blocks = kCapacityBlocks,
                              .make_room_first = room_first,
                              .hints = hints})
            .HitRate();
      };
      const double lru = rate(CachePolicy::kLru);
      const double hazard = rate(CachePolicy::kHazard);
      std::printf("%s%s: LRU %.3f, hazard %.3f\n", GetParam().name,
                  room_first ? ", room first" : "", lru, hazard);
      EXPECT_GE(hazard, kShareOfLru * lru) << "room first: " << room_first;
    }
  }

  static Trace Make() {
    constexpr uint32_t kSeed = 7;
    Requests requests(kSeed);
    GetParam().make(&requests);
    return std::move(requests).Build();
  }
};

TEST_P(AdversarialTest, HitsNearlyAsMuchAsLru) { Check(Make(), {}); }

// Clients that say they come back in a second and never do, or that a request was the last.
TEST_P(AdversarialTest, HitsNearlyAsMuchWhenClientsLie) {
  const Trace trace = Make();
  std::vector<RequestHint> hints(trace.requests.size());
  std::mt19937_64 random(11);
  for (RequestHint& hint : hints) {
    hint.next = static_cast<policy::NextStep>(random() % 3);
    if (random() % 2 == 0) hint.returns_in_ms = 1 + random() % 100'000;
  }
  Check(trace, hints);
}

// The clock of the trace goes back by a minute again and again.
TEST_P(AdversarialTest, HitsNearlyAsMuchWhenTheClockGoesBack) {
  Trace trace = Make();
  for (size_t i = 0; i < trace.requests.size(); ++i) {
    uint64_t& at_ms = trace.requests[i].arrival_ms;
    if (i / 50 % 2 == 1) at_ms -= std::min<uint64_t>(at_ms, 60'000);
  }
  Check(trace, {});
}

constexpr Workload kWorkloads[] = {
    {"Scans", Scans},
    {"LoopJustOverCapacity", LoopJustOverCapacity},
    {"PhaseChanges", PhaseChanges},
    {"GapsThatGrow", GapsThatGrow},
    {"AllUnique", AllUnique},
    {"OneHotPrefix", OneHotPrefix},
    {"LiesThenWorkingSet", LiesThenWorkingSet},
    {"ClockJumps", ClockJumps},
};

INSTANTIATE_TEST_SUITE_P(Workloads, AdversarialTest, testing::ValuesIn(kWorkloads),
                         [](const auto& param) { return std::string(param.param.name); });

}  // namespace
}  // namespace kvtier::sim
