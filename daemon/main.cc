// SPDX-License-Identifier: Apache-2.0
#include <pthread.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <system_error>
#include <vector>

#include "absl/time/time.h"
#include "daemon/command_line.h"
#include "daemon/config.h"
#include "daemon/daemon.h"
#include "daemon/fd_store.h"
#include "daemon/holder.h"
#include "daemon/log.h"
#include "daemon/monotonic.h"
#include "daemon/standby_thread.h"
#include "daemon/supervisor.h"
#include "proto/base/status_util.h"
#include "proto/base/timed_wait.h"
#include "proto/base/version.h"

namespace kvtier {
namespace {

// How often a daemon that serves is asked whether it still can, and how long one that cannot goes
// on: health checks see NOT_SERVING, and calls in flight are answered.
constexpr absl::Duration kFailureCheckInterval = absl::Milliseconds(200);
constexpr absl::Duration kFailureGrace = absl::Seconds(2);
constexpr int kExitFailed = 1;
constexpr int kExitUsage = 2;

int Fail(const absl::Status& status, int exit_status) {
  std::fprintf(stderr, "kvtierd: %s\n", std::string(status.message()).c_str());
  return exit_status;
}

// Output that is lost is a failure.
int Print(const std::string& text) {
  if (std::fputs(text.c_str(), stdout) >= 0 && std::fflush(stdout) == 0) return EXIT_SUCCESS;
  return Fail(ErrnoStatus(errno, "write to standard output"), kExitFailed);
}

sigset_t StopSignals() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  return signals;
}

// A thread or memory that the system refuses is no bug of the daemon: one line and a status.
[[noreturn]] void EndWithOneLine() {
  try {
    if (std::current_exception() != nullptr) std::rethrow_exception(std::current_exception());
  } catch (const std::system_error& error) {
    std::fprintf(stderr,
                 "kvtierd: the system refuses a thread: %s: raise TasksMax= or the container's "
                 "limit of processes, RLIMIT_NPROC or RLIMIT_AS\n",
                 error.what());
    _exit(kExitFailed);
  } catch (const std::bad_alloc&) {
    std::fprintf(stderr, "kvtierd: the system refuses memory: raise MemoryMax= or RLIMIT_AS\n");
    _exit(kExitFailed);
  } catch (...) {
  }
  std::abort();
}

// One descriptor per connection, segment and nvme file.
void RaiseDescriptorLimit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
}

// Ends the process when stopping takes longer than it may: a disk that hangs must not keep a dead
// daemon's name taken. Made at the start.
class StopWatch {
 public:
  explicit StopWatch(uint32_t timeout_ms)
      : thread_([this, timeout_ms] {
          if (stopped_.WaitFor(absl::Milliseconds(timeout_ms))) return;
          Log(LogLevel::kError, "not stopped in time", {{"timeout_ms", timeout_ms}});
          _exit(kExitFailed);
        }) {}
  ~StopWatch() { stopped_.Notify(); }
  StopWatch(const StopWatch&) = delete;
  StopWatch& operator=(const StopWatch&) = delete;

  // From now on the time counts.
  void Start() { thread_.Begin(); }

 private:
  TimedNotification stopped_;
  StandbyThread thread_;
};

void Notify(const std::string& state) {
  if (absl::Status sent = NotifySystemd(state); !sent.ok()) {
    Log(LogLevel::kWarning, "systemd not notified", {{"error", FromAbsl(sent.message())}});
  }
}

// The signal that came within `timeout`, or 0.
int TakeSignal(const sigset_t& signals, absl::Duration timeout) {
  const timespec wait = absl::ToTimespec(timeout);
  return std::max(sigtimedwait(&signals, nullptr, &wait), 0);
}

// Tells systemd that the daemon works, for as long as it does: when its store has not come round
// for as long as systemd waits, systemd hears nothing and starts another process.
class Watchdog {
 public:
  explicit Watchdog(const Daemon& daemon) : daemon_(daemon), limit_ms_(WatchdogMs()) {}

  // The least that Beat is to be called.
  absl::Duration interval() const {
    return absl::Milliseconds(limit_ms_.value_or(UINT32_MAX) / 3 + 1);
  }

  void Beat() const {
    if (!limit_ms_.has_value()) return;
    if (MonotonicMs() < daemon_.last_beat_ms() + *limit_ms_ / 2) Notify("WATCHDOG=1");
  }

 private:
  const Daemon& daemon_;
  const std::optional<uint64_t> limit_ms_;
};

// Waits for a signal to stop (returned) or for a failure of the daemon (0).
int WaitForEnd(const sigset_t& signals, const Daemon& daemon) {
  const Watchdog watchdog(daemon);
  const absl::Duration interval = std::min(kFailureCheckInterval, watchdog.interval());
  while (daemon.failure().ok()) {
    watchdog.Beat();
    const int signal = TakeSignal(signals, interval);
    if (signal != 0 && signal != SIGHUP) return signal;
    if (signal == SIGHUP) {
      Log(LogLevel::kWarning,
          "SIGHUP does nothing: the configuration is read at the start; restart to change it");
    }
  }
  Notify("STATUS=failed: " + std::string(daemon.failure().message()));
  return TakeSignal(signals, kFailureGrace);
}

int Serve(const Config& config, int ready_fd) {
  // Before any thread exists: all of them inherit this, and only WaitForStop takes these signals.
  const sigset_t stop_signals = StopSignals();
  sigset_t signals = stop_signals;
  // Sent for a reload, which there is none of: it must not end the daemon.
  sigaddset(&signals, SIGHUP);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  std::signal(SIGPIPE, SIG_IGN);
  // A file that may not grow is an error of its write, not the end of the daemon.
  std::signal(SIGXFSZ, SIG_IGN);
  std::set_terminate(EndWithOneLine);
  RaiseDescriptorLimit();
  std::vector<KeptFd> kept = SystemdFdStore::TakeStarted();
  SetUpLog(config.log);
  StopWatch watch(config.server.drain_timeout_ms);
  auto started = Daemon::Start(config, nullptr, std::move(kept));
  if (!started.ok()) {
    return Fail(started.status(),
                absl::IsInvalidArgument(started.status()) ? kExitUsage : kExitFailed);
  }
  const std::unique_ptr<Daemon> daemon = std::move(started).value();
  Log(LogLevel::kInfo, "serving",
      {{"version", kVersion},
       {"pid", getpid()},
       {"epoch", daemon->epoch()},
       {"run_dir", config.server.run_dir}});
  Notify("READY=1");
  if (ready_fd >= 0) {
    if (absl::Status told = NotifyReadyFd(ready_fd); !told.ok()) return Fail(told, kExitFailed);
  }
  const int stop_signal = WaitForEnd(signals, *daemon);
  Log(LogLevel::kInfo, "stopping", {{"signal", stop_signal}});
  // The next signal has its default effect.
  pthread_sigmask(SIG_UNBLOCK, &stop_signals, nullptr);
  Notify("STOPPING=1");
  watch.Start();
  daemon->Stop();
  Log(LogLevel::kInfo, "stopped");
  // Only a new process can use a GPU that is lost: the supervisor is to start one.
  return daemon->failure().ok() ? EXIT_SUCCESS : Fail(daemon->failure(), kExitFailed);
}

int Main(const std::vector<std::string>& arguments) {
  absl::StatusOr<CommandLine> line = ParseCommandLine(arguments);
  if (!line.ok()) return Fail(line.status(), kExitUsage);
  if (line->action == CommandLineAction::kHelp) return Print(HelpText());
  if (line->action == CommandLineAction::kVersion) {
    return Print(absl::StrFormat("kvtierd %s\n", kVersion));
  }
  for (char** entry = environ; *entry != nullptr; ++entry) {
    line->sources.environment.emplace_back(*entry);
  }
  const absl::StatusOr<Config> config = LoadConfig(line->sources);
  if (!config.ok()) return Fail(config.status(), kExitUsage);
  if (line->action == CommandLineAction::kPrintConfig) return Print(PrintConfig(*config));
  if (line->action == CommandLineAction::kCheckConfig) return EXIT_SUCCESS;
  if (line->action == CommandLineAction::kHold) {
    return RunHolder(config->server.run_dir, config->host_memory.hold_seconds);
  }
  return Serve(*config, line->ready_fd);
}

}  // namespace
}  // namespace kvtier

int main(int argc, char** argv) {
  return kvtier::Main(std::vector<std::string>(argv + 1, argv + argc));
}
