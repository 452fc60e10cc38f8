// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace kvtier::example {

// What one block of kvtier and one page of the engine have in common: the same tokens.
struct CacheShape {
  uint32_t layer_count = 2;
  uint32_t kv_head_count = 2;
  uint32_t page_tokens = 16;
  uint32_t head_dim = 64;
};

// K and V of an engine in BF16, in pages: [page][layer][K, V][kv head][token][dim]. A fixed number
// of pages, given out and taken back. Single-thread.
class PagedCache {
 public:
  PagedCache(const CacheShape& shape, uint32_t page_count)
      : shape_(shape), values_(size_t{page_count} * PageValues()) {
    for (uint32_t page = page_count; page > 0; --page) free_.push_back(page - 1);
  }

  const CacheShape& shape() const { return shape_; }
  size_t free_count() const { return free_.size(); }

  std::optional<uint32_t> Allocate() {
    if (free_.empty()) return std::nullopt;
    const uint32_t page = free_.back();
    free_.pop_back();
    return page;
  }
  void Free(uint32_t page) { free_.push_back(page); }

  // [token][dim] of one head.
  uint16_t* Rows(uint32_t page, uint32_t layer, bool is_v, uint32_t kv_head) {
    const size_t head = (size_t{layer} * 2 + (is_v ? 1 : 0)) * shape_.kv_head_count + kv_head;
    return &values_[page * PageValues() + head * shape_.page_tokens * shape_.head_dim];
  }

 private:
  size_t PageValues() const {
    return size_t{2} * shape_.layer_count * shape_.kv_head_count * shape_.page_tokens *
           shape_.head_dim;
  }

  const CacheShape shape_;
  std::vector<uint16_t> values_;
  std::vector<uint32_t> free_;
};

}  // namespace kvtier::example
