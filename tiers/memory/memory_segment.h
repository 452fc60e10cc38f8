// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "tiers/memory/memory_calls.h"

namespace kvtier {

// Says which file a descriptor is of; no two that exist are alike.
struct FileId {
  uint64_t device = 0;
  uint64_t inode = 0;
  friend auto operator<=>(const FileId&, const FileId&) = default;
};

// One memfd of a memory tier and its mapping: sealed against changes of size, so that nobody who
// maps it can be killed by another. Owns both. PrepareNext is for one thread at a time; the rest is
// immutable or atomic, and so thread-safe.
class MemorySegment {
 public:
  struct Options {
    std::string name;
    uint64_t bytes = 0;
    // Takes pages from the kernel's reserve of huge pages (vm.nr_hugepages) when it has enough.
    bool reserved_huge_pages = false;
    // Wishes for huge pages where the kernel has some. Not for what is used here and there.
    bool transparent_huge_pages = true;
    std::optional<uint32_t> node_idx = std::nullopt;
    // Not owned.
    MemoryCalls* calls = nullptr;
  };

  // No page is touched. Errors: those of the system.
  static absl::StatusOr<std::shared_ptr<MemorySegment>> Create(const Options& options);
  // Gives the memory back, also under mappings that clients still have, unless it was kept.
  ~MemorySegment();
  MemorySegment(const MemorySegment&) = delete;
  MemorySegment& operator=(const MemorySegment&) = delete;

  int fd() const { return fd_; }
  std::span<std::byte> memory() const { return {base_, bytes_}; }
  FileId file_id() const { return file_id_; }
  bool has_reserved_huge_pages() const { return has_reserved_huge_pages_; }

  // Touches the next `piece_bytes`, without changing them, and locks them if `lock`. How many bytes
  // are ready is said by ready_bytes() then. UNAVAILABLE: the kernel gives no memory.
  // RESOURCE_EXHAUSTED: it locks no more; the piece is ready, but not locked.
  absl::Status PrepareNext(uint64_t piece_bytes, bool lock);
  bool ready() const { return ready_bytes() == bytes_; }
  uint64_t ready_bytes() const { return ready_bytes_.load(std::memory_order_relaxed); }
  uint64_t locked_bytes() const { return locked_bytes_.load(std::memory_order_relaxed); }

  // The keeper has said that it has the descriptor.
  void SetKept() { kept_.store(true, std::memory_order_relaxed); }
  bool kept() const { return kept_.load(std::memory_order_relaxed); }
  // Whoever has a descriptor besides us keeps the contents when this object ends.
  void KeepContents() { keeps_contents_.store(true, std::memory_order_relaxed); }
  // Nobody wants it any more: who prepares it may stop.
  void Retire() { retired_.store(true, std::memory_order_relaxed); }
  bool retired() const { return retired_.load(std::memory_order_relaxed); }

 private:
  MemorySegment() = default;

  int fd_ = -1;
  std::byte* base_ = nullptr;
  uint64_t bytes_ = 0;
  FileId file_id_;
  bool has_reserved_huge_pages_ = false;
  MemoryCalls* calls_ = nullptr;
  // Relaxed: figures and wishes, which order nothing.
  std::atomic<uint64_t> ready_bytes_ = 0;
  std::atomic<uint64_t> locked_bytes_ = 0;
  std::atomic<bool> kept_ = false;
  std::atomic<bool> keeps_contents_ = false;
  std::atomic<bool> retired_ = false;
};

}  // namespace kvtier
