// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"

namespace kvtier::nvme {

enum class IoKind : uint8_t { kRead, kWrite, kSync, kAllocate };

// One transfer of up to three buffers at one place of one file, or a sync or an allocation of
// [offset_bytes, offset_bytes + total_bytes). The buffers stay valid until `done`.
struct IoOp {
  static constexpr int kBufferCountMax = 3;

  IoKind kind = IoKind::kRead;
  int fd = -1;
  uint64_t offset_bytes = 0;
  uint64_t total_bytes = 0;
  // kRead and kWrite; total_bytes in all.
  iovec buffers[kBufferCountMax] = {};
  int buffer_count = 0;
  // Called by the engine's user with what Wait reported: bytes moved (a read past the end of the
  // file moves fewer than total_bytes), 0 for kSync and kAllocate, or -errno.
  absl::AnyInvocable<void(int64_t) &&> done;

  void AddBuffer(void* data, size_t size_bytes);

  // Takes the result of one attempt (bytes or -errno). Returns the operation's result, or nothing
  // when the rest has to be attempted: the transfer was short, EINTR, or EAGAIN (bounded).
  std::optional<int64_t> Advance(int64_t attempt_result);

  // What is left to attempt.
  uint64_t moved_bytes = 0;
  int first_buffer = 0;
  int retry_count = 0;
};

// Runs operations asynchronously. Single-thread: the thread that created it, but for Wake.
// Bounded: at most queue_depth operations are between Submit and Wait.
class IoEngine {
 public:
  struct Completion {
    std::unique_ptr<IoOp> op;
    int64_t result = 0;
  };

  virtual ~IoEngine() = default;
  virtual std::string_view name() const = 0;
  // The name, and in what way and why it is less than it could be here.
  virtual std::string Description() const { return std::string(name()); }
  // Requires: fewer than queue_depth operations are pending.
  virtual void Submit(std::unique_ptr<IoOp> op) = 0;
  // Blocks until an operation ends, Wake is called or `timeout_ms` has passed.
  virtual std::vector<Completion> Wait(int timeout_ms) = 0;
  // Ends the current or next Wait. Thread-safe, never blocks.
  virtual void Wake() = 0;

  // Transfers whose buffers all lie in registered memory go without the cost of finding their pages
  // again and again. Whole pages; a wish: what cannot be registered is used as any other memory.
  virtual void RegisterMemory(std::span<std::byte>) {}
  // Of what RegisterMemory was given.
  virtual uint64_t registered_bytes() const { return 0; }
  // Requires: registered with this very span, no operation on it is pending. When this returns, the
  // engine and the kernel have let go of the pages.
  virtual void UnregisterMemory(std::span<std::byte>) {}
};

struct IoEngineOptions {
  int queue_depth = 64;
  // Test-only: no attempt moves more than this (a multiple of 4 KiB), so that every longer
  // operation meets short transfers. 0: no limit.
  uint64_t attempt_bytes_max = 0;
  // Test-only: what setting up the ring, and making room for registered memory, fail with (an
  // errno), as kernels without them would.
  int fast_setup_error = 0;
  int plain_setup_error = 0;
  int registration_error = 0;
};

// Takes the best ring that the kernel gives, rung by rung: one issuer with deferred completions,
// any ring; with room for registered memory, or without. Description() says which and why.
// Errors: UNAVAILABLE when the kernel or its policy has no io_uring for this process.
absl::StatusOr<std::unique_ptr<IoEngine>> MakeUringEngine(const IoEngineOptions& options);
// pread/pwrite on a pool of threads, for where io_uring is forbidden.
absl::StatusOr<std::unique_ptr<IoEngine>> MakePreadEngine(const IoEngineOptions& options);

}  // namespace kvtier::nvme
