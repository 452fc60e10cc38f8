// SPDX-License-Identifier: Apache-2.0
#include "client/include/kvtier/completion_queue.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <thread>

#include "absl/synchronization/notification.h"
#include "client/src/client_fixture.h"

namespace kvtier::client {
namespace {

using std::chrono::milliseconds;
using SteadyClock = std::chrono::steady_clock;

class CompletionQueueTest : public ClientFixture {
 protected:
  void SetUp() override {
    ClientFixture::SetUp();
    client_ = Connect();
    ns_ = Register(*client_);
    keys_ = KeysFrom(ns_, 0, 2);
    queue_ = NewQueue({});
  }
  void TearDown() override {
    queue_.reset();
    client_.reset();
    ClientFixture::TearDown();
  }

  std::unique_ptr<CompletionQueue> NewQueue(const CompletionQueue::Options& options) {
    auto queue = CompletionQueue::Create(client_.get(), options);
    EXPECT_TRUE(queue.ok()) << queue.status();
    return queue.ok() ? std::move(*queue) : nullptr;
  }

  // The next call to end; fails the test after ten seconds.
  Completion Next() {
    auto completion = queue_->Wait(SteadyClock::now() + std::chrono::seconds(10));
    EXPECT_TRUE(completion.has_value());
    return completion.has_value() ? std::move(*completion) : Completion();
  }
  template <typename Result>
  Result NextResult(uint64_t tag) {
    Completion completion = Next();
    EXPECT_EQ(completion.tag, tag);
    EXPECT_TRUE(completion.status.ok()) << completion.status;
    Result* const result = std::get_if<Result>(&completion.result);
    EXPECT_NE(result, nullptr);
    return result == nullptr ? Result() : std::move(*result);
  }
  // Has the thread of the queue sit in a Commit until `go` is notified.
  void KeepThreadBusy(uint64_t tag, absl::Notification* go) {
    auto busy = std::make_shared<absl::Notification>();
    // Before the fake daemon takes its lock: it answers others meanwhile.
    daemon_->hooks.before = [busy, go](const std::string& method) {
      if (method == "Commit" && !busy->HasBeenNotified()) {
        busy->Notify();
        go->WaitForNotification();
      }
      return grpc::Status::OK;
    };
    const std::vector<Key> other = KeysFrom(ns_, 100, 1);
    ASSERT_TRUE(queue_->Reserve({.tag = tag}, ns_, std::nullopt, other).ok());
    ASSERT_TRUE(queue_->Commit({.tag = tag}, ns_, NextResult<Fill>(tag)).ok());
    busy->WaitForNotification();
  }

  std::unique_ptr<Client> client_;
  Namespace ns_;
  std::vector<Key> keys_;
  std::unique_ptr<CompletionQueue> queue_;
};

TEST_F(CompletionQueueTest, CallsDoWhatThoseOfTheClientDo) {
  EXPECT_FALSE(queue_->Poll().has_value());
  ASSERT_TRUE(queue_->Reserve({.tag = 1}, ns_, std::nullopt, keys_).ok());
  Fill fill = NextResult<Fill>(1);
  ASSERT_EQ(fill.blocks.size(), 2U);
  for (const MappedBlock& block : fill.blocks) std::ranges::fill(block.bytes, std::byte{7});
  ASSERT_TRUE(queue_->Commit({.tag = 2}, ns_, std::move(fill)).ok());
  EXPECT_EQ(NextResult<std::vector<BlockStatus>>(2), std::vector<BlockStatus>(2, BlockStatus::kOk));
  ASSERT_TRUE(queue_->Lookup({.tag = 3}, ns_, keys_).ok());
  EXPECT_EQ(NextResult<std::vector<uint8_t>>(3).size(), 2U);
  ASSERT_TRUE(queue_->Acquire({.tag = 4}, ns_, keys_).ok());
  {
    const Lease lease = NextResult<Lease>(4);
    EXPECT_EQ(lease.ok_prefix_count(), 2U);
    EXPECT_TRUE(AllBytesAre(lease.blocks()[1].bytes, 7));
  }
  EXPECT_EQ(daemon_->CallCount("Release"), 1);
  ASSERT_TRUE(queue_->Prefetch({.tag = 5}, ns_, keys_).ok());
  NextResult<Ticket>(5);
  ASSERT_TRUE(client_->CreateContext(ns_, "chat").ok());
  ASSERT_TRUE(queue_->PauseContext({.tag = 6}, ns_, "chat").ok());
  NextResult<PauseResult>(6);
  ASSERT_TRUE(queue_->ResumeContext({.tag = 7}, ns_, "chat").ok());
  NextResult<Ticket>(7);
  EXPECT_EQ(queue_->in_flight_count(), 0U);
  EXPECT_FALSE(queue_->Wait(SteadyClock::now() + std::chrono::hours(1)).has_value())
      << "nothing is in flight: there is nothing to wait for";
}

TEST_F(CompletionQueueTest, ErrorsAreThoseOfTheCall) {
  daemon_->hooks.lookup = [](v1::LookupResponse& response) { response.set_hit_count(9); };
  ASSERT_TRUE(queue_->Lookup({.tag = 1}, ns_, keys_).ok());
  EXPECT_EQ(Next().status.code(), absl::StatusCode::kInternal);
  daemon_->hooks.reserve = [](v1::ReserveResponse& response) { response.clear_results(); };
  ASSERT_TRUE(queue_->Reserve({.tag = 2}, ns_, std::nullopt, keys_).ok());
  const Completion completion = Next();
  EXPECT_EQ(completion.status.code(), absl::StatusCode::kInternal);
  EXPECT_EQ(completion.result.index(), 0U);
  EXPECT_EQ(daemon_->pending().size(), 0U) << "the slots were given back";
}

TEST_F(CompletionQueueTest, BoundsAreErrorsOfSubmitting) {
  daemon_->hangs = true;
  queue_ = NewQueue({.in_flight_max = 2});
  ASSERT_TRUE(queue_->Lookup({.tag = 1}, ns_, keys_).ok());
  EXPECT_EQ(queue_->Lookup({.tag = 1}, ns_, keys_).code(), absl::StatusCode::kInvalidArgument);
  ASSERT_TRUE(queue_->Lookup({.tag = 2}, ns_, keys_).ok());
  const absl::Status third = queue_->Lookup({.tag = 3}, ns_, keys_);
  EXPECT_EQ(third.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ReasonOf(third), reason::kLimitReached);
  EXPECT_EQ(queue_->in_flight_count(), 2U);
  Namespace other = ns_;
  other.hash.bytes[0] ^= 1;
  EXPECT_EQ(queue_->Lookup({.tag = 4}, other, keys_).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(queue_->Reserve({.tag = 4}, ns_, std::nullopt, keys_, 3).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_FALSE(CompletionQueue::Create(client_.get(), {.in_flight_max = 0}).ok());
}

TEST_F(CompletionQueueTest, ADeadlineEndsACallWhoeverHangs) {
  daemon_->hangs = true;
  ASSERT_TRUE(queue_->Lookup({.tag = 1, .timeout_ms = 50}, ns_, keys_).ok());
  const auto begin = SteadyClock::now();
  EXPECT_FALSE(queue_->Wait(begin + milliseconds(5)).has_value());
  EXPECT_EQ(Next().status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_LT(SteadyClock::now() - begin, std::chrono::seconds(5));
  daemon_->hangs = false;
  // Also when the thread of the queue is at another call.
  absl::Notification go;
  KeepThreadBusy(2, &go);
  ASSERT_TRUE(queue_->Acquire({.tag = 3, .timeout_ms = 50}, ns_, keys_).ok());
  std::optional<Completion> completion;
  while (!(completion = queue_->Poll()).has_value()) std::this_thread::yield();
  EXPECT_EQ(completion->tag, 3U);
  EXPECT_EQ(completion->status.code(), absl::StatusCode::kDeadlineExceeded);
  go.Notify();
  EXPECT_EQ(Next().tag, 2U);
}

TEST_F(CompletionQueueTest, WhatComesAfterCancelIsGivenBack) {
  Store(*client_, ns_, keys_);
  const std::vector<Key> fresh = KeysFrom(ns_, 50, 2);
  absl::Notification go;
  KeepThreadBusy(1, &go);
  ASSERT_TRUE(queue_->Acquire({.tag = 2}, ns_, keys_).ok());
  ASSERT_TRUE(queue_->Reserve({.tag = 3}, ns_, std::nullopt, fresh).ok());
  // Their answers wait for the thread.
  while (daemon_->CallCount("Acquire") < 1 || !daemon_->pending().contains(fresh.back())) {
    std::this_thread::yield();
  }
  EXPECT_TRUE(queue_->Cancel(2));
  EXPECT_TRUE(queue_->Cancel(3));
  EXPECT_FALSE(queue_->Cancel(3));
  for (const uint64_t tag : {2, 3}) {
    const Completion completion = Next();
    EXPECT_EQ(completion.tag, tag);
    EXPECT_EQ(completion.status.code(), absl::StatusCode::kCancelled);
  }
  go.Notify();
  EXPECT_EQ(Next().tag, 1U);
  // The end of the queue waits for what its thread has to do.
  queue_.reset();
  // The daemon undoes what it answers to a call that is cancelled by then; else the client does.
  EXPECT_LE(daemon_->CallCount("Release"), 1);
  EXPECT_LE(daemon_->CallCount("Abort"), 1);
}

TEST_F(CompletionQueueTest, CallsOutliveARestartOfTheDaemon) {
  Store(*client_, ns_, keys_);
  daemon_->hangs = true;
  for (uint64_t tag = 0; tag < 16; ++tag) {
    ASSERT_TRUE(queue_->Lookup({.tag = tag, .timeout_ms = 20'000}, ns_, keys_).ok());
  }
  while (daemon_->CallCount("Lookup") < 16) std::this_thread::yield();
  daemon_.reset();
  daemon_ = std::make_unique<FakeDaemon>(run_dir_, 2);
  std::map<uint64_t, int> seen;
  for (int i = 0; i < 16; ++i) {
    const Completion completion = Next();
    EXPECT_TRUE(completion.status.ok()) << completion.status;
    ++seen[completion.tag];
  }
  EXPECT_EQ(seen.size(), 16U);
  EXPECT_EQ(client_->epoch(), 2U);
  // A fill of the old session is void.
  ASSERT_TRUE(queue_->Reserve({.tag = 1}, ns_, std::nullopt, keys_).ok());
  const Fill fill = NextResult<Fill>(1);
  daemon_.reset();
  daemon_ = std::make_unique<FakeDaemon>(run_dir_, 3);
  ASSERT_TRUE(queue_->Commit({.tag = 2}, ns_, fill).ok());
  EXPECT_EQ(ReasonOf(Next().status), reason::kSessionUnknown);
}

TEST_F(CompletionQueueTest, EndsWithCallsInFlight) {
  daemon_->hangs = true;
  for (uint64_t tag = 0; tag < 64; ++tag) {
    ASSERT_TRUE(queue_->Lookup({.tag = tag, .timeout_ms = 60'000}, ns_, keys_).ok());
  }
  queue_.reset();
}

}  // namespace
}  // namespace kvtier::client
