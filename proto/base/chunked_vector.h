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

namespace kvtier {

// A vector that grows by chunks of 1 MiB and never shrinks. Growing moves no element: references
// stay valid, nobody waits for a copy of millions of them, and what is not used is at most one
// chunk, where a doubling std::vector may hold three times what it needs. The memory of a chunk is
// touched as elements are added. Thread-compatible.
template <typename T>
class ChunkedVector {
 public:
  static constexpr size_t kChunkCount =
      std::bit_floor(std::max<size_t>(1, (size_t{1} << 20) / sizeof(T)));
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
      chunks_.emplace_back(std::allocator<T>().allocate(kChunkCount));
    }
    T* const added = ::new (At(size_)) T(std::forward<Args>(args)...);
    ++size_;
    return *added;
  }

  uint64_t memory_bytes() const {
    return chunks_.size() * kChunkCount * sizeof(T) + chunks_.capacity() * sizeof(chunks_[0]);
  }

 private:
  struct Freer {
    void operator()(T* chunk) const { std::allocator<T>().deallocate(chunk, kChunkCount); }
  };

  T* At(size_t i) const { return chunks_[i / kChunkCount].get() + i % kChunkCount; }

  // Raw memory, in which the first `size_` elements live.
  std::vector<std::unique_ptr<T, Freer>> chunks_;
  size_t size_ = 0;
};

}  // namespace kvtier
