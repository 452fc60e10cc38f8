// SPDX-License-Identifier: Apache-2.0
//
// The whole daemon in this process, spoken to over its sockets.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "daemon/health_watch.h"
#include "daemon/requests.h"
#include "daemon/service_fixture.h"
#include "proto/base/reasons.h"
#include "proto/rpc/grpc_status.h"

namespace kvtier {
namespace {

using testing::Each;
using testing::ElementsAre;
using testing::Eq;

std::string ReasonFrom(const grpc::Status& status) { return ReasonOf(FromGrpc(status)); }

using ServiceTest = ServiceFixture;

TEST_F(ServiceTest, PutThenAcquireInPlace) {
  const auto client = NewClient();
  EXPECT_EQ(client->epoch, daemon_->epoch());
  EXPECT_EQ(client->opened.tenant(), "default");
  EXPECT_EQ(client->opened.limits().keys_per_call_max(), 4096U);
  const auto keys = TestChain(1, 4);
  EXPECT_TRUE(client->Lookup(keys).empty());
  EXPECT_THAT(client->Put(keys), Each(BlockStatus::kOk));
  EXPECT_THAT(client->Put(keys), Each(BlockStatus::kExists));
  EXPECT_EQ(client->Lookup(keys).size(), 4U);

  v1::AcquireResponse lease;
  const grpc::Status status = client->Acquire(keys, &lease);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(lease.epoch(), client->epoch);
  EXPECT_NE(lease.lease_id(), 0U);
  EXPECT_EQ(lease.crc32cs(), PackTestCrcs(keys, kBytes));
  const auto places = UnpackRecords<BlockResult>(lease.results(), "results").value();
  for (size_t i = 0; i < keys.size(); ++i) {
    ASSERT_EQ(places[i].status, BlockStatus::kOk);
    const auto segment = client->Map(places[i].tier, places[i].segment_idx, false);
    EXPECT_EQ(std::string_view(
                  reinterpret_cast<const char*>(segment.data()) + places[i].offset_bytes, kBytes),
              TestPayload(keys[i], kBytes));
  }
  EXPECT_EQ(Counters().lease_count, 1U);
  v1::ReleaseRequest release;
  release.set_session_id(client->session_id);
  release.add_lease_ids(lease.lease_id());
  v1::ReleaseResponse released;
  EXPECT_TRUE(client->stub().Release(TestClient::Deadline().get(), release, &released).ok());
  EXPECT_EQ(Counters().lease_count, 0U);
}

TEST_F(ServiceTest, ATenantsCallsHaveARate) {
  daemon_.reset();
  config_.server.tenant_calls_per_second = 5;
  Start();
  // The session and the layout are two.
  const auto client = NewClient();
  const auto keys = TestChain(1, 1);
  auto request = client->Ask<v1::LookupRequest>();
  request.set_keys(PackKeys(keys));
  v1::LookupResponse found;
  absl::Status status;
  int served_count = 0;
  const uint64_t start_ms = MonotonicMs();
  while (served_count < 100) {
    status = FromGrpc(client->stub().Lookup(TestClient::Deadline().get(), request, &found));
    if (!status.ok()) break;
    ++served_count;
  }
  // Of those that came in since, there may be more.
  EXPECT_LE(served_count, 3 + static_cast<int>((MonotonicMs() - start_ms) / 200));
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_EQ(ReasonOf(status), reason::kRateLimited);
  EXPECT_THAT(std::string(status.message()), testing::HasSubstr("more than 5 calls a second"));
  ASSERT_TRUE(RetryDelayMsOf(status).has_value());
  EXPECT_LE(*RetryDelayMsOf(status), 201U);
  // What gives something back is not held up.
  v1::ReleaseRequest release;
  release.set_session_id(client->session_id);
  v1::ReleaseResponse released;
  for (int i = 0; i < 10; ++i) {
    EXPECT_TRUE(client->stub().Release(TestClient::Deadline().get(), release, &released).ok());
  }
}

TEST_F(ServiceTest, ActsOfAdminsAndRefusedSessionsAreAudited) {
  const auto client = NewClient();
  TestClient stranger(config_.server.run_dir);
  testing::internal::CaptureStderr();
  v1::GetStatusResponse looked;
  EXPECT_TRUE(client->admin().GetStatus(TestClient::Deadline().get(), {}, &looked).ok());
  v1::FlushResponse flushed;
  EXPECT_TRUE(client->admin().Flush(TestClient::Deadline().get(), {}, &flushed).ok());
  EXPECT_FALSE(stranger.Open("no token"));
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_THAT(log, testing::ContainsRegex("audit who=admin.sock peer=\"?unix:.* what=Flush "
                                          "outcome=OK"));
  EXPECT_THAT(log, testing::HasSubstr("audit who=\"client test\" peer=unix what=OpenSession "
                                      "outcome=\"PERMISSION_DENIED: token"));
  EXPECT_THAT(log, testing::Not(testing::HasSubstr("GetStatus"))) << "looking is no act";
}

TEST_F(ServiceTest, ContextsPauseAndResumeForReal) {
  const auto client = NewClient();
  const auto keys = TestChain(1, 4);
  client->Put(keys);
  auto create = client->Ask<v1::CreateContextRequest>();
  create.set_context("agent");
  v1::CreateContextResponse created;
  ASSERT_TRUE(client->stub().CreateContext(TestClient::Deadline().get(), create, &created).ok());
  auto append = client->Ask<v1::AppendContextRequest>();
  append.set_context("agent");
  append.set_keys(PackKeys(keys));
  v1::AppendContextResponse appended;
  ASSERT_TRUE(client->stub().AppendContext(TestClient::Deadline().get(), append, &appended).ok());
  EXPECT_EQ(appended.block_count(), 4U);

  auto pause = client->Ask<v1::PauseContextRequest>();
  pause.set_context("agent");
  v1::PauseContextResponse paused;
  ASSERT_TRUE(client->stub().PauseContext(TestClient::Deadline().get(), pause, &paused).ok());
  EXPECT_EQ(paused.freed_bytes(), 4U * kBytes);
  EXPECT_EQ(paused.resident_bytes(), 0U);
  EXPECT_THAT(client->Lookup(keys), Each(Eq(kResidentHost)));

  auto resume = client->Ask<v1::ResumeContextRequest>();
  resume.set_context("agent");
  v1::ResumeContextResponse resumed;
  ASSERT_TRUE(client->stub().ResumeContext(TestClient::Deadline().get(), resume, &resumed).ok());
  EXPECT_EQ(resumed.ticket().covered_block_count(), 4U);
  EXPECT_TRUE(Eventually([&](const core::CoreCounters&) {
    return client->Lookup(keys) == std::vector<uint8_t>(4, kResidentHbm);
  }));

  auto fork = client->Ask<v1::ForkContextRequest>();
  fork.set_parent_context("agent");
  fork.set_context("sub-agent");
  fork.set_block_count(5);
  v1::ForkContextResponse forked;
  const grpc::Status beyond =
      client->stub().ForkContext(TestClient::Deadline().get(), fork, &forked);
  EXPECT_EQ(beyond.error_code(), grpc::StatusCode::OUT_OF_RANGE);
  EXPECT_EQ(ReasonFrom(beyond), reason::kContextRange);

  v1::ListContextsResponse contexts;
  ASSERT_TRUE(client->admin().ListContexts(TestClient::Deadline().get(), {}, &contexts).ok());
  ASSERT_EQ(contexts.contexts_size(), 1);
  EXPECT_EQ(contexts.contexts(0).context(), "agent");
  EXPECT_EQ(contexts.contexts(0).hbm_block_count(), 4U);

  auto close = client->Ask<v1::CloseContextRequest>();
  close.set_context("agent");
  close.set_drop(true);
  v1::CloseContextResponse closed;
  ASSERT_TRUE(client->stub().CloseContext(TestClient::Deadline().get(), close, &closed).ok());
  EXPECT_TRUE(client->Lookup(keys).empty());
}

TEST_F(ServiceTest, WriteAndReadByValue) {
  const auto client = NewClient();
  // 24 blocks of 64 KiB: more than one chunk.
  const auto keys = TestChain(1, 24);
  std::string payloads;
  for (const Key& key : keys) payloads += TestPayload(key, kBytes);
  std::string crc32cs = PackTestCrcs(keys, kBytes);
  crc32cs[4 * 20] = static_cast<char>(crc32cs[4 * 20] ^ 1);

  auto context = TestClient::Deadline();
  v1::WriteResponse written;
  const auto writer = client->stub().Write(context.get(), &written);
  v1::WriteRequest request;
  *request.mutable_header() = client->Ask<v1::WriteHeader>();
  request.mutable_header()->set_keys(PackKeys(keys));
  request.mutable_header()->set_crc32cs(crc32cs);
  request.set_chunk(payloads.substr(0, 1000));
  ASSERT_TRUE(writer->Write(request));
  for (size_t at = 1000; at < payloads.size(); at += kChunkBytesMax) {
    request.Clear();
    request.set_chunk(payloads.substr(at, kChunkBytesMax));
    ASSERT_TRUE(writer->Write(request));
  }
  writer->WritesDone();
  const grpc::Status status = writer->Finish();
  ASSERT_TRUE(status.ok()) << status.error_message();
  std::string expected(24, static_cast<char>(BlockStatus::kOk));
  expected[20] = static_cast<char>(BlockStatus::kCorrupt);
  EXPECT_EQ(written.statuses(), expected);
  EXPECT_EQ(written.epoch(), client->epoch);

  auto read = client->Ask<v1::ReadRequest>();
  read.set_keys(PackKeys(keys));
  auto read_context = TestClient::Deadline();
  const auto reader = client->stub().Read(read_context.get(), read);
  v1::ReadResponse response;
  std::string received;
  ASSERT_TRUE(reader->Read(&response));
  EXPECT_EQ(response.header().statuses().size(), 24U);
  EXPECT_EQ(response.header().statuses()[20], static_cast<char>(BlockStatus::kMiss));
  do {
    EXPECT_LE(response.chunk().size(), kChunkBytesMax);
    received += response.chunk();
  } while (reader->Read(&response));
  EXPECT_TRUE(reader->Finish().ok());
  EXPECT_EQ(received, payloads.substr(0, 20 * kBytes));
  EXPECT_EQ(Counters().lease_count, 0U);
  EXPECT_EQ(Counters().pending_fill_count, 0U);
  EXPECT_EQ(Counters().session_count, 1U);
}

TEST_F(ServiceTest, BrokenWritesLeaveNothing) {
  const auto client = NewClient();
  const auto keys = TestChain(1, 2);
  const auto write = [&](const std::function<void(v1::WriteRequest*)>& change) {
    auto context = TestClient::Deadline();
    v1::WriteResponse written;
    const auto writer = client->stub().Write(context.get(), &written);
    v1::WriteRequest request;
    *request.mutable_header() = client->Ask<v1::WriteHeader>();
    request.mutable_header()->set_keys(PackKeys(keys));
    request.mutable_header()->set_crc32cs(PackTestCrcs(keys, kBytes));
    request.set_chunk(TestPayload(keys[0], kBytes) + TestPayload(keys[1], kBytes));
    change(&request);
    writer->Write(request);
    writer->WritesDone();
    return writer->Finish();
  };
  const auto bad = grpc::StatusCode::INVALID_ARGUMENT;
  EXPECT_EQ(write([](auto* r) { r->clear_header(); }).error_code(), bad);
  EXPECT_EQ(write([](auto* r) { r->mutable_chunk()->pop_back(); }).error_code(), bad);
  EXPECT_EQ(write([](auto* r) { r->mutable_chunk()->push_back('x'); }).error_code(), bad);
  EXPECT_EQ(write([](auto* r) { r->mutable_header()->mutable_keys()->pop_back(); }).error_code(),
            bad);
  EXPECT_EQ(write([](auto* r) { r->mutable_header()->clear_crc32cs(); }).error_code(), bad);
  EXPECT_EQ(write([](auto* r) { r->set_chunk(std::string(kChunkBytesMax + 1, 'x')); }).error_code(),
            bad);
  EXPECT_EQ(ReasonFrom(write([](auto* r) { r->mutable_header()->set_session_id(1); })),
            reason::kSessionUnknown);
  EXPECT_TRUE(client->Lookup(keys).empty());
  EXPECT_TRUE(Eventually([](const core::CoreCounters& counters) {
    return counters.pending_fill_count == 0 && counters.session_count == 1;
  }));
  EXPECT_TRUE(write([](auto*) {}).ok());
  EXPECT_EQ(client->Lookup(keys).size(), 2U);
}

TEST_F(ServiceTest, AbandonedStreamsLeaveNothing) {
  const auto client = NewClient();
  const auto keys = TestChain(1, 2);
  auto context = TestClient::Deadline();
  v1::WriteResponse written;
  auto writer = client->stub().Write(context.get(), &written);
  v1::WriteRequest request;
  *request.mutable_header() = client->Ask<v1::WriteHeader>();
  request.mutable_header()->set_keys(PackKeys(keys));
  request.mutable_header()->set_crc32cs(PackTestCrcs(keys, kBytes));
  ASSERT_TRUE(writer->Write(request));
  EXPECT_TRUE(Eventually([](const auto& counters) { return counters.pending_fill_count == 2; }));
  context->TryCancel();
  EXPECT_EQ(writer->Finish().error_code(), grpc::StatusCode::CANCELLED);
  EXPECT_TRUE(Eventually([](const auto& counters) {
    return counters.pending_fill_count == 0 && counters.session_count == 1;
  }));
}

TEST_F(ServiceTest, ErrorsCarryTheirReason) {
  const auto client = NewClient();
  const auto keys = TestChain(1, 1);
  auto lookup = client->Ask<v1::LookupRequest>();
  v1::LookupResponse response;
  const auto ask = [&] {
    return client->stub().Lookup(TestClient::Deadline().get(), lookup, &response);
  };
  lookup.set_session_id(client->session_id + 1);
  EXPECT_EQ(ask().error_code(), grpc::StatusCode::ABORTED);
  EXPECT_EQ(ReasonFrom(ask()), reason::kSessionUnknown);
  lookup.set_session_id(client->session_id);
  lookup.set_namespace_id(client->namespace_id + 1);
  EXPECT_EQ(ask().error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_EQ(ReasonFrom(ask()), reason::kNamespaceUnknown);
  lookup.set_namespace_id(client->namespace_id);
  lookup.set_keys("not 32 bytes");
  EXPECT_EQ(ask().error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(ReasonFrom(ask()), reason::kBadArgument);
  lookup.set_keys(std::string(32 * (kKeysPerCallMax + 1), 'k'));
  EXPECT_EQ(ask().error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  lookup.set_keys(std::string(32 * kKeysPerCallMax, 'k'));
  EXPECT_TRUE(ask().ok());

  auto pause = client->Ask<v1::PauseContextRequest>();
  v1::PauseContextResponse paused;
  for (const std::string& name : {std::string(), std::string(129, 'a'), std::string("a\nb")}) {
    pause.set_context(name);
    EXPECT_EQ(
        client->stub().PauseContext(TestClient::Deadline().get(), pause, &paused).error_code(),
        grpc::StatusCode::INVALID_ARGUMENT);
  }
  pause.set_context("nobody");
  EXPECT_EQ(ReasonFrom(client->stub().PauseContext(TestClient::Deadline().get(), pause, &paused)),
            reason::kContextUnknown);
  v1::GetTicketRequest ticket;
  ticket.set_session_id(client->session_id);
  ticket.set_ticket_id(1);
  v1::GetTicketResponse state;
  EXPECT_EQ(ReasonFrom(client->stub().GetTicket(TestClient::Deadline().get(), ticket, &state)),
            reason::kTicketUnknown);
  auto commit = client->Ask<v1::CommitRequest>();
  commit.set_keys(PackKeys(keys));
  v1::CommitResponse committed;
  EXPECT_EQ(client->stub().Commit(TestClient::Deadline().get(), commit, &committed).error_code(),
            grpc::StatusCode::INVALID_ARGUMENT);
  auto reserve = client->Ask<v1::ReserveRequest>();
  reserve.set_keys(PackKeys(keys));
  reserve.set_tier(v1::TIER_NVME);
  v1::ReserveResponse reserved;
  EXPECT_EQ(client->stub().Reserve(TestClient::Deadline().get(), reserve, &reserved).error_code(),
            grpc::StatusCode::INVALID_ARGUMENT);
}

TEST_F(ServiceTest, EnginesThatHashDifferentlyAreToldAndKeptApart) {
  const auto client = NewClient();
  v1::RegisterLayoutRequest request;
  request.set_session_id(client->session_id);
  *request.mutable_layout() = TestClient::RawLayout(4096);
  const auto registered = [&](const std::string& name, const std::string& probe) {
    request.mutable_hash_domain()->set_name(name);
    request.mutable_hash_domain()->set_probe(probe);
    v1::RegisterLayoutResponse response;
    const grpc::Status status =
        client->stub().RegisterLayout(TestClient::Deadline().get(), request, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return response;
  };
  const auto first = registered("vllm/sha256", "seed 0");
  EXPECT_FALSE(first.hash_domain_differs());
  EXPECT_FALSE(registered("vllm/sha256", "seed 0").hash_domain_differs());
  EXPECT_FALSE(registered("sglang", "seed 1").hash_domain_differs()) << "another domain";
  const auto other = registered("vllm/sha256", "seed 1");
  EXPECT_TRUE(other.hash_domain_differs());
  EXPECT_NE(other.namespace_hash(), first.namespace_hash());
  EXPECT_NE(other.namespace_id(), first.namespace_id());
  for (const auto& [name, probe] : {std::pair{"", "x"}, std::pair{"x", ""}, std::pair{"", ""}}) {
    request.mutable_hash_domain()->set_name(name);
    request.mutable_hash_domain()->set_probe(probe);
    v1::RegisterLayoutResponse response;
    EXPECT_EQ(
        ReasonFrom(client->stub().RegisterLayout(TestClient::Deadline().get(), request, &response)),
        reason::kBadArgument);
  }
}

TEST_F(ServiceTest, SessionsNeedATokenOfTheirOwn) {
  TestClient client(config_.server.run_dir);
  EXPECT_FALSE(client.Open(""));
  EXPECT_EQ(ReasonFrom(client.AwaitStreamEnd()), reason::kTokenUnknown);
  const std::string token = client.TakeToken();
  ASSERT_TRUE(client.Open(token));
  TestClient thief(config_.server.run_dir);
  EXPECT_FALSE(thief.Open(token));
  EXPECT_EQ(thief.AwaitStreamEnd().error_code(), grpc::StatusCode::PERMISSION_DENIED);
  // A token dies with its connection.
  const std::string orphan = thief.TakeToken();
  thief.CloseHandleSocket();
  EXPECT_TRUE(Eventually([&](const auto&) {
    TestClient late(config_.server.run_dir);
    return !late.Open(orphan);
  }));
}

TEST_F(ServiceTest, TheEndOfASessionReleasesWhatItHeld) {
  auto client = NewClient();
  const auto keys = TestChain(1, 2);
  client->Put(keys);
  v1::AcquireResponse lease;
  ASSERT_TRUE(client->Acquire(keys, &lease).ok());
  auto reserve = client->Ask<v1::ReserveRequest>();
  reserve.set_keys(PackKeys(TestChain(2, 3)));
  v1::ReserveResponse reserved;
  ASSERT_TRUE(client->stub().Reserve(TestClient::Deadline().get(), reserve, &reserved).ok());
  EXPECT_EQ(Counters().pending_fill_count, 3U);

  client->CloseStream();
  EXPECT_TRUE(Eventually([](const core::CoreCounters& counters) {
    return counters.session_count == 0 && counters.pending_fill_count == 0;
  }));
  // The process may still write into its slots.
  EXPECT_GT(Counters().tiers[0].quarantined_bytes, 0U);
  client->CloseHandleSocket();
  EXPECT_TRUE(Eventually([](const core::CoreCounters& counters) {
    return counters.lease_count == 0 && counters.tiers[0].quarantined_bytes == 0 &&
           counters.tiers[0].pinned_bytes == 0;
  }));
  const auto next = NewClient();
  EXPECT_EQ(next->Lookup(keys).size(), 2U);
  EXPECT_THAT(next->Put(TestChain(2, 3)), Each(BlockStatus::kOk));
}

TEST_F(ServiceTest, ACancelledWaitHoldsNothing) {
  const auto client = NewClient();
  // Memory is full of leases.
  const auto keys = TestChain(1, 48);
  client->Put(keys);
  v1::AcquireResponse lease;
  ASSERT_TRUE(client->Acquire(keys, &lease).ok());
  auto reserve = client->Ask<v1::ReserveRequest>();
  reserve.set_keys(PackKeys(TestChain(2, 1)));
  v1::ReserveResponse reserved;
  auto context = TestClient::Deadline(300);
  std::jthread canceller([&] { context->TryCancel(); });
  EXPECT_FALSE(client->stub().Reserve(context.get(), reserve, &reserved).ok());
  canceller.join();
  v1::ReleaseRequest release;
  release.set_session_id(client->session_id);
  release.add_lease_ids(lease.lease_id());
  v1::ReleaseResponse released;
  EXPECT_TRUE(client->stub().Release(TestClient::Deadline().get(), release, &released).ok());
  // The wait may be answered yet; what it got is given back.
  EXPECT_TRUE(Eventually([&](const core::CoreCounters&) {
    return client->Put(TestChain(2, 1)) == std::vector<BlockStatus>{BlockStatus::kOk};
  }));
  EXPECT_TRUE(Eventually([](const auto& counters) { return counters.pending_fill_count == 0; }));
}

TEST_F(ServiceTest, AWaitEndsAtTheDeadlineWithAnAnswer) {
  const auto client = NewClient();
  const auto keys = TestChain(1, 48);
  client->Put(keys);
  v1::AcquireResponse lease;
  ASSERT_TRUE(client->Acquire(keys, &lease).ok());
  auto reserve = client->Ask<v1::ReserveRequest>();
  reserve.set_keys(PackKeys(TestChain(2, 1)));
  v1::ReserveResponse reserved;
  const grpc::Status status =
      client->stub().Reserve(TestClient::Deadline(400).get(), reserve, &reserved);
  ASSERT_TRUE(status.ok()) << status.error_message();
  const auto places = UnpackRecords<BlockResult>(reserved.results(), "results").value();
  EXPECT_EQ(places[0].status, BlockStatus::kExhausted);
}

TEST_F(ServiceTest, AdminSeesTiersAndBlocks) {
  const auto client = NewClient();
  const auto keys = TestChain(1, 3);
  client->Put(keys);
  v1::GetStatusResponse status;
  ASSERT_TRUE(client->admin().GetStatus(TestClient::Deadline().get(), {}, &status).ok());
  EXPECT_EQ(status.epoch(), daemon_->epoch());
  EXPECT_EQ(status.device(), "cpu");
  EXPECT_EQ(status.session_count(), 1U);
  EXPECT_EQ(status.block_count(), 3U);
  EXPECT_EQ(status.tier_healths_size(), 3);
  v1::FlushResponse flushed;
  ASSERT_TRUE(client->admin().Flush(TestClient::Deadline().get(), {}, &flushed).ok());
  EXPECT_EQ(flushed.flushed_block_count(), 3U);
  v1::GetTiersResponse tiers;
  ASSERT_TRUE(client->admin().GetTiers(TestClient::Deadline().get(), {}, &tiers).ok());
  ASSERT_EQ(tiers.tiers_size(), 3);
  EXPECT_EQ(tiers.tiers(0).block_count(), 3U);
  EXPECT_EQ(tiers.tiers(0).used_bytes(), 3U * kBytes);
  EXPECT_EQ(tiers.tiers(2).block_count(), 3U);
  EXPECT_EQ(tiers.links_size(), 6);
  EXPECT_EQ(tiers.store().committed_bytes(), 3U * kBytes);
  v1::WhereRequest where;
  where.set_key(std::string(keys[2].AsBytes()));
  v1::WhereResponse found;
  ASSERT_TRUE(client->admin().Where(TestClient::Deadline().get(), where, &found).ok());
  ASSERT_EQ(found.blocks_size(), 1);
  EXPECT_THAT(found.blocks(0).tiers(), ElementsAre(v1::TIER_HBM, v1::TIER_NVME));
  EXPECT_EQ(found.blocks(0).state(), "committed");
  where.set_key(std::string(32, 'x'));
  EXPECT_EQ(ReasonFrom(client->admin().Where(TestClient::Deadline().get(), where, &found)),
            reason::kKeyUnknown);
  where.set_context("both");
  EXPECT_EQ(client->admin().Where(TestClient::Deadline().get(), where, &found).error_code(),
            grpc::StatusCode::INVALID_ARGUMENT);
}

TEST_F(ServiceTest, ARestartServesWhatWasWrittenToNvme) {
  const auto keys = TestChain(1, 5);
  {
    const auto client = NewClient();
    client->Put(keys);
    const uint64_t first_epoch = daemon_->epoch();
    daemon_->Stop();
    EXPECT_EQ(ReasonFrom(client->AwaitStreamEnd()), reason::kDraining);
    daemon_.reset();
    Start();
    EXPECT_NE(daemon_->epoch(), first_epoch);
  }
  const auto client = NewClient();
  EXPECT_THAT(client->Lookup(keys), Each(Eq(kResidentNvme)));
  EXPECT_EQ(client->Lookup(keys).size(), 5U);
  v1::AcquireResponse lease;
  ASSERT_TRUE(client->Acquire(keys, &lease).ok());
  EXPECT_EQ(lease.crc32cs(), PackTestCrcs(keys, kBytes));
  Drop(keys, *client);
}

TEST_F(ServiceTest, HealthSaysNotServingBeforeTheEnd) {
  for (const char* socket : {"/kvtierd.sock", "/admin.sock"}) {
    HealthWatch unknown(config_.server.run_dir + socket, "nobody");
    EXPECT_EQ(unknown.NextStatus(), 3);
  }
  HealthWatch readiness(config_.server.run_dir + "/kvtierd.sock", "readiness");
  HealthWatch overall(config_.server.run_dir + "/kvtierd.sock", "");
  HealthWatch service(config_.server.run_dir + "/admin.sock", "kvtier.v1.ContextStoreService");
  HealthWatch liveness(config_.server.run_dir + "/admin.sock", "liveness");
  HealthWatch* const ready[] = {&readiness, &overall, &service};
  for (HealthWatch* watch : ready) EXPECT_EQ(watch->NextStatus(), 1);
  EXPECT_EQ(liveness.NextStatus(), 1);
  std::jthread stopper([this] { daemon_->Stop(); });
  for (HealthWatch* watch : ready) EXPECT_EQ(watch->NextStatus(), 2);
  stopper.join();
  EXPECT_EQ(liveness.NextStatus(), -1);
}

TEST_F(ServiceTest, AnotherDaemonIsRefused) {
  EXPECT_EQ(Daemon::Start(config_).status().code(), absl::StatusCode::kFailedPrecondition);
  Config other = config_;
  other.server.run_dir = folder_.path() + "/run2";
  EXPECT_EQ(Daemon::Start(other).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(NewClient()->Put(TestChain(1, 1)), ElementsAre(BlockStatus::kOk));
}

TEST_F(ServiceTest, QuotasHoldAndAreTold) {
  daemon_.reset();
  TenantConfig us{.name = "default"};
  us.quotas[0] = TierShare{.bytes = 2 * kBytes};
  us.quotas[1] = TierShare{.bytes = kBytes};
  TenantConfig other{.name = "other", .uids = {4242}};
  other.reserves[1] = TierShare{.percent = 12.5};
  config_.tenants = {us, other};
  Start();
  const auto client = NewClient();
  const auto reserve = [&](uint32_t seed, size_t count, v1::ReserveResponse* response) {
    auto request = client->Ask<v1::ReserveRequest>();
    request.set_keys(PackKeys(TestChain(seed, count)));
    return client->stub().Reserve(TestClient::Deadline(300).get(), request, response);
  };
  v1::ReserveResponse reserved;
  ASSERT_TRUE(reserve(1, 4, &reserved).ok());
  const auto results = UnpackRecords<BlockResult>(reserved.results(), "results");
  ASSERT_TRUE(results.ok());
  std::vector<std::pair<BlockStatus, uint8_t>> places;
  for (const BlockResult& result : *results) places.emplace_back(result.status, result.tier);
  const auto hbm = std::pair(BlockStatus::kOk, uint8_t{1});
  EXPECT_EQ(places, (std::vector{hbm, hbm, std::pair(BlockStatus::kOk, uint8_t{2}),
                                 std::pair(BlockStatus::kExhausted, uint8_t{0})}));
  const grpc::Status refused = reserve(2, 1, &reserved);
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(ReasonFrom(refused), reason::kQuotaReached);

  v1::ListTenantsResponse tenants;
  ASSERT_TRUE(client->admin()
                  .ListTenants(TestClient::Deadline().get(), v1::ListTenantsRequest(), &tenants)
                  .ok());
  ASSERT_EQ(tenants.tenants_size(), 2);
  EXPECT_EQ(tenants.tenants(0).tenant(), "default");
  EXPECT_EQ(tenants.tenants(0).tiers(0).used_bytes(), 2 * kBytes);
  EXPECT_EQ(tenants.tenants(0).tiers(0).pinned_bytes(), 2 * kBytes);
  EXPECT_EQ(tenants.tenants(0).tiers(1).quota_bytes(), kBytes);
  EXPECT_FALSE(tenants.tenants(0).tiers(2).has_quota_bytes());
  EXPECT_EQ(tenants.tenants(1).tenant(), "other");
  EXPECT_EQ(tenants.tenants(1).tiers(1).reserve_bytes(), config_.host.segment_bytes);
}

}  // namespace
}  // namespace kvtier
