// SPDX-License-Identifier: Apache-2.0
#include "client/ctl/workload.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "client/ctl/kv_generator.h"

namespace kvtier::ctl {
namespace {

// One stream of numbers; unlike the standard distributions the same on every platform.
class Random {
 public:
  explicit Random(uint64_t seed) : seed_(seed) {}
  // Uniform in [low, high].
  uint64_t Between(uint64_t low, uint64_t high) {
    return low + SplitMix64(seed_, counter_++) % (high - low + 1);
  }
  bool OneIn(uint64_t count) { return Between(1, count) == 1; }

 private:
  const uint64_t seed_;
  uint64_t counter_ = 0;
};

class Generator {
 public:
  explicit Generator(const WorkloadOptions& options) : options_(options), random_(options.seed) {}

  sim::Trace Run() {
    std::vector<std::vector<uint64_t>> prompts(std::max(1U, options_.system_prompt_count));
    for (std::vector<uint64_t>& prompt : prompts) Grow(&prompt, options_.system_prompt_blocks);
    for (uint32_t i = 0; i < options_.session_count; ++i) {
      std::vector<uint64_t> chain = prompts[random_.Between(0, prompts.size() - 1)];
      const uint64_t start_ms = random_.Between(0, options_.start_spread_ms);
      const uint64_t turn_count =
          random_.Between(options_.turn_count / 2 + 1, options_.turn_count * 3 / 2 + 1);
      RunSession(builder_.AddContext(), std::move(chain), start_ms, turn_count, true);
    }
    return std::move(builder_).Build();
  }

 private:
  void Grow(std::vector<uint64_t>* chain, uint64_t block_count) {
    for (uint64_t i = 0; i < block_count; ++i) chain->push_back(next_hash_id_++);
  }

  void RunSession(uint32_t context_idx, std::vector<uint64_t> chain, uint64_t now_ms,
                  uint64_t turn_count, bool may_fork) {
    for (uint64_t turn = 0; turn < turn_count; ++turn) {
      // What the user or the tool said, and what the model answered the time before.
      Grow(&chain, random_.OneIn(8) ? random_.Between(12, 40) : random_.Between(1, 6));
      const uint64_t api_ms = random_.Between(800, 9'000);
      const uint64_t tail_tokens = random_.Between(0, options_.block_tokens - 1);
      builder_.AddRequest(context_idx, now_ms, api_ms,
                          chain.size() * options_.block_tokens + tail_tokens, chain);
      now_ms += api_ms;
      if (may_fork && random_.OneIn(7)) {
        // A sub-agent takes over the conversation so far and goes its own way.
        RunSession(builder_.AddContext(context_idx), chain, now_ms + random_.Between(50, 500),
                   random_.Between(2, 5), false);
      }
      now_ms += ThinkMs();
    }
  }

  // Tools answer in seconds, users in minutes, and sometimes nothing is between two requests.
  uint64_t ThinkMs() {
    const uint64_t kind = random_.Between(0, 99);
    if (kind < 25) return random_.Between(10, 900);
    if (kind < 85) return random_.Between(1'500, 40'000);
    return random_.Between(60'000, 400'000);
  }

  const WorkloadOptions options_;
  Random random_;
  sim::TraceBuilder builder_;
  uint64_t next_hash_id_ = 0;
};

}  // namespace

sim::Trace GenerateWorkload(const WorkloadOptions& options) { return Generator(options).Run(); }

}  // namespace kvtier::ctl
