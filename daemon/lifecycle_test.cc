// SPDX-License-Identifier: Apache-2.0
//
// The real program: started, stopped, refused, killed.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <fstream>
#include <sstream>
#include <thread>

#include "daemon/monotonic.h"
#include "daemon/test_client.h"
#include "proto/base/status_util.h"
#include "proto/base/version.h"
#include "tiers/tier_test_util.h"

namespace kvtier {
namespace {

using testing::Each;
using testing::HasSubstr;

constexpr uint32_t kBytes = 64 << 10;

// One kvtierd; killed when the object ends.
class Process {
 public:
  Process(std::vector<std::string> arguments, const std::string& log_path) {
    std::array<int, 2> ends{};
    EXPECT_EQ(pipe2(ends.data(), O_CLOEXEC), 0);
    ready_ = UniqueFd(ends[0]);
    // A number far from those of the pipe, so that dup2 always clears close-on-exec.
    const int ready_fd = 200;
    arguments.insert(arguments.begin(), KVTIERD_PATH);
    arguments.push_back("--ready-fd=" + std::to_string(ready_fd));
    std::vector<char*> argv;
    for (std::string& argument : arguments) argv.push_back(argument.data());
    argv.push_back(nullptr);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, log_path.c_str(),
                                     O_WRONLY | O_CREAT | O_TRUNC, 0644);
    posix_spawn_file_actions_adddup2(&actions, STDOUT_FILENO, STDERR_FILENO);
    posix_spawn_file_actions_adddup2(&actions, ends[1], ready_fd);
    EXPECT_EQ(posix_spawn(&pid_, KVTIERD_PATH, &actions, nullptr, argv.data(), environ), 0);
    posix_spawn_file_actions_destroy(&actions);
    close(ends[1]);
  }
  ~Process() {
    if (pid_ > 0) {
      kill(pid_, SIGKILL);
      Wait();
    }
  }
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  // True when it said READY, false when it ended first.
  bool AwaitReady() {
    std::array<char, 16> line{};
    return read(ready_.get(), line.data(), line.size()) == 6 &&
           std::string(line.data()) == "READY\n";
  }
  void Signal(int number) { EXPECT_EQ(kill(pid_, number), 0); }
  // Exit status, or minus the number of the signal that ended it.
  int Wait() {
    int status = 0;
    while (waitpid(pid_, &status, 0) < 0 && errno == EINTR) {
    }
    pid_ = -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }

 private:
  pid_t pid_ = -1;
  UniqueFd ready_;
};

class LifecycleTest : public testing::Test {
 protected:
  std::vector<std::string> Arguments(const std::vector<std::string>& more = {}) const {
    std::vector<std::string> arguments = {
        "--server.run_dir=" + run_dir_,   "--server.data_dir=" + folder_.path() + "/data",
        "--hbm.capacity_bytes=4 MiB",     "--hbm.segment_bytes=1 MiB",
        "--host.capacity_bytes=4 MiB",    "--host.segment_bytes=1 MiB",
        "--nvme.capacity_bytes=64 MiB",   "--nvme.segment_bytes=4 MiB",
        "--server.drain_timeout_ms=10000"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return arguments;
  }

  std::unique_ptr<Process> Run(const std::vector<std::string>& more = {}) const {
    return std::make_unique<Process>(Arguments(more), log_path_);
  }

  std::string LogText() const {
    std::ostringstream text;
    text << std::ifstream(log_path_).rdbuf();
    return text.str();
  }

  mode_t ModeOf(const std::string& name) const {
    struct stat info{};
    EXPECT_EQ(stat((run_dir_ + name).c_str(), &info), 0) << name;
    return info.st_mode & 07777;
  }

  TempFolder folder_;
  const std::string run_dir_ = folder_.path() + "/run";
  const std::string log_path_ = folder_.path() + "/log";
};

TEST_F(LifecycleTest, ModesAreExactUnderAnyUmask) {
  for (const mode_t mask : {0U, 0777U}) {
    const mode_t before = umask(mask);
    const auto process = Run({"--server.socket_mode=0666", "--nvme.enabled=false"});
    umask(before);
    ASSERT_TRUE(process->AwaitReady()) << LogText();
    EXPECT_EQ(ModeOf(""), 0750U);
    EXPECT_EQ(ModeOf("/kvtierd.sock"), 0666U);
    EXPECT_EQ(ModeOf("/handles.sock"), 0666U);
    EXPECT_EQ(ModeOf("/admin.sock"), 0600U);
    process->Signal(SIGINT);
    EXPECT_EQ(process->Wait(), 0) << LogText();
  }
}

TEST_F(LifecycleTest, ASecondDaemonIsRefusedAndTheFirstServesOn) {
  const auto first = Run();
  ASSERT_TRUE(first->AwaitReady()) << LogText();
  Process second(Arguments(), folder_.path() + "/log2");
  EXPECT_FALSE(second.AwaitReady());
  EXPECT_EQ(second.Wait(), 1);
  Process same_data(Arguments({"--server.run_dir=" + folder_.path() + "/run2"}),
                    folder_.path() + "/log3");
  EXPECT_FALSE(same_data.AwaitReady());
  EXPECT_EQ(same_data.Wait(), 1);
  TestClient client(run_dir_);
  client.OpenWithLayout(kBytes);
  EXPECT_THAT(client.Put(TestChain(1, 2)), Each(BlockStatus::kOk));
}

TEST_F(LifecycleTest, StopsInOrderWithStreamsOpen) {
  const auto process = Run();
  ASSERT_TRUE(process->AwaitReady()) << LogText();
  std::vector<std::unique_ptr<TestClient>> clients;
  for (int i = 0; i < 20; ++i) {
    clients.push_back(std::make_unique<TestClient>(run_dir_));
    clients.back()->OpenWithLayout(kBytes);
  }
  // A Write that never goes on, a Read whose chunks nobody takes, and a call that waits.
  TestClient& client = *clients[0];
  const auto keys = TestChain(1, 40);
  client.Put(keys);
  grpc::ClientContext write_context;
  v1::WriteResponse written;
  const auto writer = client.stub().Write(&write_context, &written);
  v1::WriteRequest request;
  *request.mutable_header() = client.Ask<v1::WriteHeader>();
  request.mutable_header()->set_keys(PackKeys(TestChain(2, 2)));
  request.mutable_header()->set_crc32cs(PackTestCrcs(TestChain(2, 2), kBytes));
  ASSERT_TRUE(writer->Write(request));
  auto read = client.Ask<v1::ReadRequest>();
  read.set_keys(PackKeys(keys));
  grpc::ClientContext read_context;
  const auto reader = client.stub().Read(&read_context, read);
  v1::ReadResponse chunk;
  ASSERT_TRUE(reader->Read(&chunk));

  const uint64_t start_ms = MonotonicMs();
  process->Signal(SIGTERM);
  EXPECT_EQ(process->Wait(), 0) << LogText();
  EXPECT_LT(MonotonicMs() - start_ms, 10'000U);
  EXPECT_THAT(LogText(), HasSubstr("memory written to nvme blocks=40"));
  EXPECT_EQ(access((folder_.path() + "/data/policy").c_str(), F_OK), 0) << "what was learned";
  EXPECT_NE(access((run_dir_ + "/kvtierd.sock").c_str(), F_OK), 0);
  EXPECT_FALSE(writer->Finish().ok());
  // Whole or an error, never cut short with OK.
  size_t received_bytes = chunk.chunk().size();
  while (reader->Read(&chunk)) received_bytes += chunk.chunk().size();
  EXPECT_TRUE(!reader->Finish().ok() || received_bytes == 40 * kBytes);
}

TEST_F(LifecycleTest, AfterAKillTheNextOneServesWhatIsOnNvme) {
  auto process = Run();
  ASSERT_TRUE(process->AwaitReady()) << LogText();
  const auto keys = TestChain(1, 8);
  uint64_t first_epoch = 0;
  {
    TestClient client(run_dir_);
    client.OpenWithLayout(kBytes);
    first_epoch = client.epoch;
    client.Put(keys);
    v1::FlushResponse flushed;
    ASSERT_TRUE(client.admin().Flush(TestClient::Deadline().get(), {}, &flushed).ok());
    process->Signal(SIGKILL);
    EXPECT_EQ(process->Wait(), -SIGKILL);
    EXPECT_EQ(client.AwaitStreamEnd().error_code(), grpc::StatusCode::UNAVAILABLE);
  }
  process = Run();
  ASSERT_TRUE(process->AwaitReady()) << LogText();
  TestClient client(run_dir_);
  client.OpenWithLayout(kBytes);
  EXPECT_NE(client.epoch, first_epoch);
  EXPECT_EQ(client.Lookup(keys), std::vector<uint8_t>(8, kResidentNvme));
}

TEST_F(LifecycleTest, TellsSystemd) {
  const std::string path = folder_.path() + "/notify";
  const UniqueFd fd(socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.data(), path.size());
  ASSERT_EQ(bind(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  setenv("NOTIFY_SOCKET", path.c_str(), 1);
  setenv("WATCHDOG_USEC", "60000", 1);
  const auto process = Run({"--nvme.enabled=false"});
  unsetenv("NOTIFY_SOCKET");
  unsetenv("WATCHDOG_USEC");
  ASSERT_TRUE(process->AwaitReady()) << LogText();
  // But for what is to keep the memory of host, before and after.
  const auto receive = [&] {
    std::string text;
    do {
      std::array<char, 256> message{};
      const ssize_t received_bytes = recv(fd.get(), message.data(), message.size(), 0);
      text.assign(message.data(), static_cast<size_t>(std::max<ssize_t>(0, received_bytes)));
    } while (text.starts_with("FDSTORE"));
    return text;
  };
  EXPECT_EQ(receive(), "READY=1");
  for (int i = 0; i < 3; ++i) EXPECT_EQ(receive(), "WATCHDOG=1");
  process->Signal(SIGTERM);
  std::string last;
  do last = receive();
  while (last == "WATCHDOG=1");
  EXPECT_EQ(last, "STOPPING=1");
  EXPECT_EQ(process->Wait(), 0);
}

TEST_F(LifecycleTest, SighupEndsNothingAndSaysSo) {
  const auto process = Run({"--nvme.enabled=false"});
  ASSERT_TRUE(process->AwaitReady()) << LogText();
  process->Signal(SIGHUP);
  process->Signal(SIGTERM);  // the kernel gives out the lower number first
  EXPECT_EQ(process->Wait(), 0);
  EXPECT_NE(LogText().find("SIGHUP does nothing"), std::string::npos) << LogText();
}

TEST_F(LifecycleTest, BadConfigurationExitsWith2AndOneLine) {
  const std::string long_dir = folder_.path() + "/" + std::string(100, 'x');
  const std::pair<std::string, std::string> cases[] = {
      {"--hbm.capacity_bytes=1e30", "hbm.capacity_bytes"},
      {"--hbm.capacity=1", "hbm.capacity: unknown key"},
      {"--hbm.high_watermark=nan", "hbm.high_watermark"},
      {"--nvme.io_engine=aio", "auto | io_uring | pread"},
      {"--config=/does/not/exist.toml", "/does/not/exist.toml"},
      {"--server.run_dir=" + long_dir, "more than 107"},
      {"--ready-fd=x", "--ready-fd"},
      {"serve", "serve: unknown argument"},
  };
  for (const auto& [flag, message] : cases) {
    const auto process = Run({flag});
    EXPECT_EQ(process->Wait(), 2) << flag;
    EXPECT_THAT(LogText(), HasSubstr(message)) << flag;
    const std::string text = LogText();
    EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 1) << text;
  }
}

TEST_F(LifecycleTest, AnswersWithoutServing) {
  EXPECT_EQ(Run({"--check-config"})->Wait(), 0);
  EXPECT_EQ(LogText(), "");
  EXPECT_EQ(Run({"--version"})->Wait(), 0);
  EXPECT_EQ(LogText(), std::string("kvtierd ") + kVersion + "\n");
  EXPECT_EQ(Run({"--print-config"})->Wait(), 0);
  const std::string printed = LogText();
  EXPECT_THAT(printed, HasSubstr("capacity_bytes = \"64 MiB\""));
  const std::string path = folder_.path() + "/printed.toml";
  std::ofstream(path) << printed;
  Process again({"--config", path, "--print-config"}, log_path_);
  EXPECT_EQ(again.Wait(), 0);
  EXPECT_EQ(LogText(), printed);
}

}  // namespace
}  // namespace kvtier
