// SPDX-License-Identifier: Apache-2.0
#include "client/ctl/daemon_process.h"

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstring>
#include <string_view>

#include "proto/base/check.h"
#include "proto/base/status_util.h"

namespace kvtier::ctl {
namespace {

// Number of the descriptor on which the daemon reports that it is ready.
constexpr int kReadyFd = 3;

// Waits for the daemon's "READY" line. The pipe ends without one when the daemon does.
absl::Status AwaitReady(int fd, int timeout_ms, const std::string& log_path) {
  using std::chrono::milliseconds;
  const auto deadline = std::chrono::steady_clock::now() + milliseconds(timeout_ms);
  std::string line;
  while (line.find('\n') == std::string::npos) {
    const auto left =
        std::chrono::duration_cast<milliseconds>(deadline - std::chrono::steady_clock::now());
    pollfd wait{.fd = fd, .events = POLLIN, .revents = 0};
    const int ready = poll(&wait, 1, std::max(0, static_cast<int>(left.count())));
    if (ready < 0 && errno == EINTR) continue;
    if (ready < 0) return ErrnoStatus(errno, "wait for the daemon");
    if (ready == 0) return DeadlineExceeded("the daemon is not ready yet; see %s", log_path);
    char buffer[64];
    const ssize_t count = read(fd, buffer, sizeof(buffer));
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return Unavailable("the daemon ended before it was ready; see %s", log_path);
    line.append(buffer, static_cast<size_t>(count));
  }
  return absl::OkStatus();
}

absl::StatusOr<pid_t> Spawn(std::vector<std::string> arguments, const std::string& log_path,
                            int ready_fd) {
  arguments.push_back("--ready-fd");
  arguments.push_back(absl::StrFormat("%d", kReadyFd));
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  KVT_CHECK(posix_spawn_file_actions_init(&actions) == 0);
  posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, log_path.c_str(),
                                   O_WRONLY | O_CREAT | O_APPEND, 0644);
  posix_spawn_file_actions_adddup2(&actions, STDOUT_FILENO, STDERR_FILENO);
  posix_spawn_file_actions_adddup2(&actions, ready_fd, kReadyFd);
  pid_t pid = -1;
  const int error =
      posix_spawn(&pid, arguments[0].c_str(), &actions, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0) return Unavailable("start %s: %s", arguments[0], std::strerror(error));
  return pid;
}

}  // namespace

absl::StatusOr<std::unique_ptr<DaemonProcess>> DaemonProcess::Start(
    const std::vector<std::string>& arguments, const std::string& log_path, int timeout_ms) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) return ErrnoStatus(errno, "pipe");
  // dup2 onto itself would keep close-on-exec.
  if (ends[1] == kReadyFd) {
    const int moved = fcntl(ends[1], F_DUPFD_CLOEXEC, kReadyFd + 1);
    if (moved < 0) {
      const int error = errno;
      close(ends[0]);
      close(ends[1]);
      return ErrnoStatus(error, "duplicate a pipe");
    }
    close(ends[1]);
    ends[1] = moved;
  }
  const absl::StatusOr<pid_t> pid = Spawn(arguments, log_path, ends[1]);
  close(ends[1]);
  if (!pid.ok()) {
    close(ends[0]);
    return pid.status();
  }
  auto process = std::unique_ptr<DaemonProcess>(new DaemonProcess(*pid));
  const absl::Status ready = AwaitReady(ends[0], timeout_ms, log_path);
  close(ends[0]);
  if (!ready.ok()) return ready;
  return process;
}

DaemonProcess::~DaemonProcess() { Kill(); }

int DaemonProcess::Wait() {
  int status = 0;
  while (waitpid(pid_, &status, 0) < 0) KVT_CHECK(errno == EINTR);
  pid_ = -1;
  return status;
}

void DaemonProcess::Kill() {
  if (pid_ < 0) return;
  kill(pid_, SIGKILL);
  Wait();
}

absl::Status DaemonProcess::Stop() {
  if (pid_ < 0) return absl::OkStatus();
  kill(pid_, SIGTERM);
  const int status = Wait();
  if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return absl::OkStatus();
  return Internal("the daemon ended with wait status %d", status);
}

}  // namespace kvtier::ctl
