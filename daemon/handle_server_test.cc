// SPDX-License-Identifier: Apache-2.0
#include "daemon/handle_server.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "proto/base/status_util.h"

namespace kvtier {
namespace {

constexpr uint64_t kEpoch = 42;

struct ReceivedReply {
  bool closed = false;
  HandleReply reply;
  UniqueFd segment_fd;
};

// A peer of the handle socket.
class Peer {
 public:
  explicit Peer(const std::string& path) : fd_(socket(AF_UNIX, SOCK_SEQPACKET, 0)) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path, path.data(), path.size());
    EXPECT_EQ(connect(fd_.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0)
        << strerror(errno);
    // A lost answer fails the test instead of hanging it.
    const timeval patience{.tv_sec = 10, .tv_usec = 0};
    setsockopt(fd_.get(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
  }

  void SendBytes(const void* bytes, size_t count) {
    EXPECT_EQ(send(fd_.get(), bytes, count, MSG_NOSIGNAL), static_cast<ssize_t>(count));
  }

  ReceivedReply Receive() {
    ReceivedReply received;
    iovec payload{.iov_base = &received.reply, .iov_len = sizeof(received.reply)};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    msghdr message{};
    message.msg_iov = &payload;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    const ssize_t got = recvmsg(fd_.get(), &message, MSG_CMSG_CLOEXEC);
    received.closed = got == 0 || (got < 0 && errno == ECONNRESET);
    EXPECT_TRUE(received.closed || got == sizeof(HandleReply)) << got << " " << strerror(errno);
    if (const cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(header), sizeof(fd));
      received.segment_fd = UniqueFd(fd);
    }
    return received;
  }

  ReceivedReply Ask(const HandleRequest& request) {
    SendBytes(&request, sizeof(request));
    return Receive();
  }

  std::string Hello() {
    const ReceivedReply answer = Ask({.kind = HandleRequestKind::kHello});
    EXPECT_EQ(answer.reply.status, HandleStatus::kOk);
    EXPECT_EQ(answer.reply.epoch, kEpoch);
    return std::string(reinterpret_cast<const char*>(answer.reply.token),
                       sizeof(answer.reply.token));
  }

  void Disconnect() { fd_.Reset(); }

 private:
  UniqueFd fd_;
};

constexpr HandleRequest kSegment{.kind = HandleRequestKind::kGetSegment, .tier = 2};

class HandleServerTest : public testing::Test {
 protected:
  void Start(uint32_t connections_max = 16, uint64_t token_lifetime_ms = 30'000, Config config = {},
             uid_t daemon_uid = getuid(), mode_t socket_mode = 0640) {
    path_ = absl::StrFormat("%s/kvtier-handles-%d.sock", testing::TempDir(), getpid());
    tenants_ = std::make_unique<TenantTable>(config, daemon_uid);
    auto server = HandleServer::Start(
        {.socket_path = path_,
         .socket_mode = socket_mode,
         .epoch = kEpoch,
         .connections_max = connections_max,
         .token_lifetime_ms = token_lifetime_ms},
        tenants_.get(),
        {.export_segment = [](TierId tier, uint32_t idx,
                              bool writable) { return Export(tier, idx, writable); },
         .on_session_gone =
             [this](uint64_t session) {
               absl::MutexLock lock(&mutex_);
               gone_.push_back(session);
             }});
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = std::move(server).value();
  }

  void TearDown() override {
    server_.reset();
    unlink(path_.c_str());
  }

  // Segment 0 is of tenant 0, segment 1 of another.
  static absl::StatusOr<SegmentHandle> Export(TierId, uint32_t idx, bool) {
    if (idx > 1) return NotFound("no segment %d", idx);
    const int fd = memfd_create("handle-test", MFD_CLOEXEC);
    EXPECT_EQ(ftruncate(fd, 8192), 0);
    return SegmentHandle{.fd = fd, .segment_bytes = 8192, .owner = idx};
  }

  std::vector<uint64_t> AwaitGone(size_t count) {
    absl::MutexLock lock(&mutex_);
    const auto enough = [&] { return gone_.size() >= count; };
    mutex_.AwaitWithTimeout(absl::Condition(&enough), absl::Seconds(10));
    return gone_;
  }

  std::string path_;
  std::unique_ptr<TenantTable> tenants_;
  std::unique_ptr<HandleServer> server_;
  absl::Mutex mutex_;
  std::vector<uint64_t> gone_;
};

TEST_F(HandleServerTest, SocketHasExactlyTheModeAsked) {
  const mode_t before = umask(0);
  Start();
  umask(before);
  struct stat info{};
  ASSERT_EQ(stat(path_.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 07777, 0640U);
}

TEST_F(HandleServerTest, TokenWorksOnceAndOnlyWhileConnected) {
  Start();
  Peer peer(path_);
  const std::string token = peer.Hello();
  EXPECT_FALSE(server_->ClaimToken(std::string(16, '\0')).has_value());
  EXPECT_FALSE(server_->ClaimToken("short").has_value());
  const auto claim = server_->ClaimToken(token);
  ASSERT_TRUE(claim.has_value());
  EXPECT_EQ(claim->owner, 0U);
  EXPECT_FALSE(server_->ClaimToken(token).has_value());
  EXPECT_TRUE(server_->Bind(claim->connection, 7, nullptr));
  peer.Disconnect();
  EXPECT_EQ(AwaitGone(1), std::vector<uint64_t>{7});
  EXPECT_FALSE(server_->Bind(claim->connection, 8, nullptr));
}

TEST_F(HandleServerTest, TokenExpires) {
  Start(16, 0);
  Peer peer(path_);
  EXPECT_FALSE(server_->ClaimToken(peer.Hello()).has_value());
}

TEST_F(HandleServerTest, NewHelloReplacesTheToken) {
  Start();
  Peer peer(path_);
  const std::string first = peer.Hello();
  const std::string second = peer.Hello();
  EXPECT_NE(first, second);
  EXPECT_FALSE(server_->ClaimToken(first).has_value());
  EXPECT_TRUE(server_->ClaimToken(second).has_value());
}

TEST_F(HandleServerTest, SegmentsOfTheTenantAreForItsSessionsOnly) {
  Start();
  Peer peer(path_);
  EXPECT_EQ(peer.Ask(kSegment).reply.status, HandleStatus::kNoSegment);
  const auto claim = server_->ClaimToken(peer.Hello());
  ASSERT_TRUE(server_->Bind(claim->connection, 7, nullptr));
  const ReceivedReply own = peer.Ask(kSegment);
  EXPECT_EQ(own.reply.status, HandleStatus::kOk);
  EXPECT_EQ(own.reply.segment_bytes, 8192U);
  struct stat info{};
  ASSERT_TRUE(own.segment_fd.valid());
  EXPECT_EQ(fstat(own.segment_fd.get(), &info), 0);
  EXPECT_EQ(info.st_size, 8192);

  HandleRequest other = kSegment;
  other.segment_idx = 1;
  const ReceivedReply refused = peer.Ask(other);
  EXPECT_EQ(refused.reply.status, HandleStatus::kNoSegment);
  EXPECT_FALSE(refused.segment_fd.valid());
}

TEST_F(HandleServerTest, ATicketBoardIsForItsSessionAndForReading) {
  Start();
  constexpr HandleRequest kBoard{.kind = HandleRequestKind::kGetBoard};
  Peer stranger(path_);
  EXPECT_EQ(stranger.Ask(kBoard).reply.status, HandleStatus::kBadRequest);
  Peer peer(path_);
  const auto claim = server_->ClaimToken(peer.Hello());
  auto board = TicketBoard::Create();
  ASSERT_TRUE(board.ok()) << board.status();
  ASSERT_TRUE(server_->Bind(claim->connection, 7, *board));
  const ReceivedReply own = peer.Ask(kBoard);
  ASSERT_EQ(own.reply.status, HandleStatus::kOk);
  ASSERT_EQ(own.reply.segment_bytes, sizeof(TicketBoardPage));
  void* const base =
      mmap(nullptr, sizeof(TicketBoardPage), PROT_READ, MAP_SHARED, own.segment_fd.get(), 0);
  ASSERT_NE(base, MAP_FAILED);
  const auto* const page = static_cast<const TicketBoardPage*>(base);
  EXPECT_TRUE(page->IsValid());
  (*board)->page().Show(3, 0xABCD'0000'0005, {.done = true, .moved_block_count = 9});
  EXPECT_EQ(page->Find(3, 0xABCD'0000'0005), (TicketProgress{true, 9}));
  munmap(base, sizeof(TicketBoardPage));
  // Nor may it be written, mapped to be written, or cut.
  EXPECT_EQ(mmap(nullptr, 4096, PROT_WRITE, MAP_SHARED, own.segment_fd.get(), 0), MAP_FAILED);
  EXPECT_NE(ftruncate(own.segment_fd.get(), 0), 0);
  // A session may have none.
  Peer other(path_);
  const auto without = server_->ClaimToken(other.Hello());
  ASSERT_TRUE(server_->Bind(without->connection, 8, nullptr));
  EXPECT_EQ(other.Ask(kBoard).reply.status, HandleStatus::kBadRequest);
  EXPECT_EQ(other.Ask(kSegment).reply.status, HandleStatus::kOk) << "it goes on";
}

TEST_F(HandleServerTest, GarbageIsAnsweredAndClosed) {
  Start();
  const char garbage[100] = "not a request";
  for (const size_t count : {size_t{1}, sizeof(HandleRequest) - 1, sizeof(HandleRequest) + 1,
                             sizeof(HandleRequest), sizeof(garbage)}) {
    Peer peer(path_);
    peer.SendBytes(garbage, count);
    const HandleStatus status = peer.Receive().reply.status;
    EXPECT_TRUE(status == HandleStatus::kBadRequest || status == HandleStatus::kVersionMismatch);
    EXPECT_TRUE(peer.Receive().closed);
  }
  Peer peer(path_);
  EXPECT_EQ(peer.Ask({.version = kHandleWireVersion + 1}).reply.status,
            HandleStatus::kVersionMismatch);
  EXPECT_TRUE(peer.Receive().closed);
}

TEST_F(HandleServerTest, GarbageOfAProcessWithASessionDoesNotFreeItsSlots) {
  Start();
  Peer peer(path_);
  const auto claim = server_->ClaimToken(peer.Hello());
  ASSERT_TRUE(server_->Bind(claim->connection, 7, nullptr));
  for (const size_t count : {size_t{1}, size_t{0}}) {  // an empty message is no end of the process
    peer.SendBytes("x", count);
    EXPECT_EQ(peer.Receive().reply.status, HandleStatus::kBadRequest);
  }
  EXPECT_EQ(peer.Ask({.kind = HandleRequestKind::kHello}).reply.status, HandleStatus::kBadRequest);
  EXPECT_EQ(peer.Ask(kSegment).reply.status, HandleStatus::kOk);
  {
    absl::MutexLock lock(&mutex_);
    EXPECT_TRUE(gone_.empty());
  }
  peer.Disconnect();
  EXPECT_EQ(AwaitGone(1), std::vector<uint64_t>{7});
}

TEST_F(HandleServerTest, OneTooManyIsRefused) {
  Start(1);
  Peer first(path_);
  first.Hello();
  Peer second(path_);
  EXPECT_EQ(second.Receive().reply.status, HandleStatus::kLimitReached);
  EXPECT_TRUE(second.Receive().closed);
}

TEST_F(HandleServerTest, SilentConnectionsDoNotKeepOthersOut) {
  Start(2, 0);
  Peer silent(path_);
  Peer greeted(path_);
  greeted.Hello();
  Peer third(path_);
  third.Hello();
  EXPECT_TRUE(silent.Receive().closed);
}

TEST_F(HandleServerTest, StrangersAreForbidden) {
  // Root always has a tenant: it connects as somebody else.
  const bool is_root = geteuid() == 0;
  const uid_t stranger = is_root ? 65534 : geteuid();
  Start(16, 30'000, {}, stranger + 1, 0666);
  if (is_root) {
    ASSERT_EQ(seteuid(stranger), 0);
  }
  Peer peer(path_);
  if (is_root) {
    ASSERT_EQ(seteuid(0), 0);
  }
  EXPECT_EQ(peer.Receive().reply.status, HandleStatus::kForbidden);
  EXPECT_TRUE(peer.Receive().closed);
}

TEST_F(HandleServerTest, PathThatDoesNotFitIsAConfigError) {
  const TenantTable tenants({}, getuid());
  const auto server =
      HandleServer::Start({.socket_path = "/tmp/" + std::string(103, 'x')}, &tenants, {});
  EXPECT_EQ(server.status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace kvtier
