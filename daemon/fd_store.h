// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "tiers/memory/segment_keeper.h"

namespace kvtier {

// systemd's descriptor store: what it keeps comes back with the next start of the service, for as
// long as the unit's FileDescriptorStoreMax= allows and the service is not stopped for good.
// Thread-safe.
class SystemdFdStore final : public SegmentKeeper {
 public:
  // Takes over the descriptors that systemd started this process with, and their names out of the
  // environment. Those of other names (sockets) are left open and alone. Before any thread exists.
  // `first_fd` is for tests: systemd counts from 3.
  static std::vector<KeptFd> TakeStarted(int first_fd = 3);

  explicit SystemdFdStore(std::vector<KeptFd> started) : started_(std::move(started)) {}
  // Closes what nobody took.
  ~SystemdFdStore() override;

  // systemd does not say whether it has room: a descriptor beyond its limit is dropped.
  absl::Status Keep(const std::string& name, int fd) override;
  absl::Status Forget(const std::string& name) override;
  absl::StatusOr<std::vector<KeptFd>> TakeKept() override;

 private:
  absl::Mutex mutex_;
  std::vector<KeptFd> started_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvtier
