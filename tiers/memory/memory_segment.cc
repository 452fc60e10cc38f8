// SPDX-License-Identifier: Apache-2.0
#include "tiers/memory/memory_segment.h"

#include <fcntl.h>
#include <linux/falloc.h>
#include <linux/memfd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "proto/base/status_util.h"

namespace kvtier {
namespace {

constexpr uint64_t kPageBytes = 4096;
// Of Linux 6.1, which Debian 12's C library does not name.
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

// For kernels before 5.14: makes every page present. A client may be filling the same page.
void TouchPages(std::span<std::byte> memory) {
  for (uint64_t offset = 0; offset < memory.size(); offset += kPageBytes) {
    auto* const byte = reinterpret_cast<unsigned char*>(memory.data() + offset);
    __atomic_fetch_or(byte, 0, __ATOMIC_RELAXED);
  }
}

}  // namespace

absl::StatusOr<std::shared_ptr<MemorySegment>> MemorySegment::Create(const Options& options) {
  MemoryCalls& calls = *options.calls;
  // The constructor is private.
  std::shared_ptr<MemorySegment> segment(new MemorySegment());
  segment->calls_ = &calls;
  segment->bytes_ = options.bytes;
  segment->has_reserved_huge_pages_ =
      options.reserved_huge_pages && options.bytes % kHugePageBytes == 0;
  const unsigned huge = segment->has_reserved_huge_pages_ ? MFD_HUGETLB | MFD_HUGE_2MB : 0;
  // Without the reserve there is ordinary memory.
  const auto retry = [&](int error) -> absl::StatusOr<std::shared_ptr<MemorySegment>> {
    if (huge == 0) return ErrnoStatus(error, "make memfd " + options.name);
    Options ordinary = options;
    ordinary.reserved_huge_pages = false;
    return Create(ordinary);
  };
  segment->fd_ = calls.CreateMemfd(options.name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING | huge);
  if (segment->fd_ < 0) return retry(-segment->fd_);
  // Mode 0400: a client of another uid cannot reopen its read-only descriptor for writing.
  struct stat status{};
  if (ftruncate(segment->fd_, static_cast<off_t>(options.bytes)) != 0 ||
      fcntl(segment->fd_, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0 ||
      fchmod(segment->fd_, S_IRUSR) != 0 || fstat(segment->fd_, &status) != 0) {
    return retry(errno);
  }
  segment->file_id_ = {.device = status.st_dev, .inode = status.st_ino};
  void* base = nullptr;
  // The reserve is counted here.
  if (const int mapped = calls.Map(segment->fd_, options.bytes, &base); mapped != 0) {
    return retry(-mapped);
  }
  segment->base_ = static_cast<std::byte*>(base);
  // All are wishes: a kernel without them still serves the memory.
  if (options.node_idx.has_value()) calls.PreferNode(segment->memory(), *options.node_idx);
  if (options.transparent_huge_pages) calls.Advise(segment->memory(), MADV_HUGEPAGE);
  calls.Advise(segment->memory(), MADV_DONTDUMP);
  return segment;
}

MemorySegment::~MemorySegment() {
  if (base_ != nullptr) munmap(base_, bytes_);
  if (fd_ < 0) return;
  // Clients may still map this segment: without its pages a stale mapping holds no memory.
  if (!keeps_contents_.load(std::memory_order_relaxed)) {
    fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, static_cast<off_t>(bytes_));
  }
  close(fd_);
}

absl::Status MemorySegment::PrepareNext(uint64_t piece_bytes, bool lock) {
  const uint64_t offset_bytes = ready_bytes();
  const uint64_t bytes = std::min(piece_bytes, bytes_ - offset_bytes);
  const std::span<std::byte> piece = memory().subspan(offset_bytes, bytes);
  // Empty pages become huge ones at once, if the kernel can; then there is little left to touch.
  if (!has_reserved_huge_pages_ && piece.size() % kHugePageBytes == 0) {
    calls_->Advise(piece, MADV_COLLAPSE);
  }
  if (const int touched = calls_->Advise(piece, MADV_POPULATE_WRITE); touched == -EINVAL) {
    TouchPages(piece);
  } else if (touched != 0) {
    return Unavailable("memory is not ready: %s", ErrnoStatus(-touched, "touch").message());
  }
  ready_bytes_.fetch_add(bytes, std::memory_order_relaxed);
  if (!lock) return absl::OkStatus();
  if (const int locked = calls_->Lock(piece); locked != 0) {
    return Exhausted("memory is not locked: %s", ErrnoStatus(-locked, "mlock").message());
  }
  locked_bytes_.fetch_add(bytes, std::memory_order_relaxed);
  return absl::OkStatus();
}

}  // namespace kvtier
