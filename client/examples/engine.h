// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "client/examples/kv_store.h"
#include "client/examples/paged_cache.h"
#include "client/examples/toy_model.h"

namespace kvtier::example {

struct Request {
  std::string name;
  // The prompt, then what is generated: given, so that two runs can be compared.
  std::vector<uint32_t> tokens;
  uint32_t prompt_count = 0;
  // The token before which the request waits for a tool; 0: none.
  uint32_t pause_at = 0;
};

// An engine of one process: a paged cache, continuous batching (each step decodes one token of
// every sequence that runs, and sequences join and leave between steps), and a store, or none.
// Single-thread.
class Engine {
 public:
  struct Options {
    CacheShape shape = {};
    uint32_t page_count = 32;
    uint32_t batch_max = 3;
  };
  struct Counts {
    uint64_t step_count = 0;
    // Of prompts, and of sequences that came back; without loaded ones.
    uint64_t prefilled_token_count = 0;
    uint64_t pause_count = 0;
  };

  // `store` null: every pause and every prompt is computed again. It outlives the engine.
  Engine(const Options& options, KvStore* store)
      : options_(options),
        model_(options.shape),
        cache_(options.shape, options.page_count),
        store_(store) {}

  // Serves all requests. Attention outputs of each request's generated tokens, one after the other.
  absl::StatusOr<std::vector<std::vector<float>>> Serve(const std::vector<Request>& requests);

  const Counts& counts() const { return counts_; }

 private:
  struct Sequence {
    const Request* request = nullptr;
    size_t output_idx = 0;
    // Tokens whose K and V are in the pages.
    uint32_t cached_count = 0;
    // Blocks that the store has, as far as this engine knows.
    size_t saved_count = 0;
    std::vector<uint32_t> pages = {};
    bool was_paused = false;
  };

  // Takes waiting sequences in while there is room for all their tokens.
  absl::Status Admit();
  // Loads what the store has, and computes the rest up to `end`.
  absl::Status Prefill(Sequence* sequence, uint32_t end);
  void Compute(Sequence* sequence);
  // Gives blocks that became full to the store.
  absl::Status SaveFull(Sequence* sequence);
  absl::Status PauseSequence(Sequence* sequence);
  std::vector<Key> KeysOf(const Sequence& sequence) const;
  void FreePages(Sequence* sequence);

  const Options options_;
  const ToyModel model_;
  PagedCache cache_;
  KvStore* const store_;
  std::deque<Sequence> waiting_;
  std::vector<Sequence> running_;
  std::vector<std::vector<float>> outputs_;
  Counts counts_;
};

}  // namespace kvtier::example
