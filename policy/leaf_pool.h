// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "policy/hazard_model.h"
#include "policy/policy.h"
#include "proto/base/check.h"

namespace kvtier::policy {

// A block that may leave, with what its worth follows from: of one that nobody announced, no more
// than class and age, so that its record, a cache miss away, need not be read.
struct Leaf {
  Tick last_use = 0;
  BlockRef block : 31 = 0;
  uint32_t announced : 1 = 0;
};
static_assert(sizeof(Leaf) == 8);

inline bool operator<(const Leaf& a, const Leaf& b) {
  return a.last_use != b.last_use ? a.last_use < b.last_use : a.block < b.block;
}

// Blocks that may leave a tier: one binary heap per class, the least recently used on top, so that
// the oldest of each class is at hand and any one can be drawn by number. The owner keeps each
// leaf's place, which `set_place(block, place)` tells it. Single-thread.
class LeafPool {
 public:
  size_t leaf_count() const { return leaf_count_; }

  template <typename SetPlace>
  void Insert(ClassIdx class_idx, Leaf leaf, SetPlace set_place) {
    std::vector<Leaf>& heap = heaps_[class_idx];
    // By a quarter: twice would cost more memory than the leaves themselves.
    if (heap.size() == heap.capacity()) heap.reserve(heap.size() + heap.size() / 4 + 4);
    heap.push_back(leaf);
    ++leaf_count_;
    used_[class_idx / 64] |= uint64_t{1} << (class_idx % 64);
    SiftUp(&heap, heap.size() - 1, set_place);
  }

  template <typename SetPlace>
  void Erase(ClassIdx class_idx, uint32_t place, SetPlace set_place) {
    std::vector<Leaf>& heap = heaps_[class_idx];
    KVT_CHECK(place < heap.size());
    const Leaf last = heap.back();
    heap.pop_back();
    --leaf_count_;
    if (heap.empty()) used_[class_idx / 64] &= ~(uint64_t{1} << (class_idx % 64));
    if (place == heap.size()) return;
    heap[place] = last;
    if (!SiftUp(&heap, place, set_place)) SiftDown(&heap, place, set_place);
  }

  // Calls visit(class, leaf) for the oldest leaf of each class, and for `sample_count` leaves at
  // equal distances, the first of them number `offset` (less than the distance) over all classes.
  // Requires: 0 < sample_count <= kSampleCountMax.
  static constexpr uint32_t kSampleCountMax = 32;
  template <typename Visit>
  void VisitOldestAndSample(uint32_t sample_count, uint32_t offset, Visit visit) const {
    KVT_CHECK(sample_count > 0 && sample_count <= kSampleCountMax);
    struct Sample {
      const Leaf* leaf = nullptr;
      ClassIdx class_idx = 0;
    };
    // Samples are cache misses: all of them are under way before the first is looked at.
    std::array<Sample, kSampleCountMax> samples;
    size_t found_count = 0;
    const size_t step = leaf_count_ / sample_count + 1;
    size_t wanted = offset % step;
    for (size_t word = 0; word < used_.size(); ++word) {
      for (uint64_t bits = used_[word]; bits != 0; bits &= bits - 1) {
        const size_t class_idx = word * 64 + static_cast<size_t>(std::countr_zero(bits));
        const std::vector<Leaf>& heap = heaps_[class_idx];
        visit(static_cast<ClassIdx>(class_idx), heap.front());
        for (; wanted < heap.size(); wanted += step) {
          samples[found_count++] = {&heap[wanted], static_cast<ClassIdx>(class_idx)};
          __builtin_prefetch(&heap[wanted]);
        }
        wanted -= heap.size();
      }
    }
    for (size_t i = 0; i < found_count; ++i) visit(samples[i].class_idx, *samples[i].leaf);
  }

  uint64_t memory_bytes() const {
    uint64_t bytes = 0;
    for (const std::vector<Leaf>& heap : heaps_) bytes += heap.capacity() * sizeof(Leaf);
    return bytes;
  }

 private:
  template <typename SetPlace>
  static bool SiftUp(std::vector<Leaf>* heap, size_t place, SetPlace set_place) {
    const Leaf leaf = (*heap)[place];
    const size_t start = place;
    while (place > 0) {
      const size_t above = (place - 1) / 2;
      if ((*heap)[above] < leaf) break;
      (*heap)[place] = (*heap)[above];
      set_place((*heap)[place].block, static_cast<uint32_t>(place));
      place = above;
    }
    (*heap)[place] = leaf;
    set_place(leaf.block, static_cast<uint32_t>(place));
    return place != start;
  }

  template <typename SetPlace>
  static void SiftDown(std::vector<Leaf>* heap, size_t place, SetPlace set_place) {
    const Leaf leaf = (*heap)[place];
    for (size_t below = 2 * place + 1; below < heap->size(); below = 2 * place + 1) {
      if (below + 1 < heap->size() && (*heap)[below + 1] < (*heap)[below]) ++below;
      if (leaf < (*heap)[below]) break;
      (*heap)[place] = (*heap)[below];
      set_place((*heap)[place].block, static_cast<uint32_t>(place));
      place = below;
    }
    (*heap)[place] = leaf;
    set_place(leaf.block, static_cast<uint32_t>(place));
  }

  std::array<std::vector<Leaf>, kClassCount> heaps_;
  // Bit per class: it has leaves.
  std::array<uint64_t, (kClassCount + 63) / 64> used_{};
  size_t leaf_count_ = 0;
};

}  // namespace kvtier::policy
