// SPDX-License-Identifier: Apache-2.0
#include "tests/integration/daemon_process.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "proto/base/check.h"
#include "proto/base/status_util.h"

extern char** environ;

namespace kvtier::testing {
namespace {

constexpr std::chrono::milliseconds kPollInterval(5);
constexpr std::chrono::milliseconds kStartTimeout(30'000);
constexpr std::chrono::milliseconds kStopTimeout(30'000);

void WaitAMoment() {
  const timespec interval{.tv_sec = 0, .tv_nsec = kPollInterval.count() * 1'000'000};
  nanosleep(&interval, nullptr);
}

}  // namespace

ChildProcess::ChildProcess(std::vector<std::string> arguments, std::string output_path) {
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  KVT_CHECK(posix_spawn_file_actions_init(&actions) == 0);
  KVT_CHECK(posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, output_path.c_str(),
                                             O_WRONLY | O_CREAT | O_APPEND, 0600) == 0);
  KVT_CHECK(posix_spawn_file_actions_adddup2(&actions, STDOUT_FILENO, STDERR_FILENO) == 0);
  KVT_CHECK(posix_spawn(&pid_, argv[0], &actions, nullptr, argv.data(), environ) == 0);
  posix_spawn_file_actions_destroy(&actions);
}

ChildProcess::~ChildProcess() {
  if (pid_ < 0) return;
  Signal(SIGKILL);
  waitpid(pid_, nullptr, 0);
}

void ChildProcess::Signal(int signal_number) {
  if (pid_ >= 0) kill(pid_, signal_number);
}

absl::StatusOr<int> ChildProcess::Wait(std::chrono::milliseconds timeout) {
  int status = 0;
  const bool ended =
      Eventually(timeout, [&] { return pid_ < 0 || waitpid(pid_, &status, WNOHANG) == pid_; });
  if (!ended) return DeadlineExceeded("process %d runs on", pid_);
  pid_ = -1;
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

bool Eventually(std::chrono::milliseconds timeout, const std::function<bool()>& condition) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  while (!condition()) {
    if (std::chrono::steady_clock::now() >= deadline) return condition();
    WaitAMoment();
  }
  return true;
}

DaemonProcess::DaemonProcess(std::string binary, std::vector<std::string> options,
                             std::vector<std::string> launcher)
    : arguments_(std::move(launcher)) {
  const char* base = std::getenv("TMPDIR");
  std::string root = std::string(base != nullptr ? base : "/tmp") + "/kvtier-test-XXXXXX";
  KVT_CHECK(mkdtemp(root.data()) != nullptr);
  root_ = root;
  arguments_.push_back(std::move(binary));
  arguments_.push_back("--server.run_dir=" + run_dir());
  arguments_.push_back("--server.data_dir=" + data_dir());
  arguments_.insert(arguments_.end(), options.begin(), options.end());
}

DaemonProcess::~DaemonProcess() {
  process_.reset();
  std::error_code ignored;
  std::filesystem::remove_all(root_, ignored);
}

absl::Status DaemonProcess::Start() {
  process_ = std::make_unique<ChildProcess>(arguments_, log_path());
  absl::Status last = DeadlineExceeded("the daemon did not start in time");
  const bool up = Eventually(kStartTimeout, [&] {
    auto client = client::Client::Connect({.run_dir = run_dir(), .reconnect_timeout_ms = 100});
    last = client.status();
    return client.ok();
  });
  if (!up) return Annotate(last, Log());
  return absl::OkStatus();
}

absl::StatusOr<int> DaemonProcess::RunToEnd(std::chrono::milliseconds timeout) {
  process_ = std::make_unique<ChildProcess>(arguments_, log_path());
  return process_->Wait(timeout);
}

void DaemonProcess::Kill9() {
  process_->Signal(SIGKILL);
  KVT_CHECK(process_->Wait(kStopTimeout).ok());
}

absl::StatusOr<int> DaemonProcess::Stop() {
  process_->Signal(SIGTERM);
  return process_->Wait(kStopTimeout);
}

absl::StatusOr<std::unique_ptr<client::Client>> DaemonProcess::Connect() const {
  return client::Client::Connect({.run_dir = run_dir(), .client_name = "test"});
}

std::string DaemonProcess::Log() const {
  std::ifstream file(log_path());
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

Layout SmallLayout(std::string model) {
  Layout layout;
  layout.model = std::move(model);
  layout.layer_count = 2;
  layout.kv_head_count = 1;
  layout.head_dim = 64;
  layout.block_tokens = 64;
  return layout;
}

std::vector<Key> MakeChain(const client::Namespace& ns, uint32_t seed, size_t count) {
  std::vector<Key> keys;
  std::optional<Key> parent;
  for (uint32_t i = 0; i < count; ++i) {
    const uint32_t tokens[] = {seed, i};
    parent = HashBlock(ns.hash, parent, tokens);
    keys.push_back(*parent);
  }
  return keys;
}

void FillPattern(const Key& key, std::span<std::byte> bytes) {
  uint64_t state;
  std::memcpy(&state, key.bytes.data(), sizeof(state));
  for (size_t i = 0; i < bytes.size(); ++i) {
    if (i % 8 == 0) state = state * 6364136223846793005ULL + 1442695040888963407ULL;
    bytes[i] = static_cast<std::byte>(state >> (8 * (i % 8)));
  }
}

bool HasPattern(const Key& key, std::span<const std::byte> bytes) {
  std::vector<std::byte> expected(bytes.size());
  FillPattern(key, expected);
  return std::memcmp(expected.data(), bytes.data(), bytes.size()) == 0;
}

absl::StatusOr<size_t> PutChain(client::Client* client, const client::Namespace& ns,
                                std::span<const Key> keys) {
  KVT_ASSIGN_OR_RETURN(client::Fill fill, client->Reserve(ns, std::nullopt, keys));
  for (size_t i = 0; i < keys.size(); ++i) {
    if (fill.blocks[i].status == BlockStatus::kOk) FillPattern(keys[i], fill.blocks[i].bytes);
  }
  KVT_ASSIGN_OR_RETURN(const std::vector<BlockStatus> statuses, client->Commit(ns, fill));
  size_t taken = 0;
  for (const BlockStatus status : statuses) {
    if (status == BlockStatus::kOk || status == BlockStatus::kExists) ++taken;
  }
  return taken;
}

absl::StatusOr<ReadBack> CheckChain(client::Client* client, const client::Namespace& ns,
                                    std::span<const Key> keys) {
  KVT_ASSIGN_OR_RETURN(const client::Lease lease, client->Acquire(ns, keys));
  ReadBack result;
  for (size_t i = 0; i < keys.size(); ++i) {
    const client::MappedBlock& block = lease.blocks()[i];
    if (block.status != BlockStatus::kOk) {
      ++result.missing;
    } else if (HasPattern(keys[i], block.bytes)) {
      ++result.right;
    } else {
      ++result.wrong;
    }
  }
  return result;
}

}  // namespace kvtier::testing
