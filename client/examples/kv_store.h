// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/examples/paged_cache.h"
#include "kernels/tile_layout.h"
#include "kvtier/client.h"

namespace kvtier::example {

// An engine's pages in kvtier and back: the part that an engine adds to use it. Single-thread.
class KvStore {
 public:
  struct Options {
    std::string run_dir;
    std::string engine_name;
    Codec codec = Codec::kNvfp4;
    // For the test of the comparison: changes one bit of the first block that is loaded.
    bool flips_a_bit = false;
  };
  // Blocks so far.
  struct Counts {
    uint64_t stored = 0;
    uint64_t loaded = 0;
  };

  static absl::StatusOr<std::unique_ptr<KvStore>> Open(const Options& options,
                                                       const CacheShape& shape);

  // Of the full pages of these tokens, the chain.
  std::vector<Key> KeysOf(std::span<const uint32_t> tokens) const;

  // Stores pages [first, keys.size()) of a chain; pages[i] holds the tokens of keys[i]. Blocks that
  // somebody else has stored, or is about to, are left alone.
  absl::Status Save(std::span<const Key> keys, size_t first, std::span<const uint32_t> pages,
                    PagedCache* cache);
  // Fills pages from the start of the chain up to the first block that is not stored; how many.
  absl::StatusOr<size_t> Load(std::span<const Key> keys, std::span<const uint32_t> pages,
                              PagedCache* cache);

  // The sequence waits: its blocks may leave fast memory. It has none of the engine's pages.
  absl::Status Pause(const std::string& name, std::span<const Key> keys);
  // It goes on: the blocks come back, which is waited for.
  absl::Status Resume(const std::string& name);

  const Counts& counts() const { return counts_; }

 private:
  KvStore(const Options& options, const CacheShape& shape) : options_(options), shape_(shape) {}

  absl::Status SealPage(uint32_t page, std::span<std::byte> block, PagedCache* cache) const;
  absl::Status GatherPage(std::span<const std::byte> block, uint32_t page, PagedCache* cache) const;
  kernels::LayerFormat format() const;
  kernels::TileShape tile() const {
    return {.block_tokens = shape_.page_tokens, .head_dim = shape_.head_dim};
  }
  // Calls `visit(layer, kv head, offset in the block)` for each tile until one fails.
  template <typename Visit>
  absl::Status ForEachTile(Visit&& visit) const;

  const Options options_;
  const CacheShape shape_;
  std::unique_ptr<client::Client> client_;
  client::Namespace ns_;
  Counts counts_;
};

}  // namespace kvtier::example
