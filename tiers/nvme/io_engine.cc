// SPDX-License-Identifier: Apache-2.0
#include "tiers/nvme/io_engine.h"

#include <cerrno>

#include "proto/base/check.h"

namespace kvtier::nvme {
namespace {

// EAGAIN is normal under pressure; a device that says nothing else is broken.
constexpr int kRetryCountMax = 1000;

}  // namespace

void IoOp::AddBuffer(void* data, size_t size_bytes) {
  if (size_bytes == 0) return;
  KVT_CHECK(buffer_count < kBufferCountMax);
  buffers[buffer_count++] = {.iov_base = data, .iov_len = size_bytes};
  total_bytes += size_bytes;
}

std::optional<int64_t> IoOp::Advance(int64_t attempt_result) {
  if (attempt_result == -EINTR || attempt_result == -EAGAIN) {
    if (++retry_count > kRetryCountMax) return attempt_result;
    return std::nullopt;
  }
  if (attempt_result < 0) return attempt_result;
  if (kind == IoKind::kSync || kind == IoKind::kAllocate) return 0;
  if (attempt_result == 0) {
    // Nothing read is the end of the file; nothing written is no progress.
    return kind == IoKind::kRead ? static_cast<int64_t>(moved_bytes) : -EIO;
  }
  auto rest = static_cast<uint64_t>(attempt_result);
  moved_bytes += rest;
  KVT_CHECK(moved_bytes <= total_bytes);
  retry_count = 0;
  while (rest > 0) {
    iovec& buffer = buffers[first_buffer];
    if (rest < buffer.iov_len) {
      buffer.iov_base = static_cast<char*>(buffer.iov_base) + rest;
      buffer.iov_len -= rest;
      break;
    }
    rest -= buffer.iov_len;
    ++first_buffer;
  }
  if (moved_bytes == total_bytes) return static_cast<int64_t>(moved_bytes);
  return std::nullopt;
}

}  // namespace kvtier::nvme
