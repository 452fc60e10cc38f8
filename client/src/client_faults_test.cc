// SPDX-License-Identifier: Apache-2.0
//
// What the client makes of daemons that lie, hang, stop and come back.
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <limits>
#include <thread>

#include "absl/time/clock.h"
#include "client/include/kvtier/client.h"
#include "client/src/client_fixture.h"
#include "proto/base/status_util.h"
#include "proto/rpc/grpc_status.h"

namespace kvtier::client {
namespace {

class ClientFaultsTest : public ClientFixture {
 protected:
  // Ends the daemon and starts another one in its place.
  void RestartDaemon(uint64_t epoch) {
    daemon_.reset();
    daemon_ = std::make_unique<FakeDaemon>(run_dir_, epoch);
  }
};

using Spoil = std::function<void(std::string&)>;

// Overwrites one field of the first packed BlockResult.
Spoil SetResult(std::function<void(BlockResult&)> change) {
  return [change = std::move(change)](std::string& results) {
    BlockResult record;
    std::memcpy(&record, results.data(), sizeof(record));
    change(record);
    std::memcpy(results.data(), &record, sizeof(record));
  };
}

std::vector<std::pair<const char*, Spoil>> SpoiltResults() {
  return {
      {"short", [](std::string& r) { r.pop_back(); }},
      {"empty", [](std::string& r) { r.clear(); }},
      {"one too many", [](std::string& r) { r.append(16, '\1'); }},
      {"one too few", [](std::string& r) { r.resize(r.size() - 16); }},
      {"status 0", SetResult([](BlockResult& r) { r.status = static_cast<BlockStatus>(0); })},
      {"status 9", SetResult([](BlockResult& r) { r.status = static_cast<BlockStatus>(9); })},
      {"tier 0", SetResult([](BlockResult& r) { r.tier = 0; })},
      {"tier 3", SetResult([](BlockResult& r) { r.tier = 3; })},
      {"other tier", SetResult([](BlockResult& r) { r.tier = 2; })},
      {"no such segment", SetResult([](BlockResult& r) { r.segment_idx = 1; })},
      {"just beyond", SetResult([](BlockResult& r) {
         r.offset_bytes = (FakeDaemon::kSlotCount - 1) * FakeDaemon::kBlockBytes + 1;
       })},
      {"wraps around", SetResult([](BlockResult& r) {
         r.offset_bytes = std::numeric_limits<uint64_t>::max() - 100;
       })},
  };
}

// What the daemon says to the first `count` calls of each name but OpenSession and RegisterLayout.
std::function<grpc::Status(const std::string&)> RefuseForRate(int count, uint32_t delay_ms) {
  auto left = std::make_shared<std::atomic<int>>(count);
  return [left, delay_ms](const std::string& method) {
    if (method == "OpenSession" || method == "RegisterLayout" || (*left)-- <= 0) {
      return grpc::Status::OK;
    }
    return ToGrpc(
        WithRetryDelay(WithReason(Exhausted("too fast"), reason::kRateLimited), delay_ms));
  };
}

TEST_F(ClientFaultsTest, WaitsForTheRateWithinItsBudget) {
  const auto client = Connect();
  const Namespace ns = Register(*client);
  const std::vector<Key> keys = KeysFrom(ns, 0, 2);
  daemon_->hooks.before = RefuseForRate(3, 1);
  EXPECT_TRUE(client->Lookup(ns, keys).ok());
  EXPECT_EQ(daemon_->CallCount("Lookup"), 4);
  // Seven of ten are left, and what the answers earned is less than one.
  daemon_->hooks.before = RefuseForRate(1000, 1);
  const absl::Status status = client->Lookup(ns, keys).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ReasonOf(status), reason::kRateLimited);
  EXPECT_EQ(daemon_->CallCount("Lookup"), 12);
  EXPECT_EQ(client->stats().reopen_count, 0U);
}

TEST_F(ClientFaultsTest, DoesNotWaitLongerForTheRateThanItsDeadline) {
  const auto client = Connect();
  const Namespace ns = Register(*client);
  daemon_->hooks.before = RefuseForRate(1, 50'000);
  const absl::Status status = client->Lookup(ns, KeysFrom(ns, 0, 1)).status();
  EXPECT_EQ(ReasonOf(status), reason::kRateLimited);
  EXPECT_EQ(daemon_->CallCount("Lookup"), 1);
  // Others are repeated, too: what was refused was not done.
  daemon_->hooks.before = RefuseForRate(1, 1);
  EXPECT_TRUE(client->Reserve(ns, std::nullopt, KeysFrom(ns, 0, 1)).ok());
}

TEST_F(ClientFaultsTest, MalformedReservationsAreErrorsAndAreGivenBack) {
  const auto client = Connect();
  const Namespace ns = Register(*client);
  const std::vector<Key> keys = KeysFrom(ns, 0, 2);
  for (const auto& [name, spoil] : SpoiltResults()) {
    daemon_->hooks.reserve = [&spoil](v1::ReserveResponse& response) {
      spoil(*response.mutable_results());
    };
    const auto fill = client->Reserve(ns, std::nullopt, keys);
    EXPECT_EQ(fill.status().code(), absl::StatusCode::kInternal) << name << fill.status();
    EXPECT_EQ(daemon_->pending().size(), 0) << name;
  }
  daemon_->hooks.reserve = nullptr;
  EXPECT_TRUE(client->Reserve(ns, std::nullopt, keys).ok());
  EXPECT_EQ(client->stats().reopen_count, 0);
}

TEST_F(ClientFaultsTest, MalformedLeasesAreErrorsAndAreGivenBack) {
  const auto client = Connect();
  const Namespace ns = Register(*client);
  const std::vector<Key> keys = KeysFrom(ns, 0, 2);
  Store(*client, ns, keys);
  int released = 0;
  for (const auto& [name, spoil] : SpoiltResults()) {
    daemon_->hooks.acquire = [&spoil](v1::AcquireResponse& response) {
      spoil(*response.mutable_results());
    };
    const auto lease = client->Acquire(ns, keys);
    EXPECT_EQ(lease.status().code(), absl::StatusCode::kInternal) << name << lease.status();
    EXPECT_EQ(daemon_->CallCount("Release"), ++released) << name;
  }
  daemon_->hooks.acquire = [](v1::AcquireResponse& response) {
    response.mutable_crc32cs()->pop_back();
  };
  EXPECT_EQ(client->Acquire(ns, keys).status().code(), absl::StatusCode::kInternal);
  daemon_->hooks.acquire = [](v1::AcquireResponse& response) { response.set_lease_id(0); };
  EXPECT_EQ(client->Acquire(ns, keys).status().code(), absl::StatusCode::kInternal);
  daemon_->hooks.acquire = nullptr;
  EXPECT_TRUE(client->Acquire(ns, keys).ok());
}

TEST_F(ClientFaultsTest, MalformedIndexAnswersAreErrors) {
  const auto client = Connect();
  daemon_->hooks.register_layout = [](v1::RegisterLayoutResponse& response) {
    response.mutable_namespace_hash()->pop_back();
  };
  EXPECT_EQ(client->RegisterLayout(FakeDaemon::TestLayout()).status().code(),
            absl::StatusCode::kInternal);
  daemon_->hooks.register_layout = [](v1::RegisterLayoutResponse& response) {
    response.set_block_bytes(FakeDaemon::kBlockBytes / 2);
  };
  EXPECT_EQ(client->RegisterLayout(FakeDaemon::TestLayout()).status().code(),
            absl::StatusCode::kInternal);
  daemon_->hooks.register_layout = nullptr;
  const Namespace ns = Register(*client);
  const std::vector<Key> keys = KeysFrom(ns, 0, 2);
  daemon_->hooks.lookup = [](v1::LookupResponse& response) { response.set_hit_count(1); };
  EXPECT_EQ(client->Lookup(ns, keys).status().code(), absl::StatusCode::kInternal);
  daemon_->hooks.lookup = [](v1::LookupResponse& response) {
    response.set_hit_count(3);
    response.set_residency("\1\1\1");
  };
  EXPECT_EQ(client->Lookup(ns, keys).status().code(), absl::StatusCode::kInternal);
  daemon_->hooks.commit = [](v1::CommitResponse& response) { response.clear_statuses(); };
  const auto fill = client->Reserve(ns, std::nullopt, keys);
  EXPECT_EQ(client->Commit(ns, *fill).status().code(), absl::StatusCode::kInternal);
}

TEST_F(ClientFaultsTest, MalformedReadsAreErrors) {
  const auto client = Connect();
  const Namespace ns = Register(*client);
  const std::vector<Key> keys = KeysFrom(ns, 0, 2);
  Store(*client, ns, keys);
  const std::vector<std::pair<absl::StatusCode, std::function<void(v1::ReadResponse&)>>> cases = {
      {absl::StatusCode::kInternal, [](v1::ReadResponse& r) { r.clear_header(); }},
      {absl::StatusCode::kInternal, [](v1::ReadResponse& r) { r.clear_chunk(); }},
      {absl::StatusCode::kInternal,
       [](v1::ReadResponse& r) { r.mutable_chunk()->append(r.chunk()); }},
      {absl::StatusCode::kInternal,
       [](v1::ReadResponse& r) {
         if (r.has_header()) r.mutable_header()->mutable_statuses()->pop_back();
       }},
      {absl::StatusCode::kInternal,
       [](v1::ReadResponse& r) {
         if (r.has_header()) r.mutable_header()->mutable_crc32cs()->pop_back();
       }},
      {absl::StatusCode::kDataLoss, [](v1::ReadResponse& r) { ++r.mutable_chunk()->back(); }},
  };
  for (size_t i = 0; i < cases.size(); ++i) {
    daemon_->hooks.read = cases[i].second;
    EXPECT_EQ(client->Read(ns, keys).status().code(), cases[i].first) << "case " << i;
  }
  EXPECT_EQ(daemon_->reported(), std::set<Key>{keys[0]});
}

TEST_F(ClientFaultsTest, MalformedSegmentsAreErrors) {
  const auto client = Connect();
  const Namespace ns = Register(*client);
  const std::vector<Key> keys = KeysFrom(ns, 0, 1);
  const std::vector<std::pair<const char*, std::function<void(HandleAnswer&)>>> cases = {
      {"no descriptor", [](HandleAnswer& a) { a.fd_count = 0; }},
      {"two descriptors", [](HandleAnswer& a) { a.fd_count = 2; }},
      {"eight descriptors", [](HandleAnswer& a) { a.fd_count = 8; }},
      {"short reply", [](HandleAnswer& a) { a.reply_bytes = 39; }},
      {"no bytes", [](HandleAnswer& a) { a.reply.segment_bytes = 0; }},
      {"longer than its file", [](HandleAnswer& a) { a.reply.segment_bytes += 4096; }},
      {"huge", [](HandleAnswer& a) { a.reply.segment_bytes = ~0ULL; }},
      {"other epoch", [](HandleAnswer& a) { a.reply.epoch = 2; }},
      {"unknown status", [](HandleAnswer& a) { a.reply.status = static_cast<HandleStatus>(77); }},
  };
  for (const auto& [name, spoil] : cases) {
    daemon_->hooks.handle = [&spoil](const HandleRequest& request, HandleAnswer& answer) {
      if (request.kind == HandleRequestKind::kGetSegment) spoil(answer);
    };
    // A reply that cannot be matched to its request makes the connection useless: the call after it
    // opens another session.
    const auto fill = client->Reserve(ns, std::nullopt, keys);
    EXPECT_FALSE(fill.ok()) << name;
    EXPECT_NE(fill.status().code(), absl::StatusCode::kUnavailable) << name;
  }
  daemon_->hooks.handle = nullptr;
  auto fill = client->Reserve(ns, std::nullopt, keys);
  if (!fill.ok()) fill = client->Reserve(ns, std::nullopt, keys);
  EXPECT_TRUE(fill.ok()) << fill.status();
}

TEST_F(ClientFaultsTest, ConnectTellsWhyItIsRefused) {
  daemon_->hooks.handle = [](const HandleRequest&, HandleAnswer& answer) {
    answer.reply.status = HandleStatus::kForbidden;
  };
  EXPECT_EQ(Client::Connect(Options()).status().code(), absl::StatusCode::kPermissionDenied);
  daemon_->hooks.handle = [](const HandleRequest&, HandleAnswer& answer) {
    answer.reply.version = 2;
    answer.reply.status = HandleStatus::kVersionMismatch;
  };
  EXPECT_EQ(Client::Connect(Options()).status().code(), absl::StatusCode::kFailedPrecondition);
  // Other versions may have replies of other sizes.
  daemon_->hooks.handle = [](const HandleRequest&, HandleAnswer& answer) {
    answer.reply.version = kHandleWireVersion - 1;
    answer.reply_bytes = 40;
  };
  EXPECT_EQ(Client::Connect(Options()).status().code(), absl::StatusCode::kFailedPrecondition);
  ClientOptions options = Options();
  options.reconnect_timeout_ms = 50;
  daemon_->hooks.handle = [](const HandleRequest&, HandleAnswer& answer) {
    answer.reply.status = HandleStatus::kLimitReached;
  };
  EXPECT_EQ(Client::Connect(options).status().code(), absl::StatusCode::kResourceExhausted);
  daemon_->hooks.handle = nullptr;
  daemon_->hooks.open_session = [](v1::OpenSessionResponse& response) { response.clear_opened(); };
  EXPECT_EQ(Client::Connect(Options()).status().code(), absl::StatusCode::kInternal);
}

TEST_F(ClientFaultsTest, ConnectHearsTheReasonOfAConnectionClosedAtOnce) {
  std::atomic<int> refused = 0;
  daemon_->hooks.refuse = [&refused] {
    ++refused;
    return HandleStatus::kForbidden;
  };
  // Whether the request or the refusal comes first is up to the scheduler.
  for (int i = 1; i <= 50; ++i) {
    const auto client = Client::Connect(Options());
    EXPECT_EQ(client.status().code(), absl::StatusCode::kPermissionDenied) << client.status();
    ASSERT_EQ(refused, i) << "Connect tried again";
  }
}

TEST_F(ClientFaultsTest, ConnectGivesUpInTime) {
  daemon_->hangs = true;
  ClientOptions options = Options();
  options.reconnect_timeout_ms = 60;
  EXPECT_EQ(Client::Connect(options).status().code(), absl::StatusCode::kUnavailable);
  daemon_.reset();
  options.run_dir += "/nowhere";
  EXPECT_EQ(Client::Connect(options).status().code(), absl::StatusCode::kUnavailable);
}

TEST_F(ClientFaultsTest, ConnectWaitsForADaemonThatIsStarting) {
  daemon_.reset();
  std::filesystem::remove(run_dir_ + "/handles.sock");
  std::atomic<bool> connected = false;
  std::jthread connecting([&] { connected = Connect() != nullptr; });
  daemon_ = std::make_unique<FakeDaemon>(run_dir_, 1);
  connecting.join();
  EXPECT_TRUE(connected);
}

TEST_F(ClientFaultsTest, CallsEndAtTheirDeadlineAndTheSessionLivesOn) {
  ClientOptions options = Options();
  options.control_timeout_ms = 300;
  const auto client = Connect(options);
  const Namespace ns = Register(*client);
  daemon_->hangs = true;
  EXPECT_EQ(client->Lookup(ns, {}).status().code(), absl::StatusCode::kDeadlineExceeded);
  daemon_->hangs = false;
  EXPECT_TRUE(client->Lookup(ns, {}).ok());
  EXPECT_EQ(client->stats().reopen_count, 0);
}

TEST_F(ClientFaultsTest, AClientEndsWithoutWaitingForItsDaemon) {
  ClientOptions options = Options();
  options.control_timeout_ms = 60'000;
  auto client = Connect(options);
  daemon_->hangs = true;
  const absl::Time start = absl::Now();
  client.reset();
  EXPECT_LT(absl::Now() - start, absl::Seconds(5));
}

TEST_F(ClientFaultsTest, FindsTheDaemonAgainAfterARestart) {
  const auto client = Connect();
  const Namespace ns = Register(*client);
  const std::vector<Key> keys = KeysFrom(ns, 0, 2);
  Store(*client, ns, std::span(keys).first(1), 7);
  const auto lease = client->Acquire(ns, std::span(keys).first(1));
  const auto fill = client->Reserve(ns, std::nullopt, std::span(keys).last(1));
  RestartDaemon(2);

  EXPECT_EQ(*client->Lookup(ns, keys), std::vector<uint8_t>());
  EXPECT_EQ(client->epoch(), 2);
  EXPECT_EQ(client->stats().reopen_count, 1);
  EXPECT_EQ(daemon_->CallCount("RegisterLayout"), 1);

  // What the dead daemon gave out is harmless, and void.
  EXPECT_TRUE(AllBytesAre(lease->blocks()[0].bytes, 7));
  std::ranges::fill(fill->blocks[0].bytes, std::byte{1});
  const auto committed = client->Commit(ns, *fill);
  EXPECT_EQ(committed.status().code(), absl::StatusCode::kAborted);
  EXPECT_EQ(ReasonOf(committed.status()), reason::kSessionUnknown);
  EXPECT_TRUE(client->Abort(ns, *fill).ok());
  EXPECT_EQ(daemon_->CallCount("Commit") + daemon_->CallCount("Abort"), 0);
  Store(*client, ns, keys);
}

TEST_F(ClientFaultsTest, TheHandleConnectionOutlivesItsSessionWhileSlotsAreInUse) {
  const auto client = Connect();
  const Namespace ns = Register(*client);
  const std::vector<Key> keys = KeysFrom(ns, 0, 2);
  Store(*client, ns, std::span(keys).first(1));
  auto lease = client->Acquire(ns, std::span(keys).first(1));
  auto fill = client->Reserve(ns, std::nullopt, std::span(keys).last(1));
  daemon_->AwaitHandleConnections(1);

  daemon_->EndSessions();
  EXPECT_TRUE(client->Lookup(ns, keys).ok());
  daemon_->AwaitHandleConnections(2);
  lease->Release();
  EXPECT_TRUE(client->Lookup(ns, keys).ok());
  EXPECT_EQ(daemon_->handle_connection_count(), 2) << "the fill can still be written to";
  EXPECT_EQ(daemon_->CallCount("Release"), 0) << "the lease ended with its session";
  *fill = Fill();
  daemon_->AwaitHandleConnections(1);
}

TEST_F(ClientFaultsTest, SequencesThatLoseTheirSessionAreAborted) {
  const auto client = Connect();
  const Namespace ns = Register(*client);
  const std::vector<Key> keys = KeysFrom(ns, 0, 1);
  const auto fail = [this](const std::string& failing) {
    daemon_->hooks.before = [failing](const std::string& method) {
      if (method != failing) return grpc::Status::OK;
      return grpc::Status(grpc::StatusCode::UNAVAILABLE, "connection reset");
    };
  };
  fail("Reserve");
  const auto fill = client->Reserve(ns, std::nullopt, keys);
  EXPECT_EQ(fill.status().code(), absl::StatusCode::kAborted);
  EXPECT_EQ(ReasonOf(fill.status()), reason::kSessionUnknown);
  EXPECT_EQ(client->stats().reopen_count, 1);

  fail("Commit");
  const auto again = client->Reserve(ns, std::nullopt, keys);
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(client->Commit(ns, *again).status().code(), absl::StatusCode::kAborted);
  EXPECT_EQ(client->stats().reopen_count, 2);

  fail("Lookup");
  EXPECT_EQ(client->Lookup(ns, keys).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(daemon_->CallCount("Lookup"), 2);
}

TEST_F(ClientFaultsTest, AnswersOfALivingDaemonDoNotEndTheSession) {
  const auto client = Connect();
  const Namespace ns = Register(*client);
  daemon_->hooks.before = [](const std::string& method) {
    if (method != "Lookup") return grpc::Status::OK;
    return ToGrpc(WithReason(Unavailable("draining"), reason::kDraining));
  };
  const auto found = client->Lookup(ns, {});
  EXPECT_EQ(found.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(ReasonOf(found.status()), reason::kDraining);
  EXPECT_EQ(client->stats().reopen_count, 0);
}

TEST_F(ClientFaultsTest, AReplyOfAnotherEpochEndsTheSession) {
  const auto client = Connect();
  const Namespace ns = Register(*client);
  bool spoilt = false;
  daemon_->hooks.lookup = [&spoilt](v1::LookupResponse& response) {
    if (!spoilt) response.set_epoch(9);
    spoilt = true;
  };
  EXPECT_TRUE(client->Lookup(ns, {}).ok());
  EXPECT_EQ(client->stats().reopen_count, 1);
}

TEST_F(ClientFaultsTest, ManyThreadsShareOneReopening) {
  const auto client = Connect();
  const Namespace ns = Register(*client);
  const std::vector<Key> keys = KeysFrom(ns, 0, 4);
  Store(*client, ns, keys, 1);
  std::atomic<int> failures = 0;
  {
    std::vector<std::jthread> readers;
    for (int i = 0; i < 4; ++i) {
      readers.emplace_back([&] {
        for (int round = 0; round < 50; ++round) {
          const auto lease = client->Acquire(ns, keys);
          if (!lease.ok() || !AllBytesAre(lease->blocks()[3].bytes, 4)) ++failures;
        }
      });
    }
    for (int i = 0; i < 5; ++i) {
      const int opened = daemon_->CallCount("OpenSession");
      daemon_->EndSessions();
      while (daemon_->CallCount("OpenSession") == opened && client->Lookup(ns, keys).ok()) {
      }
    }
  }
  // A call that loses two sessions in a row says so.
  EXPECT_LE(failures, 20);
  EXPECT_TRUE(client->Acquire(ns, keys).ok());
  EXPECT_GE(client->stats().reopen_count, 5);
}

}  // namespace
}  // namespace kvtier::client
