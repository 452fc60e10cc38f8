// SPDX-License-Identifier: Apache-2.0
//
// A process that does nothing but keep descriptors while no daemon runs, for hosts without systemd:
// `kvtierd --hold`. The daemon starts it and talks to it over <run_dir>/holder.sock.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "daemon/unix_socket.h"
#include "proto/base/timed_wait.h"
#include "tiers/memory/segment_keeper.h"

namespace kvtier {

inline constexpr uint32_t kHolderWireVersion = 1;

enum class HolderRequestKind : uint32_t {
  kKeep = 1,    // with a descriptor
  kForget = 2,  // every descriptor of that name
  kTake = 3,    // a copy of everything
};

enum class HolderStatus : uint32_t { kOk = 0, kBadRequest = 1, kVersionMismatch = 2, kFull = 3 };

// One SEQPACKET message each way. A kTake is answered by a message per descriptor, the last one
// without.
struct HolderMessage {
  uint32_t version = kHolderWireVersion;
  // HolderRequestKind or HolderStatus.
  uint32_t kind = 0;
  // Padded with zeros, of which there is one at least.
  std::array<char, 64> name{};
};
static_assert(sizeof(HolderMessage) == 72);

// The daemon's side. Thread-safe; calls wait for the holder's answer. After a failure it connects
// anew, so that a late answer is never taken for the next one's. While there is no holder, calls
// fail; a thread starts another one, at growing intervals, and gives it all that is to be kept.
class HolderClient final : public SegmentKeeper {
 public:
  struct Options {
    std::string run_dir;
    // How long the holder keeps what it has while no daemon is connected.
    uint32_t hold_seconds = 600;
    // How long a call waits for the holder.
    uint32_t answer_timeout_ms = 5000;
    // The program that is started with --hold when there is no holder.
    std::string program = "/proc/self/exe";
    // From the end of a holder to the start of the next one; doubles, up to a minute, with each
    // that follows soon.
    uint32_t restart_ms = 1000;
  };

  // Connects to the holder of the directory; starts one if there is none. Requires: this process
  // has the lock of the directory. Errors: UNAVAILABLE.
  static absl::StatusOr<std::unique_ptr<HolderClient>> Connect(const Options& options);
  ~HolderClient() override;

  absl::Status Keep(const std::string& name, int fd) override;
  absl::Status Forget(const std::string& name) override;
  absl::StatusOr<std::vector<KeptFd>> TakeKept() override;

 private:
  HolderClient(Options options, UniqueFd connection);
  absl::Status Call(HolderRequestKind kind, const std::string& name, std::optional<int> fd);
  absl::Status Send(HolderRequestKind kind, const std::string& name, std::optional<int> fd)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<HolderMessage> Receive(UniqueFd* fd) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<std::vector<KeptFd>> ReceiveKept() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Says the first failure in the log. Returns `status`.
  absl::Status Fail(absl::Status status) ABSL_LOCKS_EXCLUDED(mutex_);
  void Reconnect() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Ask(HolderRequestKind kind, const std::string& name, std::optional<int> fd)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  void Supervise() ABSL_LOCKS_EXCLUDED(mutex_);
  // Notes that the holder is gone, if it is.
  void LookForEnd() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void NoteGone() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Starts the next one and gives it everything. False: the last one is still there.
  absl::StatusOr<bool> Replace() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void ReplaceIfDue() ABSL_LOCKS_EXCLUDED(mutex_);

  const Options options_;
  absl::Mutex mutex_;
  // Invalid: the holder is gone.
  UniqueFd connection_ ABSL_GUARDED_BY(mutex_);
  bool failed_ ABSL_GUARDED_BY(mutex_) = false;
  TimedNotification stopping_;
  // What is to be kept, for the next holder.
  std::multimap<std::string, UniqueFd> kept_ ABSL_GUARDED_BY(mutex_);
  uint64_t restart_ms_ ABSL_GUARDED_BY(mutex_);
  // Nothing: there is a holder.
  std::optional<uint64_t> gone_since_ms_ ABSL_GUARDED_BY(mutex_);
  uint64_t replaced_at_ms_ ABSL_GUARDED_BY(mutex_) = 0;
  std::jthread supervisor_;
};

// The holder itself. Listens, goes into the background (the calling process ends with status 0 when
// a daemon can connect), and ends when no daemon of the same user was connected for `hold_seconds`.
// Serves one daemon at a time. Returns the exit status of the process in the background, or of a
// failure. Requires: no threads.
int RunHolder(const std::string& run_dir, uint32_t hold_seconds);

}  // namespace kvtier
