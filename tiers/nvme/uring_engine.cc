// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <liburing.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "proto/base/check.h"
#include "proto/base/status_util.h"
#include "tiers/nvme/io_engine.h"

namespace kvtier::nvme {
namespace {

// An operation in the ring; the kernel reads `attempt` until the completion.
struct Pending {
  std::unique_ptr<IoOp> op;
  iovec attempt[IoOp::kBufferCountMax];
};

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
    // One completion each for the operations and the wake-up, so that none can overflow.
    const auto entries = static_cast<unsigned>(options_.queue_depth + 1);
    int error = io_uring_queue_init(entries, &ring_,
                                    IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN);
    // Kernels before 6.1 do not know the flags.
    if (error == -EINVAL) error = io_uring_queue_init(entries, &ring_, 0);
    if (error < 0) return Unavailable("io_uring_setup: %s", std::strerror(-error));
    has_ring_ = true;
    wake_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (wake_fd_ < 0) return Unavailable("eventfd: %s", std::strerror(errno));
    return absl::OkStatus();
  }

  std::string_view name() const override { return "io_uring"; }

  void Submit(std::unique_ptr<IoOp> op) override {
    KVT_CHECK(pending_count_ < options_.queue_depth);
    ++pending_count_;
    Queue(new Pending{.op = std::move(op), .attempt = {}});
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
        completed.push_back({.op = std::move(pending->op), .result = *result});
        delete pending;
        --pending_count_;
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

 private:
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
        io_uring_prep_readv(sqe, op.fd, pending->attempt, count, offset_bytes);
        break;
      case IoKind::kWrite:
        io_uring_prep_writev(sqe, op.fd, pending->attempt, count, offset_bytes);
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
};

}  // namespace

absl::StatusOr<std::unique_ptr<IoEngine>> MakeUringEngine(const IoEngineOptions& options) {
  auto engine = std::make_unique<UringEngine>(options);
  KVT_RETURN_IF_ERROR(engine->Init());
  return std::unique_ptr<IoEngine>(std::move(engine));
}

}  // namespace kvtier::nvme
