// SPDX-License-Identifier: Apache-2.0
#include "tiers/nvme/io_engine.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <string>
#include <thread>

#include "tiers/tier_test_util.h"

namespace kvtier::nvme {
namespace {

IoOp ThreeBuffers(IoKind kind, char* data) {
  IoOp op;
  op.kind = kind;
  op.AddBuffer(data, 10);
  op.AddBuffer(data + 10, 20);
  op.AddBuffer(data + 30, 5);
  return op;
}

TEST(IoOpTest, ContinuesAfterShortTransfersAtTheRightByte) {
  char data[35];
  IoOp op = ThreeBuffers(IoKind::kRead, data);
  EXPECT_EQ(op.total_bytes, 35u);
  EXPECT_EQ(op.Advance(4), std::nullopt);
  EXPECT_EQ(op.buffers[op.first_buffer].iov_base, data + 4);
  EXPECT_EQ(op.buffers[op.first_buffer].iov_len, 6u);
  EXPECT_EQ(op.Advance(16), std::nullopt);
  EXPECT_EQ(op.first_buffer, 1);
  EXPECT_EQ(op.buffers[op.first_buffer].iov_base, data + 20);
  EXPECT_EQ(op.Advance(10), std::nullopt);
  EXPECT_EQ(op.first_buffer, 2);
  EXPECT_EQ(op.Advance(5), 35);
}

TEST(IoOpTest, RetriesInterruptionsAndBoundsEagain) {
  char data[35];
  IoOp op = ThreeBuffers(IoKind::kWrite, data);
  EXPECT_EQ(op.Advance(-EINTR), std::nullopt);
  EXPECT_EQ(op.Advance(20), std::nullopt);
  int attempt_count = 0;
  std::optional<int64_t> result;
  while (!result) {
    result = op.Advance(-EAGAIN);
    ASSERT_LT(++attempt_count, 100000);
  }
  EXPECT_EQ(*result, -EAGAIN);
}

TEST(IoOpTest, EndsAtTheEndOfTheFileAndOnErrors) {
  char data[35];
  IoOp read = ThreeBuffers(IoKind::kRead, data);
  EXPECT_EQ(read.Advance(12), std::nullopt);
  EXPECT_EQ(read.Advance(0), 12);
  IoOp write = ThreeBuffers(IoKind::kWrite, data);
  EXPECT_EQ(write.Advance(0), -EIO) << "a write that moves nothing makes no progress";
  IoOp failed = ThreeBuffers(IoKind::kWrite, data);
  EXPECT_EQ(failed.Advance(12), std::nullopt);
  EXPECT_EQ(failed.Advance(-ENOSPC), -ENOSPC);
  IoOp sync;
  sync.kind = IoKind::kSync;
  EXPECT_EQ(sync.Advance(0), 0);
}

using MakeEngine = absl::StatusOr<std::unique_ptr<IoEngine>> (*)(const IoEngineOptions&);

class IoEngineTest : public testing::TestWithParam<MakeEngine> {
 protected:
  void SetUp() override {
    fd_ = open((folder_.path() + "/file").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    ASSERT_GE(fd_, 0);
  }
  void TearDown() override { close(fd_); }

  std::unique_ptr<IoEngine> Make(uint64_t attempt_bytes_max = 0) {
    auto engine = GetParam()({.queue_depth = 4, .attempt_bytes_max = attempt_bytes_max});
    EXPECT_TRUE(engine.ok()) << engine.status();
    return std::move(engine).value();
  }
  int64_t Run(IoEngine& engine, IoKind kind, std::span<std::byte> bytes, uint64_t offset_bytes) {
    auto op = std::make_unique<IoOp>();
    op->kind = kind;
    op->fd = fd_;
    op->offset_bytes = offset_bytes;
    if (kind == IoKind::kAllocate) op->total_bytes = bytes.size();
    if (kind == IoKind::kRead || kind == IoKind::kWrite) {
      op->AddBuffer(bytes.data(), bytes.size() / 2);
      op->AddBuffer(bytes.data() + bytes.size() / 2, bytes.size() - bytes.size() / 2);
    }
    engine.Submit(std::move(op));
    while (true) {
      auto completed = engine.Wait(10000);
      if (!completed.empty()) return completed[0].result;
    }
  }

  TempFolder folder_;
  int fd_ = -1;
};

TEST_P(IoEngineTest, MovesEverythingInShortAttempts) {
  auto engine = Make(4096);
  TestBlock block = MakeBlock(3, 50000);
  EXPECT_EQ(Run(*engine, IoKind::kAllocate, block.payload.bytes(), 0), 0);
  EXPECT_EQ(Run(*engine, IoKind::kWrite, block.payload.bytes(), 100), 50000);
  EXPECT_EQ(Run(*engine, IoKind::kSync, {}, 0), 0);
  std::vector<std::byte> target(50000);
  EXPECT_EQ(Run(*engine, IoKind::kRead, target, 100), 50000);
  EXPECT_TRUE(std::equal(target.begin(), target.end(), block.payload.bytes().begin()));
  EXPECT_EQ(Run(*engine, IoKind::kRead, target, 50000), 100) << "past the end of the file";
}

TEST_P(IoEngineTest, ReportsErrors) {
  auto engine = Make();
  close(fd_);
  fd_ = open((folder_.path() + "/file").c_str(), O_RDONLY | O_CLOEXEC);
  std::vector<std::byte> bytes(100);
  EXPECT_EQ(Run(*engine, IoKind::kWrite, bytes, 0), -EBADF);
}

TEST_P(IoEngineTest, WakeEndsWait) {
  auto engine = Make();
  for (int round = 0; round < 3; ++round) {
    std::jthread waker([&engine] { engine->Wake(); });
    EXPECT_TRUE(engine->Wait(60000).empty());
  }
}

// Of the calling thread.
void RefuseSystemCall(uint32_t number) {
  std::array<sock_filter, 4> filter = {{
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, number, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  }};
  const sock_fprog program{.len = filter.size(), .filter = filter.data()};
  ASSERT_EQ(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
  ASSERT_EQ(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program), 0);
}

TEST(UringEngineTest, IsRefusedWhereItCouldBeMadeButNotUsed) {
  absl::Status status;
  std::jthread([&] {
    RefuseSystemCall(SYS_io_uring_enter);
    status = MakeUringEngine({}).status();
  }).join();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
}

INSTANTIATE_TEST_SUITE_P(Engines, IoEngineTest, testing::Values(&MakeUringEngine, &MakePreadEngine),
                         [](const auto& engine) {
                           return engine.index == 0 ? "IoUring" : "Pread";
                         });

}  // namespace
}  // namespace kvtier::nvme
