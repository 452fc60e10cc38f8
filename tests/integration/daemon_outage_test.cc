// SPDX-License-Identifier: Apache-2.0
//
// The daemon restarts under clients at work, and stops answering for a while: no client hangs, all
// go on by themselves, nothing is leaked.
//   daemon_outage_test KVTIERD
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <iostream>
#include <map>
#include <thread>

#include "client/src/admin_client.h"
#include "kvtier/completion_queue.h"
#include "proto/base/reasons.h"
#include "tests/integration/daemon_process.h"

namespace kvtier::testing {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

std::string g_kvtierd;

class DaemonOutageTest : public ::testing::Test {
 protected:
  void SetUp() override {
    daemon_ = std::make_unique<DaemonProcess>(
        g_kvtierd,
        std::vector<std::string>{"--hbm.capacity_bytes=4MiB", "--hbm.segment_bytes=256KiB",
                                 "--host.capacity_bytes=4MiB", "--host.segment_bytes=256KiB",
                                 "--nvme.capacity_bytes=64MiB", "--nvme.segment_bytes=4MiB"});
    const absl::Status started = daemon_->Start();
    ASSERT_TRUE(started.ok()) << started;
  }

  absl::StatusOr<v1::GetTiersResponse> Tiers() const {
    return client::AdminClient({.run_dir = daemon_->run_dir()}).GetTiers();
  }
  // With what the daemon said last, if it does not answer.
  std::string TiersText() const {
    const auto tiers = Tiers();
    return tiers.ok() ? tiers->DebugString() : tiers.status().ToString() + "\n" + daemon_->Log();
  }

  // Pinned, quarantined, leased or reserved: 0 is none of it.
  uint64_t Held() const {
    const auto tiers = Tiers();
    if (!tiers.ok()) return UINT64_MAX;
    uint64_t held = tiers->store().lease_count() + tiers->store().pending_fill_count();
    for (const v1::TierStats& tier : tiers->tiers()) {
      held += tier.pinned_bytes() + tier.quarantined_bytes();
    }
    return held;
  }

  std::unique_ptr<DaemonProcess> daemon_;
};

// An engine at work in a thread: it puts a chain, reads it back, looks it up, over and over.
class BusyEngine {
 public:
  BusyEngine(const DaemonProcess& daemon, uint32_t seed)
      : client_(*daemon.Connect()), seed_(seed), thread_([this](const std::stop_token& stop) {
          while (!stop.stop_requested()) Cycle();
        }) {}

  // Whole cycles so far, without an error in them.
  uint64_t done_count() const { return done_count_; }
  uint64_t wrong_count() const { return wrong_count_; }
  std::string unexpected() {
    absl::MutexLock lock(&mutex_);
    return unexpected_;
  }

 private:
  void Cycle() {
    const auto ns = client_->RegisterLayout(SmallLayout());
    if (!Expected(ns.status())) return;
    const auto keys = MakeChain(*ns, seed_ + 64 * (count_++ % 8), 4);
    if (!Expected(PutChain(client_.get(), *ns, keys).status())) return;
    const auto read = CheckChain(client_.get(), *ns, keys);
    if (!Expected(read.status())) return;
    wrong_count_ += read->wrong;
    if (!Expected(client_->Lookup(*ns, keys).status())) return;
    ++done_count_;
  }
  // What a restart may look like, told from what it may not.
  bool Expected(const absl::Status& status) {
    if (status.ok()) return true;
    if (absl::IsUnavailable(status) || absl::IsAborted(status) ||
        absl::IsDeadlineExceeded(status)) {
      return false;
    }
    absl::MutexLock lock(&mutex_);
    unexpected_ = status.ToString();
    return false;
  }

  const std::unique_ptr<client::Client> client_;
  const uint32_t seed_;
  uint32_t count_ = 0;
  std::atomic<uint64_t> done_count_ = 0;
  std::atomic<uint64_t> wrong_count_ = 0;
  absl::Mutex mutex_;
  std::string unexpected_ ABSL_GUARDED_BY(mutex_);
  std::jthread thread_;
};

TEST_F(DaemonOutageTest, SixteenBusyClientsServeAgainAfterARestart) {
  std::vector<std::unique_ptr<BusyEngine>> engines;
  for (uint32_t i = 0; i < 16; ++i) engines.push_back(std::make_unique<BusyEngine>(*daemon_, i));
  for (int round = 0; round < 2; ++round) {
    const auto all_have_done = [&](const std::vector<uint64_t>& before, uint64_t more) {
      for (size_t i = 0; i < engines.size(); ++i) {
        if (engines[i]->done_count() < before[i] + more) return false;
      }
      return true;
    };
    const auto counts = [&] {
      std::vector<uint64_t> done;
      for (const auto& engine : engines) done.push_back(engine->done_count());
      return done;
    };
    const std::vector<uint64_t> before = counts();
    ASSERT_TRUE(Eventually(milliseconds(20'000), [&] { return all_have_done(before, 2); }));
    daemon_->Kill9();
    ASSERT_TRUE(daemon_->Start().ok()) << daemon_->Log();
    const auto back = Clock::now();
    // One that was in the middle of a cycle has done another one, too.
    const std::vector<uint64_t> then = counts();
    EXPECT_TRUE(Eventually(milliseconds(5000), [&] { return all_have_done(then, 2); }));
    std::cout << "all serve again after "
              << std::chrono::duration_cast<milliseconds>(Clock::now() - back).count() << " ms\n";
  }
  for (const auto& engine : engines) {
    EXPECT_EQ(engine->wrong_count(), 0U);
    EXPECT_EQ(engine->unexpected(), "");
  }
  engines.clear();
  EXPECT_TRUE(Eventually(milliseconds(5000), [&] { return Held() == 0; })) << TiersText();
}

void StopAndWait(pid_t pid) {
  EXPECT_EQ(kill(pid, SIGSTOP), 0);
  // The signal alone does not say that all its threads have stopped.
  siginfo_t info{};
  EXPECT_EQ(waitid(P_PID, static_cast<id_t>(pid), &info, WSTOPPED), 0);
}

// Stops a child process, and lets it go on at the end.
class Stopped {
 public:
  explicit Stopped(pid_t pid) : pid_(pid) { StopAndWait(pid_); }
  ~Stopped() { kill(pid_, SIGCONT); }
  Stopped(const Stopped&) = delete;
  Stopped& operator=(const Stopped&) = delete;

 private:
  const pid_t pid_;
};

class StoppedDaemonTest : public DaemonOutageTest {
 protected:
  static constexpr uint32_t kTimeoutMs = 300;
  // A call may wait for another session first, and this machine has other work.
  static constexpr milliseconds kEndsWithin{2 * kTimeoutMs + 1500};

  void SetUp() override {
    DaemonOutageTest::SetUp();
    client_ = Connect();
    ns_ = *client_->RegisterLayout(SmallLayout());
    keys_ = MakeChain(ns_, 1, 4);
    ASSERT_EQ(*PutChain(client_.get(), ns_, keys_), keys_.size());
    ASSERT_TRUE(client_->CreateContext(ns_, "known").ok());
    ASSERT_TRUE(client_->AppendContext(ns_, "known", 0, keys_).ok());
  }

  std::unique_ptr<client::Client> Connect() const {
    auto client = client::Client::Connect({.run_dir = daemon_->run_dir(),
                                           .client_name = "test",
                                           .control_timeout_ms = kTimeoutMs,
                                           .transfer_timeout_ms = kTimeoutMs,
                                           .reconnect_timeout_ms = kTimeoutMs});
    EXPECT_TRUE(client.ok()) << client.status();
    return *std::move(client);
  }

  static void ExpectEnds(const char* name, const std::function<absl::Status()>& call) {
    const auto begin = Clock::now();
    const absl::Status status = call();
    EXPECT_LT(Clock::now() - begin, kEndsWithin) << name;
    EXPECT_TRUE(absl::IsDeadlineExceeded(status) || absl::IsUnavailable(status))
        << name << ": " << status;
  }

  void ExpectServes() {
    const auto more = MakeChain(ns_, 77, 4);
    EXPECT_TRUE(Eventually(milliseconds(5000), [&] {
      const auto taken = PutChain(client_.get(), ns_, more);
      return taken.ok() && *taken == more.size();
    }));
    const auto read = CheckChain(client_.get(), ns_, more);
    ASSERT_TRUE(read.ok()) << read.status();
    EXPECT_EQ(read->right, more.size());
    EXPECT_EQ(CheckChain(client_.get(), ns_, keys_)->right, keys_.size());
  }

  std::unique_ptr<client::Client> client_;
  client::Namespace ns_;
  std::vector<Key> keys_;
};

TEST_F(StoppedDaemonTest, EveryCallEndsAtItsDeadlineAndNothingIsLeaked) {
  const auto fill = client_->Reserve(ns_, std::nullopt, MakeChain(ns_, 2, 4));
  ASSERT_TRUE(fill.ok()) << fill.status();
  const auto ticket = client_->Prefetch(ns_, keys_);
  ASSERT_TRUE(ticket.ok()) << ticket.status();
  const std::vector<std::byte> payloads(keys_.size() * ns_.block_bytes);
  const auto new_keys = MakeChain(ns_, 3, 4);
  {
    const Stopped stopped(daemon_->pid());
    client::Client& c = *client_;
    ExpectEnds("RegisterLayout", [&] { return c.RegisterLayout(SmallLayout("other")).status(); });
    ExpectEnds("Lookup", [&] { return c.Lookup(ns_, keys_).status(); });
    ExpectEnds("Reserve", [&] { return c.Reserve(ns_, std::nullopt, new_keys).status(); });
    ExpectEnds("Commit", [&] { return c.Commit(ns_, *fill).status(); });
    ExpectEnds("Abort", [&] { return c.Abort(ns_, *fill); });
    ExpectEnds("Acquire", [&] { return c.Acquire(ns_, keys_).status(); });
    ExpectEnds("ReportBad", [&] { return c.ReportBad(ns_, MakeChain(ns_, 9, 1)); });
    ExpectEnds("Prefetch", [&] { return c.Prefetch(ns_, keys_).status(); });
    ExpectEnds("GetTicket", [&] { return c.GetTicket(ticket->ticket_id).status(); });
    ExpectEnds("CancelPrefetch", [&] { return c.CancelPrefetch(ticket->ticket_id); });
    ExpectEnds("Write", [&] { return c.Write(ns_, std::nullopt, keys_, payloads).status(); });
    ExpectEnds("Read", [&] { return c.Read(ns_, keys_).status(); });
    ExpectEnds("CreateContext", [&] { return c.CreateContext(ns_, "new").status(); });
    ExpectEnds("AppendContext", [&] { return c.AppendContext(ns_, "known", 4, {}).status(); });
    ExpectEnds("PauseContext", [&] { return c.PauseContext(ns_, "known").status(); });
    ExpectEnds("ResumeContext", [&] { return c.ResumeContext(ns_, "known").status(); });
    ExpectEnds("ForkContext", [&] { return c.ForkContext(ns_, "known", "fork", 1).status(); });
    ExpectEnds("CloseContext", [&] { return c.CloseContext(ns_, "unknown", false).status(); });
    ExpectEnds("Connect", [&] {
      return client::Client::Connect({.run_dir = daemon_->run_dir(),
                                      .control_timeout_ms = kTimeoutMs,
                                      .reconnect_timeout_ms = kTimeoutMs})
          .status();
    });
  }
  ExpectServes();
  // Its answer came too late to say whether it was done; it is idempotent.
  EXPECT_TRUE(client_->Abort(ns_, *fill).ok());
  EXPECT_TRUE(Eventually(milliseconds(5000), [&] { return Held() == 0; })) << TiersText();
}

TEST_F(StoppedDaemonTest, LeasesReadOnAndAreGivenBackAfterwards) {
  auto lease = client_->Acquire(ns_, keys_);
  ASSERT_TRUE(lease.ok()) << lease.status();
  auto other = client_->Acquire(ns_, keys_);
  ASSERT_TRUE(other.ok()) << other.status();
  {
    const Stopped stopped(daemon_->pid());
    for (size_t i = 0; i < keys_.size(); ++i) {
      EXPECT_TRUE(HasPattern(keys_[i], lease->blocks()[i].bytes));
    }
    const auto begin = Clock::now();
    lease->Release();
    EXPECT_LT(Clock::now() - begin, kEndsWithin);
  }
  ExpectServes();
  other->Release();
  EXPECT_TRUE(Eventually(milliseconds(5000), [&] { return Held() == 0; })) << TiersText();
}

TEST_F(StoppedDaemonTest, ALeaseWhoseReleaseWasLostIsGivenBackWithoutAnotherCall) {
  auto lease = client_->Acquire(ns_, keys_);
  ASSERT_TRUE(lease.ok()) << lease.status();
  {
    const Stopped stopped(daemon_->pid());
    lease->Release();
  }
  EXPECT_TRUE(Eventually(milliseconds(5000), [&] { return Held() == 0; })) << TiersText();
}

// Calls of a completion queue that are in flight when the daemon is killed, and while it is frozen.
TEST_F(DaemonOutageTest, EveryCallInFlightComesOutOnce) {
  auto client = *daemon_->Connect();
  const auto ns = *client->RegisterLayout(SmallLayout());
  const auto keys = MakeChain(ns, 1, 4);
  ASSERT_EQ(*PutChain(client.get(), ns, keys), 4U);
  auto queue = *client::CompletionQueue::Create(client.get(), {});
  for (int round = 0; round < 4; ++round) {
    const bool is_killed = round % 2 == 0;
    // Answers that nobody reads now: the calls are in flight when the signal comes.
    StopAndWait(daemon_->pid());
    std::map<uint64_t, absl::Status> ended;
    const uint32_t timeout_ms = is_killed ? 30'000 : 300;
    for (uint64_t tag = 0; tag < 32; tag += 4) {
      ASSERT_TRUE(queue->Lookup({tag, timeout_ms}, ns, keys).ok());
      ASSERT_TRUE(queue->Acquire({tag + 1, timeout_ms}, ns, keys).ok());
      ASSERT_TRUE(queue->Prefetch({tag + 2, timeout_ms}, ns, keys).ok());
      ASSERT_TRUE(queue
                      ->Reserve({tag + 3, timeout_ms}, ns, std::nullopt,
                                MakeChain(ns, 1000 + static_cast<uint32_t>(tag), 1))
                      .ok());
    }
    if (is_killed) {
      EXPECT_FALSE(queue->Poll().has_value());
      daemon_->Kill9();
      ASSERT_TRUE(daemon_->Start().ok());
    }
    const auto begin = Clock::now();
    while (ended.size() < 32) {
      auto completion = queue->Wait(begin + milliseconds(60'000));
      ASSERT_TRUE(completion.has_value()) << ended.size();
      EXPECT_TRUE(ended.emplace(completion->tag, completion->status).second);
      if (const auto* fill = std::get_if<client::Fill>(&completion->result)) {
        EXPECT_TRUE(client->Abort(ns, *fill).ok());
      }
    }
    EXPECT_FALSE(queue->Poll().has_value());
    EXPECT_EQ(queue->in_flight_count(), 0U);
    if (!is_killed) {
      ASSERT_EQ(kill(daemon_->pid(), SIGCONT), 0);
    }
    for (const auto& [tag, status] : ended) {
      if (!is_killed) {
        EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << tag << status;
      } else if (tag % 4 == 3) {
        EXPECT_TRUE(status.ok() || ReasonOf(status) == reason::kSessionUnknown) << tag << status;
      } else {
        EXPECT_TRUE(status.ok()) << tag << status;
      }
    }
    if (is_killed) {
      EXPECT_TRUE(Eventually(milliseconds(5000), [&] { return Held() == 0; })) << TiersText();
    }
  }
  // An answer that crossed the end of its call on the way is held until the session ends.
  queue.reset();
  client.reset();
  EXPECT_TRUE(Eventually(milliseconds(5000), [&] { return Held() == 0; })) << TiersText();
}

}  // namespace
}  // namespace kvtier::testing

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  if (argc != 2) {
    std::cerr << "usage: daemon_outage_test KVTIERD\n";
    return 2;
  }
  kvtier::testing::g_kvtierd = argv[1];
  return RUN_ALL_TESTS();
}
