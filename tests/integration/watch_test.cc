// SPDX-License-Identifier: Apache-2.0
//
// What a watching client knows against what a daemon has, over overflow, restart and tenants.
#include "client/include/kvtier/watch.h"

#include <gtest/gtest.h>

#include <map>

#include "client/include/kvtier/client.h"
#include "daemon/service_fixture.h"

namespace kvtier {
namespace {

constexpr uint32_t kNextMs = 10'000;

class WatchTest : public ServiceFixture {
 protected:
  std::unique_ptr<client::Client> Connect() {
    auto client = client::Client::Connect({.run_dir = config_.server.run_dir});
    EXPECT_TRUE(client.ok()) << client.status();
    return std::move(client).value();
  }

  static std::unique_ptr<client::Watch> StartWatch(client::Client* client) {
    auto watch = client::Watch::Start(client);
    EXPECT_TRUE(watch.ok()) << watch.status();
    return std::move(watch).value();
  }

  // Takes updates until `done` is true of what is known, or ten seconds without one are over.
  bool Take(client::Watch* watch, const std::function<bool()>& done) {
    while (!done()) {
      const auto update = watch->Next(kNextMs);
      if (absl::IsUnavailable(update.status())) continue;
      if (!update.ok()) {
        ADD_FAILURE() << update.status();
        return false;
      }
      if (update->reset) {
        known_.clear();
        ++reset_count_;
      }
      if (update->lost) ++lost_count_;
      complete_ = update->complete;
      epoch_ = update->epoch;
      for (const client::WatchedBlocks& blocks : update->blocks) {
        for (const Key& key : blocks.keys) {
          const auto bit = static_cast<uint8_t>(blocks.tier);
          known_[key] =
              static_cast<uint8_t>(blocks.stored ? known_[key] | bit : known_[key] & ~bit);
        }
      }
    }
    return true;
  }

  bool TakeSnapshot(client::Watch* watch) {
    complete_ = false;
    return Take(watch, [&] { return complete_; });
  }

  uint8_t Known(const Key& key) {
    const auto found = known_.find(key);
    return found == known_.end() ? uint8_t{0} : found->second;
  }

  std::map<Key, uint8_t> known_;
  bool complete_ = false;
  uint64_t epoch_ = 0;
  int reset_count_ = 0;
  int lost_count_ = 0;
};

TEST_F(WatchTest, TellsWhatIsStoredThenWhatChanges) {
  const auto engine = NewClient();
  const auto before = TestChain(1, 3);
  engine->Put(before);
  const auto client = Connect();
  const auto watch = StartWatch(client.get());
  ASSERT_TRUE(TakeSnapshot(watch.get()));
  EXPECT_EQ(reset_count_, 1);
  for (const Key& key : before) EXPECT_EQ(Known(key), kResidentHbm);
  const auto after = TestChain(2, 2);
  engine->Put(after);
  EXPECT_TRUE(Take(watch.get(), [&] { return Known(after[1]) == kResidentHbm; }));
  Drop({after[1]}, *engine);
  EXPECT_TRUE(Take(watch.get(), [&] { return Known(after[1]) == 0; }));
  EXPECT_EQ(Known(after[0]), kResidentHbm);
  EXPECT_EQ(reset_count_, 1);
}

TEST_F(WatchTest, KnowsWhatLookupFindsWhereverBlocksMove) {
  const auto engine = NewClient();
  const auto client = Connect();
  const auto watch = StartWatch(client.get());
  std::vector<Key> keys;
  for (uint32_t seed = 0; seed < 80; ++seed) {
    keys.push_back(TestChain(seed, 1)[0]);
    ASSERT_EQ(engine->Put({keys.back()}), std::vector{BlockStatus::kOk});
  }
  const auto agrees = [&] {
    for (const Key& key : keys) {
      const std::vector<uint8_t> found = engine->Lookup({key});
      if (Known(key) != (found.empty() ? 0 : found[0])) return false;
    }
    return true;
  };
  EXPECT_TRUE(Take(watch.get(), agrees));
}

TEST_F(WatchTest, ANewDaemonIsANewEpochWithItsOwnSnapshot) {
  const auto chain = TestChain(1, 2);
  const auto client = Connect();
  const auto watch = StartWatch(client.get());
  {
    const auto engine = NewClient();
    engine->Put(chain);
    ASSERT_TRUE(Take(watch.get(), [&] { return Known(chain[1]) == kResidentHbm; }));
  }
  const uint64_t first_epoch = epoch_;
  daemon_.reset();
  Start();
  ASSERT_TRUE(Take(watch.get(), [&] { return epoch_ != first_epoch && complete_; }));
  EXPECT_EQ(reset_count_, 2);
  EXPECT_EQ(Known(chain[1]), kResidentNvme) << "written when the first one stopped";
}

TEST_F(WatchTest, WhoDoesNotReadLosesEventsAndNobodyElseNotices) {
  const auto engine = NewClient();
  v1::WatchRequest watch_request;
  watch_request.set_session_id(engine->session_id);
  const auto context = TestClient::Deadline(60'000);
  const auto stream = engine->stub().Watch(context.get(), watch_request);
  v1::WatchResponse response;
  ASSERT_TRUE(stream->Read(&response));
  EXPECT_TRUE(response.snapshot_begins() && response.snapshot_ends());
  // More than the stream buffers and the daemon keeps.
  const auto keys = TestChain(1, 12);
  for (int i = 0; i < 1500; ++i) {
    ASSERT_EQ(engine->Put(keys).size(), keys.size());
    Drop(keys, *engine);
  }
  bool lost = false;
  while (!lost && stream->Read(&response)) lost = response.lost();
  ASSERT_TRUE(lost);
  ASSERT_TRUE(stream->Read(&response));
  EXPECT_TRUE(response.snapshot_begins() && response.snapshot_ends());
  context->TryCancel();
  (void)stream->Finish();
}

TEST_F(WatchTest, GoesOnFromWhereItWas) {
  const auto engine = NewClient();
  v1::WatchRequest request;
  request.set_session_id(engine->session_id);
  v1::WatchResponse response;
  {
    const auto context = TestClient::Deadline();
    const auto stream = engine->stub().Watch(context.get(), request);
    ASSERT_TRUE(stream->Read(&response));
    context->TryCancel();
    (void)stream->Finish();
  }
  const auto chain = TestChain(1, 2);
  engine->Put(chain);
  request.set_after_epoch(response.epoch());
  request.set_after_sequence(response.sequence());
  const auto context = TestClient::Deadline();
  const auto stream = engine->stub().Watch(context.get(), request);
  ASSERT_TRUE(stream->Read(&response));
  EXPECT_FALSE(response.is_snapshot() || response.lost());
  ASSERT_EQ(response.blocks_size(), 1);
  EXPECT_EQ(response.blocks(0).keys(), PackKeys(chain));
  EXPECT_EQ(response.blocks(0).parent_keys(), std::string(32, 0) + PackKeys({chain[0]}));
  EXPECT_EQ(response.sequence(), request.after_sequence() + 2);
  engine->CloseStream();
  while (stream->Read(&response)) {
  }
  EXPECT_FALSE(stream->Finish().ok()) << "it ends with its session";
}

}  // namespace
}  // namespace kvtier
