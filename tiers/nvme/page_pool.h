// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "proto/base/check.h"
#include "tiers/nvme/data_dir.h"

namespace kvtier::nvme {

// Pairs of pages for the header and the unaligned rest of a record, in one piece of memory that can
// be registered. Single-thread: the I/O thread.
class PagePool {
 public:
  explicit PagePool(int pair_count) : memory_(static_cast<uint64_t>(pair_count) * kPairBytes) {
    for (int i = pair_count; i > 0; --i) {
      free_.push_back(memory_.data() + static_cast<size_t>(i - 1) * kPairBytes);
    }
  }

  // Requires: fewer than pair_count are taken.
  std::byte* Take() {
    KVT_CHECK(!free_.empty());
    std::byte* const pair = free_.back();
    free_.pop_back();
    return pair;
  }
  void Give(std::byte* pair) { free_.push_back(pair); }
  std::span<std::byte> memory() { return memory_.bytes(); }

 private:
  static constexpr size_t kPairBytes = 2 * kPageBytes;
  PageMemory memory_;
  std::vector<std::byte*> free_;
};

}  // namespace kvtier::nvme
