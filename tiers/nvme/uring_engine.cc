// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <liburing.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "proto/base/check.h"
#include "proto/base/status_util.h"
#include "tiers/nvme/io_engine.h"

namespace kvtier::nvme {
namespace {

// A registered buffer is at most this long.
constexpr uint64_t kFixedBytesMax = 1ULL << 30;
// The kernel's limit on registered buffers.
constexpr unsigned kFixedCountMax = 1 << 14;

// An operation whose buffers are all registered: one transfer a buffer, which end in any order.
struct Split {
  std::unique_ptr<IoOp> op;
  int part_count = 0;
  int64_t moved_bytes = 0;
  int64_t error = 0;
};

// An operation, or one part of a split one, in the ring; the kernel reads `attempt` until the
// completion.
struct Pending {
  std::unique_ptr<IoOp> op;
  iovec attempt[IoOp::kBufferCountMax] = {};
  // Of a part.
  std::shared_ptr<Split> split = {};
  int fixed_idx = -1;
};

// The kernel says ENOMEM for memory that the process may not lock, too.
std::string WhyNotRegistered(int error) {
  rlimit limit{};
  if (error != ENOMEM || getrlimit(RLIMIT_MEMLOCK, &limit) != 0 ||
      limit.rlim_cur == RLIM_INFINITY) {
    return std::strerror(error);
  }
  return "RLIMIT_MEMLOCK is " + std::to_string(limit.rlim_cur) + " bytes";
}

class UringEngine final : public IoEngine {
 public:
  explicit UringEngine(const IoEngineOptions& options) : options_(options) {}

  ~UringEngine() override {
    // The kernel may still write to buffers of operations in flight.
    while (pending_count_ > 0) Wait(1000);
    if (has_ring_) io_uring_queue_exit(&ring_);
    if (wake_fd_ >= 0) close(wake_fd_);
  }

  absl::Status Init() {
    KVT_RETURN_IF_ERROR(InitRing());
    KVT_RETURN_IF_ERROR(TryRing());
    wake_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (wake_fd_ < 0) return Unavailable("eventfd: %s", std::strerror(errno));
    int error = -options_.registration_error;
    if (error == 0) error = io_uring_register_buffers_sparse(&ring_, kFixedCountMax);
    if (error < 0) {
      no_fixed_reason_ = std::strerror(-error);
      return absl::OkStatus();
    }
    for (unsigned i = kFixedCountMax; i > 0; --i) free_fixed_.push_back(static_cast<int>(i) - 1);
    return absl::OkStatus();
  }

  std::string_view name() const override { return "io_uring"; }

  std::string Description() const override {
    std::string text(name());
    if (!plain_ring_reason_.empty())
      text += ", without deferred completions: " + plain_ring_reason_;
    if (!no_fixed_reason_.empty()) text += ", without registered memory: " + no_fixed_reason_;
    return text;
  }

  void Submit(std::unique_ptr<IoOp> op) override {
    KVT_CHECK(pending_count_ < options_.queue_depth);
    ++pending_count_;
    int fixed_idx[IoOp::kBufferCountMax];
    if (!FindFixed(*op, fixed_idx)) {
      Queue(new Pending{.op = std::move(op)});
      return;
    }
    auto split = std::make_shared<Split>();
    uint64_t offset_bytes = op->offset_bytes;
    split->part_count = op->buffer_count;
    for (int i = 0; i < op->buffer_count; ++i) {
      auto part = std::make_unique<IoOp>();
      part->kind = op->kind;
      part->fd = op->fd;
      part->offset_bytes = offset_bytes;
      part->AddBuffer(op->buffers[i].iov_base, op->buffers[i].iov_len);
      offset_bytes += op->buffers[i].iov_len;
      Queue(new Pending{.op = std::move(part), .split = split, .fixed_idx = fixed_idx[i]});
    }
    split->op = std::move(op);
  }

  std::vector<Completion> Wait(int timeout_ms) override {
    if (!is_wake_armed_) ArmWake();
    __kernel_timespec timeout{.tv_sec = timeout_ms / 1000,
                              .tv_nsec = timeout_ms % 1000 * 1'000'000LL};
    io_uring_cqe* first = nullptr;
    // Its errors (time passed, interrupted, no memory now) all mean: look, and be called again.
    io_uring_submit_and_wait_timeout(&ring_, &first, 1, &timeout, nullptr);
    std::vector<Completion> completed;
    unsigned head;
    unsigned seen_count = 0;
    io_uring_cqe* cqe;
    std::vector<Pending*> again;
    io_uring_for_each_cqe(&ring_, head, cqe) {
      ++seen_count;
      auto* pending = static_cast<Pending*>(io_uring_cqe_get_data(cqe));
      if (pending == nullptr) {
        DrainWake();
        continue;
      }
      if (const auto result = pending->op->Advance(cqe->res)) {
        End(std::unique_ptr<Pending>(pending), *result, completed);
      } else {
        again.push_back(pending);
      }
    }
    io_uring_cq_advance(&ring_, seen_count);
    for (Pending* pending : again) Queue(pending);
    return completed;
  }

  void Wake() override {
    const uint64_t one = 1;
    // Fails only when the counter is full, and then the wake-up is there already.
    [[maybe_unused]] const ssize_t written = write(wake_fd_, &one, sizeof(one));
  }

  void RegisterMemory(std::span<std::byte> memory) override {
    while (!memory.empty() && no_fixed_reason_.empty()) {
      const std::span<std::byte> chunk = memory.first(std::min(memory.size(), kFixedBytesMax));
      memory = memory.subspan(chunk.size());
      if (free_fixed_.empty()) {
        no_fixed_reason_ = "all " + std::to_string(kFixedCountMax) + " places are taken";
        return;
      }
      const int idx = free_fixed_.back();
      const iovec buffer{.iov_base = chunk.data(), .iov_len = chunk.size()};
      const int updated = UpdateFixed(idx, buffer);
      if (updated < 0) {
        // What is registered stays so; the next one would fail as well.
        no_fixed_reason_ = WhyNotRegistered(-updated);
        return;
      }
      free_fixed_.pop_back();
      registered_bytes_ += chunk.size();
      fixed_.emplace(chunk.data(), Fixed{.end = chunk.data() + chunk.size(), .idx = idx});
    }
  }

  uint64_t registered_bytes() const override { return registered_bytes_; }

  void UnregisterMemory(std::span<std::byte> memory) override {
    auto it = fixed_.lower_bound(memory.data());
    while (it != fixed_.end() && it->first < memory.data() + memory.size()) {
      // An empty buffer cannot be refused: it needs no memory.
      const int updated = UpdateFixed(it->second.idx, iovec{});
      KVT_CHECK(updated == 1);
      registered_bytes_ -= static_cast<uint64_t>(it->second.end - it->first);
      free_fixed_.push_back(it->second.idx);
      it = fixed_.erase(it);
    }
  }

 private:
  struct Fixed {
    const std::byte* end = nullptr;
    int idx = -1;
  };

  absl::Status InitRing() {
    // One completion each for the parts of all operations and the wake-up, so that none overflows.
    const auto entries = static_cast<unsigned>(IoOp::kBufferCountMax * options_.queue_depth + 1);
    int error = -options_.fast_setup_error;
    if (error == 0) {
      error = io_uring_queue_init(entries, &ring_,
                                  IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN);
    }
    if (error < 0) {
      // Kernels before 6.1 do not know the flags.
      plain_ring_reason_ = std::strerror(-error);
      error = -options_.plain_setup_error;
      if (error == 0) error = io_uring_queue_init(entries, &ring_, 0);
    }
    if (error < 0) return Unavailable("io_uring_setup: %s", std::strerror(-error));
    has_ring_ = true;
    return absl::OkStatus();
  }

  int UpdateFixed(int idx, const iovec& buffer) {
    return io_uring_register_buffers_update_tag(&ring_, static_cast<unsigned>(idx), &buffer,
                                                /*tags=*/nullptr, 1);
  }

  // The registered buffer that each of the operation's lies in; false when one does not.
  bool FindFixed(const IoOp& op, int (&fixed_idx)[IoOp::kBufferCountMax]) const {
    if (fixed_.empty() || op.buffer_count == 0) return false;
    for (int i = 0; i < op.buffer_count; ++i) {
      const auto* const data = static_cast<const std::byte*>(op.buffers[i].iov_base);
      auto it = fixed_.upper_bound(data);
      if (it == fixed_.begin()) return false;
      --it;
      if (data + op.buffers[i].iov_len > it->second.end) return false;
      fixed_idx[i] = it->second.idx;
    }
    return true;
  }

  void End(std::unique_ptr<Pending> pending, int64_t result, std::vector<Completion>& completed) {
    if (pending->split == nullptr) {
      completed.push_back({.op = std::move(pending->op), .result = result});
      --pending_count_;
      return;
    }
    Split& split = *pending->split;
    if (result < 0) {
      split.error = result;
    } else {
      split.moved_bytes += result;
    }
    if (--split.part_count > 0) return;
    completed.push_back(
        {.op = std::move(split.op), .result = split.error < 0 ? split.error : split.moved_bytes});
    --pending_count_;
  }

  // A filter of system calls may let the ring be made and refuse its use: nothing would ever end.
  absl::Status TryRing() {
    io_uring_prep_nop(NextSqe());
    io_uring_cqe* cqe = nullptr;
    int result = io_uring_submit(&ring_);
    if (result >= 0) {
      do {
        result = io_uring_wait_cqe(&ring_, &cqe);
      } while (result == -EINTR);
    }
    if (result < 0) return Unavailable("io_uring_enter: %s", std::strerror(-result));
    io_uring_cqe_seen(&ring_, cqe);
    return absl::OkStatus();
  }

  io_uring_sqe* NextSqe() {
    io_uring_sqe* sqe = io_uring_get_sqe(&ring_);
    while (sqe == nullptr) {
      io_uring_submit(&ring_);
      sqe = io_uring_get_sqe(&ring_);
    }
    return sqe;
  }

  void ArmWake() {
    io_uring_sqe* sqe = NextSqe();
    io_uring_prep_poll_add(sqe, wake_fd_, POLLIN);
    io_uring_sqe_set_data(sqe, nullptr);
    is_wake_armed_ = true;
  }

  void DrainWake() {
    uint64_t count;
    [[maybe_unused]] const ssize_t got = read(wake_fd_, &count, sizeof(count));
    is_wake_armed_ = false;
  }

  void Queue(Pending* pending) {
    IoOp& op = *pending->op;
    io_uring_sqe* sqe = NextSqe();
    const uint64_t offset_bytes = op.offset_bytes + op.moved_bytes;
    const unsigned count = FillAttempt(*pending);
    switch (op.kind) {
      case IoKind::kRead:
        if (pending->fixed_idx >= 0) {
          io_uring_prep_read_fixed(sqe, op.fd, pending->attempt[0].iov_base,
                                   static_cast<unsigned>(pending->attempt[0].iov_len), offset_bytes,
                                   pending->fixed_idx);
        } else {
          io_uring_prep_readv(sqe, op.fd, pending->attempt, count, offset_bytes);
        }
        break;
      case IoKind::kWrite:
        if (pending->fixed_idx >= 0) {
          io_uring_prep_write_fixed(sqe, op.fd, pending->attempt[0].iov_base,
                                    static_cast<unsigned>(pending->attempt[0].iov_len),
                                    offset_bytes, pending->fixed_idx);
        } else {
          io_uring_prep_writev(sqe, op.fd, pending->attempt, count, offset_bytes);
        }
        break;
      case IoKind::kSync:
        io_uring_prep_fsync(sqe, op.fd, IORING_FSYNC_DATASYNC);
        break;
      case IoKind::kAllocate:
        io_uring_prep_fallocate(sqe, op.fd, 0, static_cast<off_t>(op.offset_bytes),
                                static_cast<off_t>(op.total_bytes));
        break;
    }
    io_uring_sqe_set_data(sqe, pending);
  }

  unsigned FillAttempt(Pending& pending) const {
    const IoOp& op = *pending.op;
    uint64_t allowed_bytes =
        options_.attempt_bytes_max == 0 ? UINT64_MAX : options_.attempt_bytes_max;
    unsigned count = 0;
    for (int i = op.first_buffer; i < op.buffer_count && allowed_bytes > 0; ++i) {
      iovec& part = pending.attempt[count++];
      part = op.buffers[i];
      part.iov_len = std::min<uint64_t>(part.iov_len, allowed_bytes);
      allowed_bytes -= part.iov_len;
    }
    return count;
  }

  const IoEngineOptions options_;
  io_uring ring_ = {};
  bool has_ring_ = false;
  int wake_fd_ = -1;
  bool is_wake_armed_ = false;
  int pending_count_ = 0;
  // Registered memory by its first byte, and the places that are left.
  std::map<const std::byte*, Fixed> fixed_;
  std::vector<int> free_fixed_;
  uint64_t registered_bytes_ = 0;
  // Empty while all is well.
  std::string plain_ring_reason_;
  std::string no_fixed_reason_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<IoEngine>> MakeUringEngine(const IoEngineOptions& options) {
  auto engine = std::make_unique<UringEngine>(options);
  KVT_RETURN_IF_ERROR(engine->Init());
  return std::unique_ptr<IoEngine>(std::move(engine));
}

}  // namespace kvtier::nvme
