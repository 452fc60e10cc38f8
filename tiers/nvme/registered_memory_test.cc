// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "tiers/memory/memory_tier.h"
#include "tiers/nvme/io_engine.h"
#include "tiers/nvme/nvme_tier.h"
#include "tiers/nvme/storage.h"
#include "tiers/nvme/worker_pool.h"
#include "tiers/tier_test_util.h"

namespace kvtier::nvme {
namespace {

constexpr uint64_t kPage = 4096;

class RegisteredMemoryTest : public testing::Test {
 protected:
  RegisteredMemoryTest() {
    fd_ = open((folder_.path() + "/file").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    EXPECT_GE(fd_, 0);
  }
  ~RegisteredMemoryTest() override { close(fd_); }

  std::unique_ptr<IoEngine> Engine(const IoEngineOptions& options) {
    auto engine = MakeUringEngine(options);
    if (!engine.ok()) return nullptr;
    return std::move(engine).value();
  }

  // Pages 0, 2 and 3 of `memory`, at `offset_bytes` of the file.
  int64_t Transfer(IoEngine& engine, IoKind kind, std::byte* memory, uint64_t offset_bytes) {
    auto op = std::make_unique<IoOp>();
    op->kind = kind;
    op->fd = fd_;
    op->offset_bytes = offset_bytes;
    op->AddBuffer(memory, kPage);
    op->AddBuffer(memory + 2 * kPage, 2 * kPage);
    engine.Submit(std::move(op));
    std::vector<IoEngine::Completion> completed;
    while (completed.empty()) completed = engine.Wait(1000);
    return completed.front().result;
  }

  // Everything comes back as it was written, and the page between the buffers stays.
  void ExpectRoundTrip(IoEngine& engine) {
    const std::span<std::byte> memory = memory_.bytes();
    for (size_t i = 0; i < memory.size(); ++i) memory[i] = static_cast<std::byte>(i / 7 + i);
    const std::string before(reinterpret_cast<const char*>(memory.data()), memory.size());
    EXPECT_EQ(Transfer(engine, IoKind::kWrite, memory.data(), kPage), int64_t{3 * kPage});
    std::memset(memory.data(), 0, memory.size());
    EXPECT_EQ(Transfer(engine, IoKind::kRead, memory.data(), kPage), int64_t{3 * kPage});
    EXPECT_EQ(std::memcmp(memory.data(), before.data(), kPage), 0);
    EXPECT_EQ(std::memcmp(memory.data() + 2 * kPage, before.data() + 2 * kPage, 2 * kPage), 0);
    EXPECT_EQ(memory[kPage], std::byte{0});
  }

  TempFolder folder_;
  int fd_ = -1;
  PageBuffer memory_{4 * kPage};
};

TEST_F(RegisteredMemoryTest, TransfersInOneAttemptOrInMany) {
  for (const uint64_t attempt_bytes_max : {uint64_t{0}, kPage}) {
    const auto engine = Engine({.attempt_bytes_max = attempt_bytes_max});
    if (engine == nullptr) GTEST_SKIP() << "no io_uring here";
    engine->RegisterMemory(memory_.bytes());
    ExpectRoundTrip(*engine);
    engine->UnregisterMemory(memory_.bytes());
    ExpectRoundTrip(*engine);
  }
}

TEST_F(RegisteredMemoryTest, SaysHowMuchAReadPastTheEndGave) {
  const auto engine = Engine({});
  if (engine == nullptr) GTEST_SKIP() << "no io_uring here";
  engine->RegisterMemory(memory_.bytes());
  ASSERT_EQ(ftruncate(fd_, 2 * kPage), 0);
  EXPECT_EQ(Transfer(*engine, IoKind::kRead, memory_.bytes().data(), 0), int64_t{2 * kPage});
  EXPECT_EQ(Transfer(*engine, IoKind::kRead, memory_.bytes().data(), 4 * kPage), 0);
}

TEST_F(RegisteredMemoryTest, ReportsAnErrorOfAnyPart) {
  const auto engine = Engine({});
  if (engine == nullptr) GTEST_SKIP() << "no io_uring here";
  engine->RegisterMemory(memory_.bytes());
  close(fd_);
  fd_ = open((folder_.path() + "/file").c_str(), O_RDONLY | O_CLOEXEC);
  EXPECT_EQ(Transfer(*engine, IoKind::kWrite, memory_.bytes().data(), 0), -EBADF);
}

TEST_F(RegisteredMemoryTest, FallsBackRungByRungAndSaysWhy) {
  const auto best = Engine({});
  if (best == nullptr) GTEST_SKIP() << "no io_uring here";
  const auto plain = Engine({.fast_setup_error = EPERM});
  ASSERT_NE(plain, nullptr);
  EXPECT_NE(plain->Description().find("without deferred completions: Operation not permitted"),
            std::string::npos)
      << plain->Description();
  ExpectRoundTrip(*plain);
  const auto unregistered = Engine({.registration_error = ENOMEM});
  ASSERT_NE(unregistered, nullptr);
  EXPECT_NE(unregistered->Description().find("without registered memory: Cannot allocate memory"),
            std::string::npos)
      << unregistered->Description();
  unregistered->RegisterMemory(memory_.bytes());
  ExpectRoundTrip(*unregistered);
  unregistered->UnregisterMemory(memory_.bytes());
  EXPECT_TRUE(absl::IsUnavailable(
      MakeUringEngine({.fast_setup_error = ENOSYS, .plain_setup_error = ENOSYS}).status()));
}

TEST_F(RegisteredMemoryTest, ServesMemoryThatComesAndGoes) {
  auto nvme = NvmeTier::Create({.dir = folder_.path() + "/nvme",
                                .capacity_bytes = 64ULL << 20,
                                .segment_bytes = 4ULL << 20});
  ASSERT_TRUE(nvme.ok()) << nvme.status();
  ASSERT_TRUE((*nvme)->Recover([](const BlockMeta&, ReplicaId) {}).ok());
  // Odd sizes have a last page that is not the slot's own transfer; the small one is checked by the
  // I/O thread, the others by the pool.
  for (const uint32_t payload_bytes : {5000u, 65536u, 300001u}) {
    MemoryTier::Options options;
    options.capacity_bytes = 8ULL << 20;
    options.segment_bytes = 2ULL << 20;
    options.observers = {&(*nvme)->memory_observer()};
    auto host = MemoryTier::Create(options);
    ASSERT_TRUE(host.ok()) << host.status();
    const TestBlock block = MakeBlock(payload_bytes, payload_bytes);
    const auto source = (*host)->Reserve(payload_bytes, /*owner=*/0);
    const auto target = (*host)->Reserve(payload_bytes, /*owner=*/1);
    ASSERT_TRUE(source.ok() && target.ok());
    const std::span<std::byte> from = (*host)->Mapped(*source);
    std::memcpy(from.data(), block.payload.bytes().data(), payload_bytes);
    const auto replica = (*nvme)->Reserve(payload_bytes, 0);
    ASSERT_TRUE(replica.ok()) << replica.status();
    ASSERT_TRUE(WriteAndWait(**nvme, *replica, block.meta, from).ok());
    const std::span<std::byte> to = (*host)->Mapped(*target);
    ASSERT_TRUE(ReadAndWait(**nvme, *replica, block.meta, to).ok());
    EXPECT_EQ(std::memcmp(to.data(), from.data(), payload_bytes), 0);
    BlockMeta other = block.meta;
    ++other.crc32c;
    EXPECT_TRUE(absl::IsDataLoss(ReadAndWait(**nvme, *replica, other, to)));
  }
  // The memory outlives the tier's use of it.
  MemoryTier::Options options;
  options.capacity_bytes = 2ULL << 20;
  options.segment_bytes = 2ULL << 20;
  options.observers = {&(*nvme)->memory_observer()};
  auto host = MemoryTier::Create(options);
  ASSERT_TRUE(host.ok() && (*host)->Reserve(4096, 0).ok());
  (*nvme)->Close();
  host->reset();
}

// Registers memory when it is allowed to.
class Gate {
 public:
  void Allow(int count) {
    absl::MutexLock lock(&mutex_);
    allowed_count_ += count;
  }
  void Pass(std::span<std::byte> memory) {
    absl::MutexLock lock(&mutex_);
    ++come_count_;
    mutex_.Await(
        absl::Condition(+[](int* allowed_count) { return *allowed_count > 0; }, &allowed_count_));
    --allowed_count_;
    passed_.push_back(memory.data());
  }
  // Until so many, those that passed among them, have come.
  void AwaitCome(int count) {
    absl::MutexLock lock(&mutex_);
    const auto reached = [this, count]()
                             ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return come_count_ >= count; };
    mutex_.Await(absl::Condition(&reached));
  }
  void CountWake() {
    absl::MutexLock lock(&mutex_);
    ++wake_count_;
  }
  void AwaitWakes(int count) {
    absl::MutexLock lock(&mutex_);
    const auto reached = [this, count]()
                             ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return wake_count_ >= count; };
    mutex_.Await(absl::Condition(&reached));
  }
  std::vector<std::byte*> passed() {
    absl::MutexLock lock(&mutex_);
    return passed_;
  }

 private:
  absl::Mutex mutex_;
  // The tier's own buffers at first.
  int allowed_count_ ABSL_GUARDED_BY(mutex_) = 1;
  int come_count_ ABSL_GUARDED_BY(mutex_) = 0;
  int wake_count_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<std::byte*> passed_ ABSL_GUARDED_BY(mutex_);
};

class GatedEngine final : public IoEngine {
 public:
  GatedEngine(std::unique_ptr<IoEngine> engine, Gate* gate)
      : engine_(std::move(engine)), gate_(gate) {}
  std::string_view name() const override { return engine_->name(); }
  void Submit(std::unique_ptr<IoOp> op) override { engine_->Submit(std::move(op)); }
  std::vector<Completion> Wait(int timeout_ms) override { return engine_->Wait(timeout_ms); }
  void Wake() override {
    engine_->Wake();
    gate_->CountWake();
  }
  void RegisterMemory(std::span<std::byte> memory) override { gate_->Pass(memory); }

 private:
  const std::unique_ptr<IoEngine> engine_;
  Gate* const gate_;
};

class GatedStorage final : public Storage {
 public:
  explicit GatedStorage(Gate* gate) : gate_(gate) {}
  std::unique_ptr<IoEngine> WrapEngine(std::unique_ptr<IoEngine> engine) override {
    return std::make_unique<GatedEngine>(std::move(engine), gate_);
  }

 private:
  Gate* const gate_;
};

TEST(MemoryOrderTest, MemoryThatLeavesGoesBeforeMemoryThatComes) {
  const TempFolder folder;
  Gate gate;
  GatedStorage storage(&gate);
  auto nvme = NvmeTier::Create({.dir = folder.path() + "/nvme",
                                .capacity_bytes = 64ULL << 20,
                                .segment_bytes = 4ULL << 20,
                                .storage = &storage});
  ASSERT_TRUE(nvme.ok()) << nvme.status();
  SegmentObserver& observer = (*nvme)->memory_observer();
  std::vector<PageBuffer> memory;
  for (int i = 0; i < 3; ++i) memory.emplace_back(kPage);
  observer.OnMapped(memory[0].bytes());
  gate.AwaitCome(2);
  observer.OnMapped(memory[1].bytes());
  observer.OnMapped(memory[2].bytes());
  std::jthread leaving([&] { observer.OnUnmapping(memory[2].bytes()); });
  gate.AwaitWakes(4);
  // The second would wait for ever.
  gate.Allow(1);
  leaving.join();
  gate.Allow(10);
  (*nvme)->Close();
  const std::vector<std::byte*> passed = gate.passed();
  ASSERT_GE(passed.size(), 2U);
  EXPECT_EQ(passed[1], memory[0].bytes().data());
  EXPECT_EQ(std::ranges::count(passed, memory[2].bytes().data()), 0);
  // Its threads are gone.
  observer.OnMapped(memory[2].bytes());
  observer.OnUnmapping(memory[2].bytes());
}

TEST(WorkerPoolTest, DoesAllThatWasSubmitted) {
  std::atomic<int> count = 0;
  {
    WorkerPool pool(3);
    for (int i = 0; i < 1000; ++i) pool.Submit([&] { ++count; });
  }
  EXPECT_EQ(count, 1000);
}

}  // namespace
}  // namespace kvtier::nvme
