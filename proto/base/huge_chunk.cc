// SPDX-License-Identifier: Apache-2.0
#include "proto/base/huge_chunk.h"

#include <sys/mman.h>

#include <atomic>
#include <new>

namespace kvtier {
namespace {

// More than any process gets.
constexpr size_t kNeverThere = size_t{1} << 62;

// Only counts: no order with anything.
std::atomic<uint64_t> g_chunk_count = 0;

}  // namespace

void* MapHugeChunk(bool is_huge) {
  // As much again, of which the ends go back: the kernel aligns by itself only from 6.7 on.
  constexpr size_t kRoomBytes = 2 * kHugeChunkBytes;
  void* const room =
      mmap(nullptr, kRoomBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  // Fails as every other allocation does.
  if (room == MAP_FAILED) return ::operator new(kNeverThere);
  auto* const begin = static_cast<std::byte*>(room);
  const size_t before_bytes =
      (kHugeChunkBytes - reinterpret_cast<uintptr_t>(room) % kHugeChunkBytes) % kHugeChunkBytes;
  std::byte* const chunk = begin + before_bytes;
  if (before_bytes > 0) munmap(begin, before_bytes);
  munmap(chunk + kHugeChunkBytes, kRoomBytes - before_bytes - kHugeChunkBytes);
  // A wish: without huge pages it is memory like any other.
  if (is_huge) madvise(chunk, kHugeChunkBytes, MADV_HUGEPAGE);
  g_chunk_count.fetch_add(1, std::memory_order_relaxed);
  return chunk;
}

void UnmapHugeChunk(void* chunk) {
  munmap(chunk, kHugeChunkBytes);
  g_chunk_count.fetch_sub(1, std::memory_order_relaxed);
}

uint64_t HugeChunkBytes() {
  return g_chunk_count.load(std::memory_order_relaxed) * kHugeChunkBytes;
}

}  // namespace kvtier
