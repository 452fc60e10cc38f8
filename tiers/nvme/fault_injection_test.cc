// SPDX-License-Identifier: Apache-2.0
#include "tiers/nvme/fault_injection.h"

#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>
#include <utility>

#include "tiers/nvme/nvme_test_util.h"
#include "tiers/nvme/storage.h"

namespace kvtier {
namespace {

class FaultInjectionTest : public NvmeTierTest {
 protected:
  ~FaultInjectionTest() override { Close(); }
  // With these faults from now on, counted from here.
  void OpenWith(const std::string& rules) {
    Close();
    auto storage = nvme::MakeFaultyStorage(rules, options_.dir);
    ASSERT_TRUE(storage.ok()) << storage.status();
    storage_ = std::move(storage).value();
    options_.storage = storage_.get();
    Open();
  }
  absl::StatusCode ReadCode(uint64_t seed) {
    const Held& held = held_.at(seed);
    return ReadAndCompare(*tier_, held.replica, held.block).code();
  }

  std::unique_ptr<nvme::Storage> storage_;
};

TEST_F(FaultInjectionTest, AnErrorStrikesTheWritesThatItNames) {
  // Zeros for a segment of one chunk, its header, the first record; then this one.
  OpenWith("write 4 EIO");
  PutMany(1, 5000);
  EXPECT_EQ(Put(5000).code(), absl::StatusCode::kUnavailable);
  AwaitDegraded(false);
  PutMany(3, 5000);
  ExpectAllReadable();
  OpenWith("");
  ExpectAllReadable();
}

TEST_F(FaultInjectionTest, EveryOperationFrom) {
  OpenWith("sync 2- EROFS");
  PutMany(1, 5000);
  EXPECT_EQ(Put(5000).code(), absl::StatusCode::kUnavailable);
  AwaitDegraded(true);
  ExpectAllReadable();
}

TEST_F(FaultInjectionTest, BadReadsAreMisses) {
  Open();
  PutMany(4, 50000);
  OpenWith("read 1 corrupt; read 2 short; read 3-4 EIO");
  EXPECT_EQ(ReadCode(1), absl::StatusCode::kDataLoss);
  EXPECT_EQ(ReadCode(2), absl::StatusCode::kDataLoss);
  EXPECT_EQ(ReadCode(3), absl::StatusCode::kUnavailable);
  EXPECT_EQ(ReadCode(4), absl::StatusCode::kUnavailable);
  ExpectAllReadable();
}

TEST_F(FaultInjectionTest, ATornWriteSaysThatItIsThere) {
  OpenWith("write 3 torn");
  PutMany(2, 50000);
  EXPECT_EQ(ReadCode(1), absl::StatusCode::kDataLoss);
  EXPECT_EQ(ReadCode(2), absl::StatusCode::kOk);
}

TEST_F(FaultInjectionTest, ASlowReadIsAReadThatTakesLonger) {
  Open();
  PutMany(1, 50000);
  OpenWith("read 1 slow 30");
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_EQ(ReadCode(1), absl::StatusCode::kOk);
  EXPECT_GE(std::chrono::steady_clock::now() - begin, std::chrono::milliseconds(30));
}

TEST_F(FaultInjectionTest, TheDiskIsFullAtAByte) {
  // One segment is allocated and written over, another one is not.
  OpenWith("full " + std::to_string(3 * kTestSegmentBytes));
  absl::Status status;
  while ((status = Put(50000)).ok()) {
  }
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  AwaitDegraded(true);
  EXPECT_GE(held_.size(), 15U);
  ExpectAllReadable();
}

TEST_F(FaultInjectionTest, TheIndexFindsTheDiskFull) {
  OpenWith("index 30 full");
  absl::Status status;
  while ((status = Put(1000)).ok()) ASSERT_LT(held_.size(), 100U);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  AwaitDegraded(true);
  ExpectAllReadable();
}

TEST(FaultInjectionRulesTest, NamesTheRuleThatItDoesNotKnow) {
  for (const char* rules :
       {"write 0 EIO", "write EIO", "write 3", "write 3 EPERM", "write 5-3 EIO", "write x EIO",
        "read 3 torn", "write 3 corrupt", "write 3 short", "read 3 slow", "read 3 slow x",
        "erase 1 EIO", "full", "full x", "index 3", "sync 0 power-off", "read 1 EIO now",
        "sync 3 power-off; read 1 EIO"}) {
    const auto storage = nvme::MakeFaultyStorage(rules, "/nowhere/nvme");
    EXPECT_EQ(storage.status().code(), absl::StatusCode::kInvalidArgument) << rules;
  }
  const auto storage = nvme::MakeFaultyStorage("read 1 EIO; read 2 torn", "/nowhere/nvme");
  EXPECT_NE(storage.status().message().find("\" read 2 torn\""), std::string::npos)
      << storage.status();
  EXPECT_TRUE(nvme::MakeFaultyStorage(" ; ", "/nowhere/nvme").ok());
}

}  // namespace
}  // namespace kvtier
