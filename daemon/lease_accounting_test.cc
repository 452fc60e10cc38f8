// SPDX-License-Identifier: Apache-2.0
//
// What leases, fills and prefetches pin is counted exactly: whatever clients do, in whatever order,
// nothing stays pinned or reserved that nobody holds.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <random>
#include <thread>

#include "daemon/service_fixture.h"

namespace kvtier {
namespace {

class LeaseAccountingTest : public ServiceFixture {
 protected:
  uint64_t PinnedBytes() {
    const core::CoreCounters counters = Counters();
    uint64_t bytes = 0;
    for (const core::TierCounters& tier : counters.tiers) {
      // A count that fell below 0 is one far above all there is.
      EXPECT_LE(tier.pinned_bytes, config_.host.capacity_bytes);
      EXPECT_LE(tier.quarantined_bytes, config_.host.capacity_bytes);
      bytes += tier.pinned_bytes + tier.quarantined_bytes;
    }
    return bytes;
  }

  // Nothing is leased, reserved or moving, and every slot in memory has its block.
  static bool IsAtRest(const core::CoreCounters& counters) {
    bool is_at_rest = counters.lease_count == 0 && counters.pending_fill_count == 0;
    for (const core::TierCounters& tier : counters.tiers) {
      is_at_rest &= tier.pinned_bytes == 0 && tier.quarantined_bytes == 0;
    }
    for (const auto& links : counters.links) {
      for (const core::LinkCounters& link : links) is_at_rest &= link.inflight_count == 0;
    }
    return is_at_rest;
  }

  void ExpectRest() {
    EXPECT_TRUE(Eventually(IsAtRest))
        << PinnedBytes() << " bytes are pinned, " << Counters().lease_count << " leases held, "
        << Counters().pending_fill_count << " blocks reserved";
    daemon_->store().Run(
        [](core::StoreCore& core, core::TimeMs, core::Effects*) { core.CheckInvariants(); });
    const auto client = NewClient();
    v1::GetTiersResponse tiers;
    ASSERT_TRUE(client->admin().GetTiers(TestClient::Deadline().get(), {}, &tiers).ok());
    for (const v1::TierStats& tier : tiers.tiers()) {
      if (tier.tier() == v1::TIER_NVME) continue;
      EXPECT_EQ(tier.used_bytes(), tier.block_count() * kBytes) << "a slot without a block";
    }
  }

  static uint64_t Acquire(TestClient& client, const std::vector<Key>& keys) {
    v1::AcquireResponse lease;
    EXPECT_TRUE(client.Acquire(keys, &lease).ok());
    return lease.lease_id();
  }

  static void Release(TestClient& client, const std::vector<uint64_t>& lease_ids) {
    v1::ReleaseRequest request;
    request.set_session_id(client.session_id);
    for (const uint64_t id : lease_ids) request.add_lease_ids(id);
    v1::ReleaseResponse response;
    EXPECT_TRUE(client.stub().Release(TestClient::Deadline().get(), request, &response).ok());
  }
};

TEST_F(LeaseAccountingTest, TenThousandLookupsPinNothing) {
  const auto keys = TestChain(1, 16);
  NewClient()->Put(std::vector<Key>(keys.begin(), keys.begin() + 12));
  std::vector<std::jthread> consumers;
  for (int i = 0; i < 8; ++i) {
    consumers.emplace_back([this, &keys] {
      const auto client = NewClient();
      for (int call = 0; call < 1250; ++call) ASSERT_EQ(client->Lookup(keys).size(), 12U);
      EXPECT_EQ(PinnedBytes(), 0U);
    });
  }
  consumers.clear();
  EXPECT_EQ(Counters().lookup_hit_block_count, 120'000U);
  ExpectRest();
}

TEST_F(LeaseAccountingTest, EveryAcquireCountsAndEveryLeaseEndsOnce) {
  const auto client = NewClient();
  const auto keys = TestChain(1, 4);
  client->Put(keys);
  std::vector<uint64_t> leases;
  for (int i = 0; i < 100; ++i) leases.push_back(Acquire(*client, keys));
  EXPECT_EQ(Counters().lease_count, 100U);
  EXPECT_EQ(PinnedBytes(), 4U * kBytes);

  Release(*client, {leases[0]});
  EXPECT_EQ(Counters().lease_count, 99U);
  // Again, and twice at once, and one that nobody has.
  Release(*client, {leases[0]});
  Release(*client, {leases[0], leases[0], leases[1], leases[1], 12345});
  EXPECT_EQ(Counters().lease_count, 98U);
  EXPECT_EQ(PinnedBytes(), 4U * kBytes) << "98 leases hold these blocks";

  Release(*client, {leases.begin(), leases.end() - 1});
  EXPECT_EQ(Counters().lease_count, 1U);
  EXPECT_EQ(PinnedBytes(), 4U * kBytes);
  Release(*client, leases);
  EXPECT_EQ(PinnedBytes(), 0U);
  Release(*client, leases);
  ExpectRest();
}

TEST_F(LeaseAccountingTest, NobodyEndsTheLeaseOfAnother) {
  const auto owner = NewClient();
  const auto other = NewClient();
  const auto keys = TestChain(1, 4);
  owner->Put(keys);
  const uint64_t lease = Acquire(*owner, keys);
  Release(*other, {lease});
  EXPECT_EQ(Counters().lease_count, 1U);
  EXPECT_EQ(PinnedBytes(), 4U * kBytes);
  Release(*owner, {lease});
  ExpectRest();
}

// One of several that share blocks: leases, gives back, gives back again, puts, gives up fills, and
// at last goes away with what it holds.
class Consumer {
 public:
  Consumer(std::unique_ptr<TestClient> client, std::vector<Key> chain, uint32_t seed)
      : client_(std::move(client)), chain_(std::move(chain)), random_(seed), seed_(seed) {}

  void Act() {
    switch (random_() % 6) {
      case 0:
      case 1:
        Acquire();
        break;
      case 2:
      case 3:
        Release();
        break;
      case 4:
        client_->Put(TestChain(1000 * seed_ + random_() % 8, 2));
        break;
      default:
        ReserveAndAbort();
    }
  }

 private:
  void Acquire() {
    const auto end = chain_.begin() + 1 + static_cast<std::ptrdiff_t>(random_() % chain_.size());
    v1::AcquireResponse lease;
    EXPECT_TRUE(client_->Acquire({chain_.begin(), end}, &lease).ok());
    leases_.push_back(lease.lease_id());
  }
  // One of those it had, ended or not.
  void Release() {
    if (leases_.empty()) return;
    v1::ReleaseRequest request;
    request.set_session_id(client_->session_id);
    request.add_lease_ids(leases_[random_() % leases_.size()]);
    v1::ReleaseResponse response;
    EXPECT_TRUE(client_->stub().Release(TestClient::Deadline().get(), request, &response).ok());
  }
  void ReserveAndAbort() {
    const std::string keys = PackKeys(TestChain(2000 + random_() % 4, 2));
    auto reserve = client_->Ask<v1::ReserveRequest>();
    reserve.set_keys(keys);
    v1::ReserveResponse reserved;
    EXPECT_TRUE(client_->stub().Reserve(TestClient::Deadline().get(), reserve, &reserved).ok());
    if (random_() % 4 == 0) return;  // its session's end gives them back
    auto abort = client_->Ask<v1::AbortRequest>();
    abort.set_keys(keys);
    v1::AbortResponse aborted;
    EXPECT_TRUE(client_->stub().Abort(TestClient::Deadline().get(), abort, &aborted).ok());
  }

  const std::unique_ptr<TestClient> client_;
  const std::vector<Key> chain_;
  std::mt19937 random_;
  const uint32_t seed_;
  std::vector<uint64_t> leases_;
};

TEST_F(LeaseAccountingTest, EightConsumersLeaveNothing) {
  const uint32_t seed = std::random_device()() % 100'000;
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  const auto chain = TestChain(1, 8);
  NewClient()->Put(chain);
  std::atomic<bool> is_over = false;
  std::jthread watcher([&] {
    while (!is_over) PinnedBytes();
  });
  {
    std::vector<std::jthread> threads;
    for (uint32_t i = 0; i < 8; ++i) {
      threads.emplace_back([this, &chain, i, seed] {
        Consumer consumer(NewClient(), chain, seed + i);
        for (int act = 0; act < 100; ++act) consumer.Act();
      });
    }
  }
  is_over = true;
  watcher.join();
  EXPECT_TRUE(Eventually([](const auto& counters) { return counters.session_count == 0; }));
  ExpectRest();
}

class PrefetchAccountingTest : public LeaseAccountingTest {
 protected:
  static uint64_t Prefetch(TestClient& client, const std::vector<Key>& keys) {
    auto request = client.Ask<v1::PrefetchRequest>();
    request.set_keys(PackKeys(keys));
    v1::PrefetchResponse response;
    EXPECT_TRUE(client.stub().Prefetch(TestClient::Deadline().get(), request, &response).ok());
    return response.ticket().ticket_id();
  }
  static void Cancel(TestClient& client, uint64_t ticket_id) {
    v1::CancelPrefetchRequest request;
    request.set_session_id(client.session_id);
    request.set_ticket_id(ticket_id);
    v1::CancelPrefetchResponse response;
    EXPECT_TRUE(
        client.stub().CancelPrefetch(TestClient::Deadline().get(), request, &response).ok());
  }
  // Moves the blocks of the context "all" out of hbm.
  static void Pause(TestClient& client) {
    auto request = client.Ask<v1::PauseContextRequest>();
    request.set_context("all");
    v1::PauseContextResponse response;
    EXPECT_TRUE(client.stub().PauseContext(TestClient::Deadline().get(), request, &response).ok());
  }
  static void MakeContext(TestClient& client, const std::vector<Key>& keys) {
    auto create = client.Ask<v1::CreateContextRequest>();
    create.set_context("all");
    v1::CreateContextResponse created;
    ASSERT_TRUE(client.stub().CreateContext(TestClient::Deadline().get(), create, &created).ok());
    auto append = client.Ask<v1::AppendContextRequest>();
    append.set_context("all");
    append.set_keys(PackKeys(keys));
    v1::AppendContextResponse appended;
    ASSERT_TRUE(client.stub().AppendContext(TestClient::Deadline().get(), append, &appended).ok());
  }
};

TEST_F(PrefetchAccountingTest, CancelledOnesLeaveNothing) {
  const auto keys = TestChain(1, 12);
  {
    const auto client = NewClient();
    client->Put(keys);
  }
  // From nvme at first, then from host.
  daemon_->Stop();
  daemon_.reset();
  Start();
  const auto client = NewClient();
  MakeContext(*client, keys);
  for (int round = 0; round < 50; ++round) {
    const uint64_t ticket = Prefetch(*client, keys);
    const uint64_t second = Prefetch(*client, keys);
    // Some of the blocks are there by then, some on their way.
    for (int i = 0; i < round % 5; ++i) client->Lookup(keys);
    Cancel(*client, ticket);
    Cancel(*client, ticket);
    Cancel(*client, second);
    Cancel(*client, 12345);
    Pause(*client);
  }
  ExpectRest();
  EXPECT_EQ(client->Lookup(keys).size(), keys.size());
}

TEST_F(PrefetchAccountingTest, SessionsThatEndInTheMiddleLeaveNothing) {
  const auto keys = TestChain(1, 12);
  const auto owner = NewClient();
  owner->Put(keys);
  MakeContext(*owner, keys);
  for (int round = 0; round < 20; ++round) {
    Pause(*owner);
    const auto client = NewClient();
    Prefetch(*client, keys);
  }
  EXPECT_TRUE(Eventually([](const auto& counters) { return counters.session_count == 1; }));
  ExpectRest();
}

}  // namespace
}  // namespace kvtier
