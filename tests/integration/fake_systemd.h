// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace kvtier::testing {

// What systemd's descriptor store is to a service: takes descriptors over NOTIFY_SOCKET and starts
// the next process with them. Thread-compatible.
class FakeSystemd {
 public:
  // So many descriptors can be handed on. Claims the numbers from 3 for that; before the process
  // has opened anything else.
  static constexpr int kDescriptorsMax = 60;
  static void ClaimDescriptors();

  // `directory` exists and is its own.
  explicit FakeSystemd(const std::string& directory);
  ~FakeSystemd();

  // A program that starts `program` with its arguments, as systemd would: with the environment and
  // the descriptors it has now. To be used before the next call.
  std::string Wrap(const std::string& program);
  // The numbers are free for the next time.
  void TakeBack();
  // Names of what is stored.
  std::vector<std::string> Names() const;

 private:
  void Receive();

  const std::string directory_;
  int socket_ = -1;
  mutable absl::Mutex mutex_;
  std::multimap<std::string, int> stored_ ABSL_GUARDED_BY(mutex_);
  std::jthread receiver_;
};

}  // namespace kvtier::testing
