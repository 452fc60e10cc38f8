// SPDX-License-Identifier: Apache-2.0
//
// A kvtierd process in a directory of its own, for tests.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/include/kvtier/client.h"

namespace kvtier::testing {

// A process started by a test. Killed and reaped when destroyed. Single-thread.
class ChildProcess {
 public:
  // `output_path`: where its standard output and error go, appended.
  ChildProcess(std::vector<std::string> arguments, std::string output_path);
  ~ChildProcess();
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;

  pid_t pid() const { return pid_; }
  void Signal(int signal_number);
  // Exit status, or 128 + signal. DEADLINE_EXCEEDED when it runs on.
  absl::StatusOr<int> Wait(std::chrono::milliseconds timeout);

 private:
  pid_t pid_ = -1;
};

// Repeats `condition` until it is true or the time is over; the last answer.
bool Eventually(std::chrono::milliseconds timeout, const std::function<bool()>& condition);

// Owns a temporary directory with run/ and data/ and the daemon that lives there.
class DaemonProcess {
 public:
  // `options`: further --section.key=VALUE flags. `launcher`: a command that runs the one after it.
  DaemonProcess(std::string binary, std::vector<std::string> options,
                std::vector<std::string> launcher = {});
  ~DaemonProcess();

  // Starts it and waits until it answers.
  absl::Status Start();
  // Starts it and waits until it ends; its exit status.
  absl::StatusOr<int> RunToEnd(std::chrono::milliseconds timeout);
  // Of one that ends by itself: its exit status.
  absl::StatusOr<int> WaitForEnd(std::chrono::milliseconds timeout) {
    return process_->Wait(timeout);
  }
  void Kill9();
  // SIGTERM; its exit status.
  absl::StatusOr<int> Stop();

  absl::StatusOr<std::unique_ptr<client::Client>> Connect() const;
  std::string run_dir() const { return root_ + "/run"; }
  std::string data_dir() const { return root_ + "/data"; }
  std::string log_path() const { return root_ + "/log"; }
  std::string Log() const;
  pid_t pid() const { return process_->pid(); }
  const std::vector<std::string>& arguments() const { return arguments_; }

 private:
  std::string root_;
  std::vector<std::string> arguments_;
  std::unique_ptr<ChildProcess> process_;
};

// A layout of small blocks, and bytes that only follow from a block's key.
Layout SmallLayout(std::string model = "failure-table");
std::vector<Key> MakeChain(const client::Namespace& ns, uint32_t seed, size_t count);
void FillPattern(const Key& key, std::span<std::byte> bytes);
bool HasPattern(const Key& key, std::span<const std::byte> bytes);

// Reserves, fills and commits a chain. The number of blocks that the daemon took.
absl::StatusOr<size_t> PutChain(client::Client* client, const client::Namespace& ns,
                                std::span<const Key> keys);

struct ReadBack {
  size_t right = 0;
  size_t missing = 0;
  size_t wrong = 0;
};
// Acquires a chain and compares every delivered block with its pattern.
absl::StatusOr<ReadBack> CheckChain(client::Client* client, const client::Namespace& ns,
                                    std::span<const Key> keys);

}  // namespace kvtier::testing
