// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <type_traits>
#include <utility>
#include <vector>

#include "proto/base/huge_chunk.h"

namespace kvtier {

// A vector that grows by chunks of 2 MiB and never shrinks. Growing moves no element: references
// stay valid, nobody waits for a copy of millions of them, and what is not used is at most one
// chunk, where a doubling std::vector may hold three times what it needs. The memory of the first
// chunk is touched as elements are added; the others are huge pages where the system has them.
// Thread-compatible.
template <typename T>
class ChunkedVector {
 public:
  static constexpr size_t kChunkCount =
      std::bit_floor(std::max<size_t>(1, kHugeChunkBytes / sizeof(T)));
  static_assert(sizeof(T) <= kHugeChunkBytes && alignof(T) <= kHugeChunkBytes);
  static_assert(std::is_trivially_destructible_v<T>, "chunks go without looking at elements");

  ChunkedVector() = default;
  ChunkedVector(const ChunkedVector&) = delete;
  ChunkedVector& operator=(const ChunkedVector&) = delete;

  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }

  // Requires: `i` < size().
  T& operator[](size_t i) { return *At(i); }
  const T& operator[](size_t i) const { return *At(i); }

  // Adds T(args...).
  template <typename... Args>
  T& emplace_back(Args&&... args) {
    if (size_ == chunks_.size() * kChunkCount) {
      const bool is_huge = !chunks_.empty();
      chunks_.emplace_back(static_cast<T*>(MapHugeChunk(is_huge)));
    }
    T* const added = ::new (At(size_)) T(std::forward<Args>(args)...);
    ++size_;
    return *added;
  }

  uint64_t memory_bytes() const {
    return chunks_.size() * kHugeChunkBytes + chunks_.capacity() * sizeof(chunks_[0]);
  }

 private:
  struct Freer {
    void operator()(T* chunk) const { UnmapHugeChunk(chunk); }
  };

  T* At(size_t i) const { return chunks_[i / kChunkCount].get() + i % kChunkCount; }

  // Raw memory, in which the first `size_` elements live.
  std::vector<std::unique_ptr<T, Freer>> chunks_;
  size_t size_ = 0;
};

}  // namespace kvtier
