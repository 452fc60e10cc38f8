// SPDX-License-Identifier: Apache-2.0
#include "daemon/holder.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <spawn.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <optional>
#include <utility>

#include "daemon/log.h"
#include "daemon/monotonic.h"
#include "proto/base/status_util.h"

namespace kvtier {
namespace {

// Between two starts of holders that end at once; one that lasted as long was a good one.
constexpr uint64_t kRestartMsMax = 60'000;

std::string SocketPath(const std::string& run_dir) { return run_dir + "/holder.sock"; }

std::string NameOf(const HolderMessage& message) {
  return {message.name.data(), strnlen(message.name.data(), message.name.size())};
}

HolderMessage MakeMessage(uint32_t kind, const std::string& name = "") {
  HolderMessage message{.kind = kind};
  std::copy_n(name.begin(), std::min(name.size(), message.name.size() - 1), message.name.begin());
  return message;
}

bool WaitReadable(int fd, int timeout_ms) {
  pollfd waiting{.fd = fd, .events = POLLIN, .revents = 0};
  return poll(&waiting, 1, timeout_ms) == 1;
}

// Descriptors by name, and the one daemon that may use them.
class Holder {
 public:
  explicit Holder(UniqueFd listener) : listener_(std::move(listener)) {}

  // Until no daemon was connected for so long.
  void Serve(uint32_t hold_seconds) {
    const uint64_t hold_ms = uint64_t{hold_seconds} * 1000;
    uint64_t alone_since_ms = MonotonicMs();
    while (true) {
      const uint64_t alone_ms = MonotonicMs() - alone_since_ms;
      if (!daemon_.valid() && alone_ms >= hold_ms) return;
      // The next daemon waits until the last word of the one before is heard.
      const int listener = daemon_.valid() ? -1 : listener_.get();
      pollfd waiting[] = {{.fd = listener, .events = POLLIN, .revents = 0},
                          {.fd = daemon_.get(), .events = POLLIN, .revents = 0}};
      const auto timeout_ms = static_cast<int>(std::min<uint64_t>(hold_ms - alone_ms, 60'000));
      if (poll(waiting, 2, daemon_.valid() ? -1 : timeout_ms) < 0 && errno != EINTR) return;
      if (waiting[1].revents != 0 && !AnswerOne()) {
        daemon_.Reset();
        alone_since_ms = MonotonicMs();
      }
      if (waiting[0].revents != 0) Accept();
    }
  }

 private:
  void Accept() {
    UniqueFd peer(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!peer.valid()) return;
    const absl::StatusOr<uid_t> uid = PeerUid(peer.get());
    if (uid.ok() && *uid == geteuid()) daemon_ = std::move(peer);
  }

  // False: the daemon is gone, and all it said was heard.
  bool AnswerOne() {
    HolderMessage request;
    UniqueFd fd;
    const auto receive = [&] {
      return ReceiveWithFd(daemon_.get(), std::as_writable_bytes(std::span(&request, 1)), &fd);
    };
    absl::StatusOr<size_t> got = receive();
    // The kernel says once, before what is left to read, that a daemon died with answers unread.
    if (!got.ok()) got = receive();
    if (!got.ok() || *got == 0) return false;
    Answer(*got, request, std::move(fd));
    return true;
  }

  // To a daemon that is gone nothing is sent, but what it said counts.
  void Answer(size_t request_bytes, const HolderMessage& request, UniqueFd fd) {
    if (request_bytes != sizeof(request)) return Reply(HolderStatus::kBadRequest);
    if (request.version != kHolderWireVersion) return Reply(HolderStatus::kVersionMismatch);
    if (request.name.back() != '\0') return Reply(HolderStatus::kBadRequest);
    switch (static_cast<HolderRequestKind>(request.kind)) {
      case HolderRequestKind::kKeep:
        if (!fd.valid()) return Reply(HolderStatus::kFull);
        held_.emplace(NameOf(request), std::move(fd));
        return Reply(HolderStatus::kOk);
      case HolderRequestKind::kForget:
        held_.erase(NameOf(request));
        return Reply(HolderStatus::kOk);
      case HolderRequestKind::kTake:
        for (const auto& [name, held] : held_) {
          Reply(HolderStatus::kOk, name, held.get());
        }
        return Reply(HolderStatus::kOk);
    }
    return Reply(HolderStatus::kBadRequest);
  }

  void Reply(HolderStatus status, const std::string& name = "",
             std::optional<int> fd = std::nullopt) {
    const HolderMessage message = MakeMessage(static_cast<uint32_t>(status), name);
    SendWithFd(daemon_.get(), std::as_bytes(std::span(&message, 1)), fd).IgnoreError();
  }

  const UniqueFd listener_;
  UniqueFd daemon_;
  std::multimap<std::string, UniqueFd> held_;
};

absl::StatusOr<UniqueFd> ConnectTo(const HolderClient::Options& options) {
  auto connection = ConnectSeqpacket(SocketPath(options.run_dir));
  if (!connection.ok()) return connection;
  const timeval timeout{.tv_sec = options.answer_timeout_ms / 1000,
                        .tv_usec = options.answer_timeout_ms % 1000 * 1000};
  setsockopt(connection->get(), SOL_SOCKET, SO_SNDTIMEO, &timeout, sizeof(timeout));
  return connection;
}

absl::Status StartHolder(const HolderClient::Options& options) {
  std::vector<std::string> arguments = {
      "kvtierd", "--hold", "--server.run_dir=" + options.run_dir,
      absl::StrFormat("--host.hold_seconds=%d", options.hold_seconds)};
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);
  // The daemon blocks signals and ignores SIGPIPE; the holder begins like any process.
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  sigset_t none;
  sigemptyset(&none);
  posix_spawnattr_setsigmask(&attributes, &none);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK);
  pid_t pid = -1;
  const int error =
      posix_spawn(&pid, options.program.c_str(), nullptr, &attributes, argv.data(), environ);
  posix_spawnattr_destroy(&attributes);
  if (error != 0) return ErrnoStatus(error, "start " + options.program);
  int status = 0;
  while (waitpid(pid, &status, 0) < 0) {
    if (errno != EINTR) return ErrnoStatus(errno, "wait for the holder");
  }
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
    return Unavailable("the holder did not start");
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<HolderClient>> HolderClient::Connect(const Options& options) {
  auto connection = ConnectTo(options);
  if (!connection.ok()) {
    KVT_RETURN_IF_ERROR(StartHolder(options));
    connection = ConnectTo(options);
  }
  if (!connection.ok()) return Unavailable("holder: %s", connection.status().message());
  return std::unique_ptr<HolderClient>(new HolderClient(options, std::move(connection).value()));
}

absl::Status HolderClient::Send(HolderRequestKind kind, const std::string& name,
                                std::optional<int> fd) {
  const HolderMessage message = MakeMessage(static_cast<uint32_t>(kind), name);
  return SendWithFd(connection_.get(), std::as_bytes(std::span(&message, 1)), fd);
}

absl::StatusOr<HolderMessage> HolderClient::Receive(UniqueFd* fd) {
  if (!WaitReadable(connection_.get(), static_cast<int>(options_.answer_timeout_ms))) {
    return Unavailable("the holder does not answer");
  }
  HolderMessage message;
  KVT_ASSIGN_OR_RETURN(
      const size_t got,
      ReceiveWithFd(connection_.get(), std::as_writable_bytes(std::span(&message, 1)), fd));
  if (got != sizeof(message)) return Unavailable("the holder is gone");
  if (message.kind != static_cast<uint32_t>(HolderStatus::kOk)) {
    return Unavailable("the holder refused: status %d, its version is %d", message.kind,
                       message.version);
  }
  return message;
}

HolderClient::HolderClient(Options options, UniqueFd connection)
    : options_(std::move(options)),
      connection_(std::move(connection)),
      restart_ms_(options_.restart_ms),
      supervisor_([this] {
        pthread_setname_np(pthread_self(), "kvtier-holder");
        Supervise();
      }) {}

HolderClient::~HolderClient() { stopping_.Notify(); }

void HolderClient::Reconnect() {
  connection_.Reset();
  // Only this process starts holders here: whoever listens is the one that has our descriptors.
  auto connection = ConnectTo(options_);
  if (connection.ok()) {
    connection_ = std::move(connection).value();
  } else if (!gone_since_ms_.has_value()) {
    NoteGone();
  }
}

void HolderClient::NoteGone() {
  gone_since_ms_ = MonotonicMs();
  if (*gone_since_ms_ > replaced_at_ms_ + kRestartMsMax) restart_ms_ = options_.restart_ms;
}

void HolderClient::LookForEnd() {
  pollfd holder{.fd = connection_.get(), .events = 0, .revents = 0};
  if (connection_.valid() && poll(&holder, 1, 0) == 1) Reconnect();
}

absl::StatusOr<bool> HolderClient::Replace() {
  auto connection = ConnectTo(options_);
  if (connection.ok()) {
    connection_ = std::move(connection).value();
    return false;
  }
  KVT_RETURN_IF_ERROR(StartHolder(options_));
  KVT_ASSIGN_OR_RETURN(connection_, ConnectTo(options_));
  for (const auto& [name, fd] : kept_) {
    KVT_RETURN_IF_ERROR(Ask(HolderRequestKind::kKeep, name, fd.get()));
  }
  return true;
}

void HolderClient::ReplaceIfDue() {
  absl::StatusOr<bool> replaced = false;
  size_t kept_count;
  {
    absl::MutexLock lock(&mutex_);
    LookForEnd();
    if (!gone_since_ms_.has_value() || MonotonicMs() < *gone_since_ms_ + restart_ms_) return;
    replaced = Replace();
    replaced_at_ms_ = MonotonicMs();
    restart_ms_ = std::min(2 * restart_ms_, kRestartMsMax);
    if (replaced.ok()) {
      gone_since_ms_ = std::nullopt;
      failed_ = false;
    } else {
      // Half of it is no use: the next one gets all of it.
      connection_.Reset();
      gone_since_ms_ = replaced_at_ms_;
    }
    kept_count = kept_.size();
  }
  if (!replaced.ok()) {
    Fail(replaced.status()).IgnoreError();
  } else if (*replaced) {
    Log(LogLevel::kWarning, "the holder of host memory was gone; another one has it",
        {{"descriptors", kept_count}});
  }
}

void HolderClient::Supervise() {
  const absl::Duration interval = absl::Milliseconds(std::min(options_.restart_ms, 500U));
  while (!stopping_.WaitFor(interval)) ReplaceIfDue();
}

absl::Status HolderClient::Fail(absl::Status status) {
  {
    absl::MutexLock lock(&mutex_);
    if (std::exchange(failed_, true)) return status;
  }
  Log(LogLevel::kWarning, "host memory may not outlive this process",
      {{"error", FromAbsl(status.message())}});
  return status;
}

absl::Status HolderClient::Call(HolderRequestKind kind, const std::string& name,
                                std::optional<int> fd) {
  absl::Status status;
  {
    absl::MutexLock lock(&mutex_);
    if (kind == HolderRequestKind::kKeep) {
      UniqueFd copy(fcntl(*fd, F_DUPFD_CLOEXEC, 0));
      if (copy.valid()) kept_.emplace(name, std::move(copy));
    } else {
      kept_.erase(name);
    }
    status = Ask(kind, name, fd);
    if (status.ok()) return status;
    Reconnect();
  }
  return Fail(std::move(status));
}

absl::Status HolderClient::Ask(HolderRequestKind kind, const std::string& name,
                               std::optional<int> fd) {
  KVT_RETURN_IF_ERROR(Send(kind, name, fd));
  UniqueFd nothing;
  return Receive(&nothing).status();
}

absl::Status HolderClient::Keep(const std::string& name, int fd) {
  return Call(HolderRequestKind::kKeep, name, fd);
}

absl::Status HolderClient::Forget(const std::string& name) {
  return Call(HolderRequestKind::kForget, name, std::nullopt);
}

absl::StatusOr<std::vector<KeptFd>> HolderClient::ReceiveKept() {
  KVT_RETURN_IF_ERROR(Send(HolderRequestKind::kTake, "", std::nullopt));
  std::vector<std::pair<std::string, UniqueFd>> received;
  while (true) {
    UniqueFd fd;
    KVT_ASSIGN_OR_RETURN(const HolderMessage message, Receive(&fd));
    std::string name = NameOf(message);
    if (name.empty()) break;
    // One more than this process may have.
    if (!fd.valid()) return Unavailable("the descriptor of %s did not arrive", name);
    received.emplace_back(std::move(name), std::move(fd));
  }
  std::vector<KeptFd> kept;
  for (auto& [name, fd] : received) kept.push_back({.name = name, .fd = fd.Release()});
  return kept;
}

absl::StatusOr<std::vector<KeptFd>> HolderClient::TakeKept() {
  absl::StatusOr<std::vector<KeptFd>> kept;
  {
    absl::MutexLock lock(&mutex_);
    kept = ReceiveKept();
    if (!kept.ok()) Reconnect();
  }
  if (!kept.ok()) return Fail(kept.status());
  return kept;
}

int RunHolder(const std::string& run_dir, uint32_t hold_seconds) {
  // Nothing of the daemon's: its sockets would look alive for as long as we are.
  close_range(STDERR_FILENO + 1, ~0U, 0);
  std::signal(SIGPIPE, SIG_IGN);
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) == 0) {
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_NOFILE, &limit);
  }
  absl::StatusOr<UniqueFd> listener = ListenSeqpacket(SocketPath(run_dir), 0600);
  if (!listener.ok()) {
    std::fprintf(stderr, "kvtierd --hold: %s\n", std::string(listener.status().message()).c_str());
    return EXIT_FAILURE;
  }
  const pid_t pid = fork();
  if (pid < 0) return EXIT_FAILURE;
  if (pid > 0) _exit(EXIT_SUCCESS);
  setsid();
  // Whoever waits for the daemon's output must not wait for us.
  const UniqueFd null(open("/dev/null", O_RDWR | O_CLOEXEC));
  for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) dup2(null.get(), fd);
  if (chdir("/") != 0) return EXIT_FAILURE;
  Holder(std::move(listener).value()).Serve(hold_seconds);
  unlink(SocketPath(run_dir).c_str());
  return EXIT_SUCCESS;
}

}  // namespace kvtier
