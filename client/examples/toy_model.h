// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "client/examples/paged_cache.h"

namespace kvtier::example {

// A decoder of attention layers with random weights: what a token adds to the cache depends on all
// tokens before it, as in a real model, so one wrong byte there changes everything after it.
// Deterministic to the bit. Immutable.
class ToyModel {
 public:
  explicit ToyModel(const CacheShape& shape);

  // Puts K and V of the token at `position` into its page and attends over all tokens up to it,
  // through the page table. The attention outputs of the last layer: [query head][dim].
  std::vector<float> Step(uint32_t token, uint32_t position, std::span<const uint32_t> pages,
                          PagedCache* cache) const;

  static constexpr uint32_t kQueriesPerKvHead = 2;

 private:
  // Row-major, [rows][width].
  struct Matrix {
    uint32_t width = 0;
    std::vector<float> values = {};
    std::vector<float> Times(std::span<const float> x) const;
  };
  struct Layer {
    Matrix query;
    Matrix key;
    Matrix value;
    Matrix out;
  };

  std::vector<float> Embed(uint32_t token, uint32_t position) const;
  void Store(std::span<const float> heads, uint32_t layer, bool is_v, uint32_t position,
             std::span<const uint32_t> pages, PagedCache* cache) const;
  std::vector<float> Attend(std::span<const float> queries, uint32_t layer, uint32_t position,
                            std::span<const uint32_t> pages, PagedCache* cache) const;

  const CacheShape shape_;
  std::vector<Layer> layers_;
};

}  // namespace kvtier::example
