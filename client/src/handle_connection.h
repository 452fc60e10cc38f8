// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "proto/base/handle_wire.h"

namespace kvtier::client {

// Owns one file descriptor.
class UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) : fd_(fd) {}
  UniqueFd(UniqueFd&& other) noexcept : fd_(other.Release()) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept;
  UniqueFd(const UniqueFd&) = delete;
  UniqueFd& operator=(const UniqueFd&) = delete;
  ~UniqueFd();

  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }
  int Release();

 private:
  int fd_ = -1;
};

struct SegmentId {
  // kvtier.v1.Tier.
  uint32_t tier = 0;
  uint32_t segment_idx = 0;
  bool writable = false;

  friend bool operator==(const SegmentId&, const SegmentId&) = default;
  template <typename H>
  friend H AbslHashValue(H state, const SegmentId& id) {
    return H::combine(std::move(state), id.tier, id.segment_idx, id.writable);
  }
};

struct SegmentHandle {
  UniqueFd fd;
  uint64_t segment_bytes = 0;
  // The GPU whose memory `fd` names; all zero: a memfd.
  std::array<uint8_t, 16> device_uuid{};
};

// One connection to `handles.sock` (proto/base/handle_wire.h): the token of one session, and the
// descriptors of its segments. Thread-safe; calls block for up to `timeout_ms` for each message.
// While this object lives the daemon reuses no slot of its session: everything that can reach a
// slot holds it.
class HandleConnection {
 public:
  // Connects and says hello. Errors: UNAVAILABLE and NOT_FOUND (nobody listens there),
  // DEADLINE_EXCEEDED, PERMISSION_DENIED (no tenant for this peer), RESOURCE_EXHAUSTED,
  // FAILED_PRECONDITION (another wire version), INTERNAL (malformed answer).
  static absl::StatusOr<std::shared_ptr<HandleConnection>> Open(const std::string& socket_path,
                                                                uint32_t timeout_ms);

  HandleConnection(const HandleConnection&) = delete;
  HandleConnection& operator=(const HandleConnection&) = delete;

  uint64_t epoch() const { return epoch_; }
  // 16 bytes.
  const std::string& token() const { return token_; }

  // Requires: a reply of the session named the segment. Errors: those of Open; UNAVAILABLE, too,
  // when the GPU that holds the segment is lost.
  absl::StatusOr<SegmentHandle> GetSegment(const SegmentId& id);
  // The session's ticket board. Errors: those of Open; INTERNAL, too, when the daemon has none.
  absl::StatusOr<UniqueFd> GetBoard();

 private:
  explicit HandleConnection(UniqueFd socket) : socket_(std::move(socket)) {}

  absl::Status Hello();
  absl::StatusOr<SegmentHandle> Exchange(const HandleRequest& request, HandleReply& reply)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<UniqueFd> Receive(HandleReply& reply) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const UniqueFd socket_;
  uint64_t epoch_ = 0;
  std::string token_;

  // Held over a request and its reply, which nothing but their order connects.
  absl::Mutex mutex_;
  // A reply was lost: the next one to arrive would be taken for that of another request.
  bool out_of_step_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace kvtier::client
