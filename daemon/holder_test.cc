// SPDX-License-Identifier: Apache-2.0
#include "daemon/holder.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "daemon/monotonic.h"
#include "tiers/tier_test_util.h"

namespace kvtier {
namespace {

class HolderTest : public testing::Test {
 protected:
  // A second after the last daemon is gone, it ends: no test leaves one behind for long.
  std::unique_ptr<HolderClient> Connect(uint32_t hold_seconds = 1,
                                        uint32_t answer_timeout_ms = 10'000,
                                        uint32_t restart_ms = 600'000) {
    auto client = HolderClient::Connect({.run_dir = folder_.path(),
                                         .hold_seconds = hold_seconds,
                                         .answer_timeout_ms = answer_timeout_ms,
                                         .program = KVTIERD_PATH,
                                         .restart_ms = restart_ms});
    EXPECT_TRUE(client.ok()) << client.status();
    return client.ok() ? std::move(client).value() : nullptr;
  }
  std::string socket_path() const { return folder_.path() + "/holder.sock"; }
  // Names and contents of what the holder has.
  static std::vector<std::string> Contents(HolderClient& client) {
    std::vector<std::string> contents;
    const auto all = client.TakeKept();
    EXPECT_TRUE(all.ok()) << all.status();
    for (const KeptFd& kept : all.ok() ? *all : std::vector<KeptFd>()) {
      std::array<char, 16> text{};
      EXPECT_GT(pread(kept.fd, text.data(), text.size(), 0), 0);
      close(kept.fd);
      contents.push_back(kept.name + "=" + text.data());
    }
    std::ranges::sort(contents);
    return contents;
  }
  static UniqueFd File(const std::string& text) {
    UniqueFd fd(memfd_create("x", MFD_CLOEXEC));
    EXPECT_EQ(write(fd.get(), text.data(), text.size()), static_cast<ssize_t>(text.size()));
    return fd;
  }
  TempFolder folder_;
};

TEST_F(HolderTest, KeepsDescriptorsFromOneDaemonToTheNext) {
  auto first = Connect();
  ASSERT_NE(first, nullptr);
  EXPECT_TRUE(first->TakeKept()->empty());
  EXPECT_TRUE(first->Keep("a", File("1").get()).ok());
  EXPECT_TRUE(first->Keep("b", File("2").get()).ok());
  EXPECT_TRUE(first->Keep("b", File("3").get()).ok());
  EXPECT_TRUE(first->Keep("c", File("4").get()).ok());
  EXPECT_TRUE(first->Forget("c").ok());
  EXPECT_TRUE(first->Forget("unknown").ok());
  first.reset();
  auto second = Connect();
  ASSERT_NE(second, nullptr);
  EXPECT_EQ(Contents(*second), (std::vector<std::string>{"a=1", "b=2", "b=3"}));
  EXPECT_TRUE(second->Forget("b").ok());
  EXPECT_EQ(Contents(*second), (std::vector<std::string>{"a=1"}));
  struct stat status{};
  ASSERT_EQ(stat(socket_path().c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0600u);
}

// The process that was started with --hold for the folder, for signals.
pid_t FindHolder(const std::string& folder) {
  for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
    std::ifstream file(entry.path() / "cmdline");
    const std::string arguments(std::istreambuf_iterator<char>(file), {});
    if (arguments.find("--server.run_dir=" + folder + '\0') == std::string::npos) continue;
    return std::atoi(entry.path().filename().c_str());
  }
  ADD_FAILURE() << "no holder";
  return -1;
}

TEST_F(HolderTest, ALateAnswerIsNoOtherCallsAnswer) {
  auto client = Connect(/*hold_seconds=*/60, /*answer_timeout_ms=*/200);
  ASSERT_NE(client, nullptr);
  EXPECT_TRUE(client->Keep("a", File("1").get()).ok());
  const pid_t holder = FindHolder(folder_.path());
  ASSERT_GT(holder, 0);
  ASSERT_EQ(kill(holder, SIGSTOP), 0);
  EXPECT_EQ(client->Keep("b", File("2").get()).code(), absl::StatusCode::kUnavailable);
  ASSERT_EQ(kill(holder, SIGCONT), 0);
  // What it answers to is said by what it gives: every descriptor, then the end.
  EXPECT_EQ(Contents(*client), (std::vector<std::string>{"a=1", "b=2"}));
  EXPECT_TRUE(client->Forget("b").ok());
  EXPECT_EQ(Contents(*client), (std::vector<std::string>{"a=1"}));
  ASSERT_EQ(kill(holder, SIGKILL), 0);
  EXPECT_EQ(client->Keep("c", File("3").get()).code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(client->TakeKept().status().code(), absl::StatusCode::kUnavailable);
}

TEST_F(HolderTest, AHolderThatDiesIsReplacedAndGivenAllAgain) {
  auto client = Connect(/*hold_seconds=*/1, /*answer_timeout_ms=*/10'000, /*restart_ms=*/10);
  ASSERT_NE(client, nullptr);
  EXPECT_TRUE(client->Keep("a", File("1").get()).ok());
  EXPECT_TRUE(client->Keep("b", File("2").get()).ok());
  EXPECT_TRUE(client->Keep("c", File("3").get()).ok());
  EXPECT_TRUE(client->Forget("b").ok());
  for (int round = 0; round < 3; ++round) {
    const pid_t holder = FindHolder(folder_.path());
    ASSERT_GT(holder, 0);
    ASSERT_EQ(kill(holder, SIGKILL), 0);
    const uint64_t start_ms = MonotonicMs();
    // Calls fail until there is another one.
    while (!client->Forget("unknown").ok() && MonotonicMs() - start_ms < 30'000) {
      poll(nullptr, 0, 5);
    }
    EXPECT_EQ(Contents(*client), (std::vector<std::string>{"a=1", "c=3"}));
  }
  client.reset();
  auto next = Connect();
  ASSERT_NE(next, nullptr);
  EXPECT_EQ(Contents(*next), (std::vector<std::string>{"a=1", "c=3"}));
}

TEST_F(HolderTest, HearsTheLastWordsOfADaemonThatReadNoAnswers) {
  Connect(/*hold_seconds=*/60).reset();
  auto dying = ConnectSeqpacket(socket_path());
  ASSERT_TRUE(dying.ok()) << dying.status();
  const pid_t holder = FindHolder(folder_.path());
  constexpr int kCount = 5;
  const auto keep = [&](int number) {
    HolderMessage message{.kind = static_cast<uint32_t>(HolderRequestKind::kKeep)};
    message.name[0] = static_cast<char>('a' + number);
    EXPECT_TRUE(SendWithFd(dying->get(), std::as_bytes(std::span(&message, 1)),
                           File(std::to_string(number)).get())
                    .ok());
  };
  keep(0);
  pollfd answered{.fd = dying->get(), .events = POLLIN, .revents = 0};
  ASSERT_EQ(poll(&answered, 1, 10'000), 1);
  ASSERT_GT(holder, 0);
  ASSERT_EQ(kill(holder, SIGSTOP), 0);
  for (int number = 1; number < kCount; ++number) keep(number);
  dying->Reset();
  ASSERT_EQ(kill(holder, SIGCONT), 0);
  auto next = Connect();
  ASSERT_NE(next, nullptr);
  EXPECT_EQ(Contents(*next), (std::vector<std::string>{"a=0", "b=1", "c=2", "d=3", "e=4"}));
  EXPECT_EQ(kill(holder, SIGKILL), 0);
}

TEST_F(HolderTest, EndsWhenNoDaemonComesBack) {
  Connect().reset();
  const uint64_t start_ms = MonotonicMs();
  while (access(socket_path().c_str(), F_OK) == 0 && MonotonicMs() - start_ms < 20'000) {
    poll(nullptr, 0, 10);
  }
  EXPECT_NE(access(socket_path().c_str(), F_OK), 0);
  // The next one starts empty.
  auto next = Connect();
  ASSERT_NE(next, nullptr);
  EXPECT_TRUE(next->TakeKept()->empty());
}

TEST_F(HolderTest, RefusesWhatIsNoRequestAndAnotherVersion) {
  auto client = Connect();
  ASSERT_NE(client, nullptr);
  EXPECT_TRUE(client->Keep("a", File("1").get()).ok());
  client.reset();
  const auto raw = ConnectSeqpacket(socket_path());
  ASSERT_TRUE(raw.ok()) << raw.status();
  const auto ask = [&](const HolderMessage& message, size_t bytes) {
    EXPECT_TRUE(
        SendWithFd(raw->get(), std::as_bytes(std::span(&message, 1)).first(bytes), std::nullopt)
            .ok());
    HolderMessage reply;
    UniqueFd fd;
    EXPECT_TRUE(ReceiveWithFd(raw->get(), std::as_writable_bytes(std::span(&reply, 1)), &fd).ok());
    EXPECT_FALSE(fd.valid());
    return static_cast<HolderStatus>(reply.kind);
  };
  constexpr size_t kAll = sizeof(HolderMessage);
  EXPECT_EQ(ask({.version = 2, .kind = 3}, kAll), HolderStatus::kVersionMismatch);
  EXPECT_EQ(ask({.kind = 3}, kAll - 1), HolderStatus::kBadRequest);
  EXPECT_EQ(ask({.kind = 9}, kAll), HolderStatus::kBadRequest);
  EXPECT_EQ(ask({.kind = 1}, kAll), HolderStatus::kFull) << "without a descriptor";
  HolderMessage endless{.kind = 2};
  endless.name.fill('a');
  EXPECT_EQ(ask(endless, kAll), HolderStatus::kBadRequest);
}

TEST_F(HolderTest, GivesNothingToAnotherUser) {
  if (geteuid() != 0) GTEST_SKIP() << "being another user needs root";
  auto client = Connect();
  ASSERT_NE(client, nullptr);
  EXPECT_TRUE(client->Keep("a", File("1").get()).ok());
  client.reset();
  // As if the permissions of the files were wrong.
  ASSERT_EQ(chmod(folder_.path().c_str(), 0777), 0);
  ASSERT_EQ(chmod(socket_path().c_str(), 0777), 0);
  const pid_t pid = fork();
  if (pid == 0) {
    if (setresuid(4242, 4242, 4242) != 0) _exit(2);
    const auto connection = ConnectSeqpacket(socket_path());
    if (!connection.ok()) _exit(3);
    const HolderMessage take{.kind = 3};
    HolderMessage reply;
    UniqueFd fd;
    // Closed without a word.
    const bool sent =
        SendWithFd(connection->get(), std::as_bytes(std::span(&take, 1)), std::nullopt).ok();
    const auto got =
        ReceiveWithFd(connection->get(), std::as_writable_bytes(std::span(&reply, 1)), &fd);
    _exit(sent && got.ok() && *got > 0 ? 1 : 0);
  }
  int status = 0;
  ASSERT_EQ(waitpid(pid, &status, 0), pid);
  EXPECT_EQ(WEXITSTATUS(status), 0);
  auto next = Connect();
  ASSERT_NE(next, nullptr);
  EXPECT_EQ(Contents(*next), (std::vector<std::string>{"a=1"}));
}

TEST(HolderClientTest, SaysThatNoHolderStarts) {
  const TempFolder folder;
  EXPECT_EQ(
      HolderClient::Connect({.run_dir = folder.path(), .program = "/bin/false"}).status().code(),
      absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace kvtier
