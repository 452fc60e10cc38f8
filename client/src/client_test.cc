// SPDX-License-Identifier: Apache-2.0
#include "client/include/kvtier/client.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cinttypes>
#include <cstdio>
#include <fstream>

#include "client/src/client_fixture.h"

namespace kvtier::client {
namespace {

using ClientTest = ClientFixture;

// The access bits of the mapping that holds `address`, e.g. "r--s".
std::string PermissionsAt(const void* address) {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    uintptr_t begin = 0;
    uintptr_t end = 0;
    char permissions[5] = {};
    if (std::sscanf(line.c_str(), "%" SCNxPTR "-%" SCNxPTR " %4s", &begin, &end, permissions) ==
            3 &&
        begin <= reinterpret_cast<uintptr_t>(address) &&
        reinterpret_cast<uintptr_t>(address) < end) {
      return permissions;
    }
  }
  return "unmapped";
}

TEST_F(ClientTest, RegistersALayoutOnce) {
  const auto client = Connect();
  EXPECT_EQ(client->epoch(), 1);
  const Namespace ns = Register(*client);
  const Layout layout = FakeDaemon::TestLayout();
  EXPECT_EQ(ns.block_bytes, FakeDaemon::kBlockBytes);
  EXPECT_EQ(ns.layout, layout.Fingerprint());
  EXPECT_EQ(ns.hash, HashNamespace(FakeDaemon::kTenant, layout.Fingerprint(), "", ""));
  EXPECT_EQ(Register(*client).client_idx, ns.client_idx);
  EXPECT_TRUE(client->Lookup(ns, {}).ok());
  EXPECT_EQ(daemon_->CallCount("RegisterLayout"), 1);
  const auto salted = client->RegisterLayout(layout, "", "salt");
  EXPECT_NE(salted->hash, ns.hash);
  EXPECT_NE(salted->client_idx, ns.client_idx);
}

TEST_F(ClientTest, FillsAndReadsBlocksInPlace) {
  const auto client = Connect();
  const Namespace ns = Register(*client);
  const std::vector<Key> keys = KeysFrom(ns, 0, 3);
  Store(*client, ns, std::span(keys).first(2), 40);

  const auto lease = client->Acquire(ns, keys);
  ASSERT_TRUE(lease.ok()) << lease.status();
  ASSERT_EQ(lease->blocks().size(), 3);
  EXPECT_EQ(lease->ok_prefix_count(), 2);
  EXPECT_TRUE(AllBytesAre(lease->blocks()[0].bytes, 40));
  EXPECT_TRUE(AllBytesAre(lease->blocks()[1].bytes, 41));
  EXPECT_EQ(lease->blocks()[0].tier, 1);
  EXPECT_EQ(lease->blocks()[2].status, BlockStatus::kMiss);
  EXPECT_TRUE(lease->blocks()[2].bytes.empty());
  EXPECT_TRUE(client->Verify(ns, keys[1], lease->blocks()[1]).ok());

  // The lease sees the daemon's memory itself.
  daemon_->segment()[0] = std::byte{99};
  EXPECT_EQ(lease->blocks()[0].bytes[0], std::byte{99});
  EXPECT_EQ(client->stats().copied_bytes, 0);
}

TEST_F(ClientTest, MapsEachSegmentOnceForEachUse) {
  const auto client = Connect();
  const Namespace ns = Register(*client);
  const std::vector<Key> keys = KeysFrom(ns, 0, 4);
  Store(*client, ns, std::span(keys).first(2));
  EXPECT_EQ(client->stats().mapped_segment_count, 1);
  Store(*client, ns, std::span(keys).subspan(2));
  EXPECT_EQ(client->stats().mapped_segment_count, 1);
  const auto lease = client->Acquire(ns, keys);
  EXPECT_EQ(client->stats().mapped_segment_count, 2);
  EXPECT_EQ(PermissionsAt(lease->blocks()[0].bytes.data()), "r--s");
  const auto fill = client->Reserve(ns, std::nullopt, KeysFrom(ns, 10, 1));
  EXPECT_EQ(PermissionsAt(fill->blocks[0].bytes.data()), "rw-s");
}

TEST_F(ClientTest, TellsASecondWriterThatTheBlockExists) {
  const auto client = Connect();
  const Namespace ns = Register(*client);
  const std::vector<Key> keys = KeysFrom(ns, 0, 2);
  Store(*client, ns, std::span(keys).first(1), 5);
  const auto fill = client->Reserve(ns, std::nullopt, keys);
  ASSERT_TRUE(fill.ok()) << fill.status();
  EXPECT_EQ(fill->blocks[0].status, BlockStatus::kExists);
  EXPECT_TRUE(fill->blocks[0].bytes.empty());
  const auto statuses = client->Commit(ns, *fill);
  EXPECT_EQ(*statuses, (std::vector{BlockStatus::kExists, BlockStatus::kOk}));
}

TEST_F(ClientTest, AbortGivesReservedBlocksBack) {
  const auto client = Connect();
  const Namespace ns = Register(*client);
  const std::vector<Key> keys = KeysFrom(ns, 0, 2);
  const auto fill = client->Reserve(ns, std::nullopt, keys);
  EXPECT_EQ(daemon_->pending().size(), 2);
  EXPECT_TRUE(client->Abort(ns, *fill).ok());
  EXPECT_EQ(daemon_->pending().size(), 0);
  EXPECT_EQ(*client->Commit(ns, *fill),
            (std::vector{BlockStatus::kPrecondition, BlockStatus::kPrecondition}));
}

TEST_F(ClientTest, LookupCountsThePrefix) {
  const auto client = Connect();
  const Namespace ns = Register(*client);
  const std::vector<Key> keys = KeysFrom(ns, 0, 3);
  Store(*client, ns, std::span(keys).first(2));
  EXPECT_EQ(*client->Lookup(ns, keys), (std::vector<uint8_t>{kResidentHbm, kResidentHbm}));
}

TEST_F(ClientTest, ALeaseEndsOnce) {
  const auto client = Connect();
  const Namespace ns = Register(*client);
  const std::vector<Key> keys = KeysFrom(ns, 0, 1);
  EXPECT_TRUE(client->Acquire(ns, keys).ok());
  EXPECT_EQ(daemon_->CallCount("Release"), 0) << "nothing was leased";
  Store(*client, ns, keys);
  {
    auto lease = client->Acquire(ns, keys);
    Lease moved = std::move(*lease);
    EXPECT_EQ(moved.blocks().size(), 1);
    Lease assigned;
    assigned = std::move(moved);
    EXPECT_EQ(daemon_->CallCount("Release"), 0);
    assigned.Release();
    EXPECT_EQ(assigned.blocks().size(), 0);
    assigned.Release();
  }
  EXPECT_EQ(daemon_->CallCount("Release"), 1);
}

TEST_F(ClientTest, VerifyReportsBytesThatDoNotMatch) {
  const auto client = Connect();
  const Namespace ns = Register(*client);
  const std::vector<Key> keys = KeysFrom(ns, 0, 2);
  Store(*client, ns, keys);
  const auto lease = client->Acquire(ns, keys);
  daemon_->segment()[FakeDaemon::kBlockBytes] ^= std::byte{1};
  EXPECT_TRUE(client->Verify(ns, keys[0], lease->blocks()[0]).ok());
  EXPECT_EQ(client->Verify(ns, keys[1], lease->blocks()[1]).code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(daemon_->reported(), std::set<Key>{keys[1]});
}

TEST_F(ClientTest, WritesAndReadsByValue) {
  const auto client = Connect();
  const Namespace ns = Register(*client);
  const std::vector<Key> keys = KeysFrom(ns, 0, 3);
  std::vector<std::byte> payloads(2 * FakeDaemon::kBlockBytes);
  for (size_t i = 0; i < payloads.size(); ++i) payloads[i] = std::byte(i * 31 >> 3);
  const auto statuses = client->Write(ns, std::nullopt, std::span(keys).first(2), payloads);
  ASSERT_TRUE(statuses.ok()) << statuses.status();
  EXPECT_EQ(*statuses, (std::vector{BlockStatus::kOk, BlockStatus::kOk}));
  EXPECT_EQ(client->stats().copied_bytes, payloads.size());
  const auto read = client->Read(ns, keys);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(*read, payloads);
  EXPECT_EQ(client->stats().copied_bytes, 2 * payloads.size());
  EXPECT_TRUE(client->Read(ns, std::span(keys).last(1))->empty());
  std::vector<std::byte> memory(3 * FakeDaemon::kBlockBytes, std::byte{0xEE});
  EXPECT_EQ(*client->ReadInto(ns, keys, memory), 2U);
  EXPECT_TRUE(std::ranges::equal(std::span(memory).first(payloads.size()), payloads));
  EXPECT_EQ(memory[payloads.size()], std::byte{0xEE});
  EXPECT_EQ(client->ReadInto(ns, keys, std::span(memory).subspan(1)).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(client->Write(ns, std::nullopt, keys, payloads).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST_F(ClientTest, CarriesContextsAndTickets) {
  const auto client = Connect();
  const Namespace ns = Register(*client);
  EXPECT_EQ(*client->CreateContext(ns, "chat"), 0);
  EXPECT_EQ(daemon_->CallCount("CreateContext chat"), 1);
  EXPECT_EQ(*client->AppendContext(ns, "chat", 5, KeysFrom(ns, 0, 2)), 7);
  const auto paused = client->PauseContext(ns, "chat", 1234);
  EXPECT_EQ(paused->freed_bytes, 1234);
  EXPECT_EQ(paused->resident_bytes, 9);
  EXPECT_EQ(client->ResumeContext(ns, "chat", 55)->eta_ms, 55);
  EXPECT_EQ(*client->ForkContext(ns, "chat", "fork", 3), 3);
  EXPECT_EQ(daemon_->CallCount("ForkContext chat fork"), 1);
  EXPECT_EQ(*client->CloseContext(ns, "fork", true), 11);
  EXPECT_EQ(*client->CloseContext(ns, "fork", false), 0);
  const auto ticket = client->Prefetch(ns, KeysFrom(ns, 0, 2));
  EXPECT_EQ(ticket->ticket_id, 1);
  EXPECT_EQ(ticket->block_count, 2);
  EXPECT_EQ(ticket->covered_block_count, 3);
  EXPECT_EQ(ticket->ready_block_count, 4);
  EXPECT_EQ(ticket->pending_bytes, 5);
  EXPECT_EQ(ticket->eta_ms, 6);
  EXPECT_TRUE(ticket->eta_known);
  EXPECT_FALSE(ticket->done);
  EXPECT_TRUE(client->GetTicket(1)->done);
  const auto unknown = client->GetTicket(2);
  EXPECT_EQ(unknown.status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(ReasonOf(unknown.status()), reason::kTicketUnknown);
}

TEST_F(ClientTest, RejectsBadArgumentsWithoutAsking) {
  ClientOptions options = Options();
  options.client_name.assign(129, 'x');
  EXPECT_EQ(Client::Connect(options).status().code(), absl::StatusCode::kInvalidArgument);
  options = Options();
  options.control_timeout_ms = 0;
  EXPECT_EQ(Client::Connect(options).status().code(), absl::StatusCode::kInvalidArgument);
  options = Options();
  options.run_dir.assign(200, 'x');
  EXPECT_EQ(Client::Connect(options).status().code(), absl::StatusCode::kInvalidArgument);

  const auto client = Connect();
  Layout layout = FakeDaemon::TestLayout();
  layout.layer_count = 0;
  EXPECT_EQ(client->RegisterLayout(layout).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(client->Lookup(Namespace(), {}).status().code(), absl::StatusCode::kInvalidArgument);
  const Namespace ns = Register(*client);
  Namespace foreign = ns;
  foreign.hash.bytes[0] ^= 1;
  EXPECT_EQ(client->Lookup(foreign, {}).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(client->Reserve(ns, std::nullopt, {}, 3).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(client->Verify(ns, Key(), MappedBlock()).code(), absl::StatusCode::kInvalidArgument);
  Fill fill;
  fill.keys.resize(1);
  EXPECT_EQ(client->Commit(ns, fill).status().code(), absl::StatusCode::kInvalidArgument);
  fill.blocks.resize(1);
  fill.blocks[0].status = BlockStatus::kOk;
  EXPECT_EQ(client->Commit(ns, fill).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(ClientTest, DoesNotWorkInAForkedChild) {
  auto client = Connect();
  const Namespace ns = Register(*client);
  const std::vector<Key> keys = KeysFrom(ns, 0, 1);
  Store(*client, ns, keys);
  auto lease = client->Acquire(ns, keys);
  const pid_t child = ::fork();
  if (child == 0) {
    const auto refuses = [](const absl::Status& status) {
      return status.code() == absl::StatusCode::kFailedPrecondition;
    };
    const bool refused = refuses(client->Lookup(ns, keys).status()) &&
                         refuses(client->Acquire(ns, keys).status()) &&
                         refuses(client->GetTicket(1).status()) &&
                         refuses(client->RegisterLayout(FakeDaemon::TestLayout()).status());
    lease->Release();
    client.reset();
    ::_exit(refused ? 0 : 1);
  }
  ASSERT_GT(child, 0);
  int state = 0;
  ASSERT_EQ(::waitpid(child, &state, 0), child);
  EXPECT_TRUE(WIFEXITED(state) && WEXITSTATUS(state) == 0) << state;
  EXPECT_EQ(daemon_->CallCount("Release"), 0);
  EXPECT_TRUE(client->Lookup(ns, keys).ok());
}

}  // namespace
}  // namespace kvtier::client
