// SPDX-License-Identifier: Apache-2.0
#include "daemon/fd_store.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <string>

#include "daemon/unix_socket.h"
#include "tiers/tier_test_util.h"

namespace kvtier {
namespace {

bool SameFile(int a, int b) {
  return pwrite(a, "x", 1, 7) == 1 && lseek(b, 0, SEEK_END) == 8 && ftruncate(a, 0) == 0;
}

// systemd's end of NOTIFY_SOCKET.
class FdStoreTest : public testing::Test {
 protected:
  void SetUp() override {
    const std::string path = folder_.path() + "/notify";
    socket_ = UniqueFd(socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path, path.data(), path.size());
    ASSERT_EQ(bind(socket_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
    setenv("NOTIFY_SOCKET", path.c_str(), 1);
  }
  void TearDown() override { unsetenv("NOTIFY_SOCKET"); }

  std::string Receive(UniqueFd* fd) {
    std::array<std::byte, 256> message;
    const auto got = ReceiveWithFd(socket_.get(), message, fd);
    EXPECT_TRUE(got.ok()) << got.status();
    return {reinterpret_cast<const char*>(message.data()), got.ok() ? *got : 0};
  }

  TempFolder folder_;
  UniqueFd socket_;
};

TEST_F(FdStoreTest, SpeaksSystemdsProtocol) {
  SystemdFdStore store({});
  const UniqueFd file(memfd_create("x", MFD_CLOEXEC));
  ASSERT_TRUE(store.Keep("kvtier-host-segment-1-2", file.get()).ok());
  UniqueFd kept;
  EXPECT_EQ(Receive(&kept), "FDSTORE=1\nFDNAME=kvtier-host-segment-1-2");
  ASSERT_TRUE(kept.valid());
  EXPECT_TRUE(SameFile(file.get(), kept.get()));
  ASSERT_TRUE(store.Forget("kvtier-host-segment-1-2").ok());
  UniqueFd none;
  EXPECT_EQ(Receive(&none), "FDSTOREREMOVE=1\nFDNAME=kvtier-host-segment-1-2");
  EXPECT_FALSE(none.valid());
}

TEST_F(FdStoreTest, TakesWhatItWasStartedWithAndLeavesTheRest) {
  // Three descriptors in a row, far from those in use.
  constexpr int kFirst = 300;
  for (int i = 0; i < 3; ++i) {
    const UniqueFd file(memfd_create("x", 0));
    ASSERT_EQ(dup2(file.get(), kFirst + i), kFirst + i);
  }
  const auto set = [](pid_t pid) {
    setenv("LISTEN_PID", std::to_string(pid).c_str(), 1);
    setenv("LISTEN_FDS", "3", 1);
    setenv("LISTEN_FDNAMES", "kvtier-host-index-1-2:kvtierd.socket:kvtier-host-segment-1-3", 1);
  };
  set(getpid() + 1);
  EXPECT_TRUE(SystemdFdStore::TakeStarted(kFirst).empty()) << "meant for another process";
  EXPECT_EQ(std::getenv("LISTEN_FDS"), nullptr);
  set(getpid());
  std::vector<KeptFd> started = SystemdFdStore::TakeStarted(kFirst);
  EXPECT_EQ(std::getenv("LISTEN_PID"), nullptr);
  ASSERT_EQ(started.size(), 2u);
  EXPECT_EQ(started[0].name, "kvtier-host-index-1-2");
  EXPECT_EQ(started[0].fd, kFirst);
  EXPECT_EQ(started[1].name, "kvtier-host-segment-1-3");
  EXPECT_EQ(started[1].fd, kFirst + 2);
  EXPECT_NE(fcntl(kFirst, F_GETFD) & FD_CLOEXEC, 0);
  {
    SystemdFdStore store(std::move(started));
    const std::vector<KeptFd> taken = *store.TakeKept();
    EXPECT_EQ(taken.size(), 2u);
    EXPECT_TRUE(store.TakeKept()->empty()) << "each once";
    close(taken[0].fd);
    SystemdFdStore unwanted({taken[1]});
  }
  EXPECT_EQ(fcntl(kFirst + 2, F_GETFD), -1) << "closed by who did not take it";
  EXPECT_NE(fcntl(kFirst + 1, F_GETFD), -1) << "a socket is somebody else's";
  close(kFirst + 1);
}

}  // namespace
}  // namespace kvtier
