// SPDX-License-Identifier: Apache-2.0
//
// The envelope of hints, as JSON through the client library to a daemon.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "client/include/kvtier/client.h"
#include "daemon/service_fixture.h"
#include "proto/base/status_util.h"

namespace kvtier {
namespace {

using ::testing::HasSubstr;

class HintsTest : public ServiceFixture {
 protected:
  void SetUp() override {
#ifdef __SANITIZE_THREAD__
    GTEST_SKIP() << "the map of Debian's libprotobuf and one compiled for ThreadSanitizer are not "
                    "the same: the first entry crashes, in one thread";
#endif
    ServiceFixture::SetUp();
    auto client = client::Client::Connect({.run_dir = config_.server.run_dir});
    ASSERT_TRUE(client.ok()) << client.status();
    client_ = std::move(client).value();
    Layout layout;
    layout.model = "hints";
    layout.layer_count = 1;
    layout.kv_head_count = 1;
    layout.head_dim = 64;
    layout.block_tokens = 16;
    layout.codec = Codec::kRaw;
    layout.raw_block_bytes = kBytes;
    auto ns = client_->RegisterLayout(layout);
    ASSERT_TRUE(ns.ok()) << ns.status();
    ns_ = *ns;
    for (uint32_t i = 0; i < 3; ++i) {
      chain_.push_back(HashBlock(ns_.hash,
                                 chain_.empty() ? std::nullopt : std::optional(chain_.back()),
                                 std::span(&i, 1)));
    }
    const std::vector<std::byte> bytes(size_t{kBytes} * chain_.size());
    ASSERT_TRUE(client_->Write(ns_, std::nullopt, chain_, bytes).ok());
    ASSERT_TRUE(client_->CreateContext(ns_, "agent").ok());
    ASSERT_TRUE(client_->AppendContext(ns_, "agent", 0, chain_).ok());
  }

  // The outcome of one action.
  client::HintOutcome Apply(const std::string& type, const std::string& payload,
                            const std::string& version = "1.0",
                            const std::string& protocol = "0.1") {
    const auto outcomes = client_->ApplyHints(
        ns_, absl::StrFormat(R"({"protocol_version":"%s","message_id":"m","actions":[)"
                             R"({"action_id":"a7","action_type":"%s","action_version":"%s",)"
                             R"("payload":%s}]})",
                             protocol, type, version, payload));
    EXPECT_TRUE(outcomes.ok()) << outcomes.status();
    if (!outcomes.ok() || outcomes->size() != 1) return {};
    EXPECT_EQ((*outcomes)[0].action_id, "a7");
    return (*outcomes)[0];
  }

  static std::string Hashes(std::span<const Key> keys) {
    std::string list;
    for (const Key& key : keys) list += (list.empty() ? "\"" : ",\"") + key.Hex() + "\"";
    return "\"block_hashes\":[" + list + "]";
  }

  std::unique_ptr<client::Client> client_;
  client::Namespace ns_;
  std::vector<Key> chain_;
};

TEST_F(HintsTest, FetchesAndRetainsChainsAndContexts) {
  const client::HintOutcome fetched =
      Apply("kv.fetch", "{" + Hashes(chain_) + R"(,"needed_in_ms":50,"unknown":[1]})");
  EXPECT_EQ(fetched.outcome, "accepted") << fetched.detail;
  EXPECT_NE(fetched.ticket_id, 0U);
  EXPECT_TRUE(client_->GetTicket(fetched.ticket_id).ok());
  EXPECT_EQ(Apply("kv.fetch", R"({"context":"agent"})").outcome, "accepted");
  EXPECT_EQ(Apply("kv.retain", "{" + Hashes(chain_) + R"(,"retain_ms":60000})").outcome,
            "accepted");
  std::vector<Key> longer = chain_;
  longer.push_back(Key{});
  EXPECT_EQ(Apply("kv.fetch", "{" + Hashes(longer) + "}").outcome, "clipped");
  EXPECT_EQ(Apply("kv.fetch", "{" + Hashes(std::array{Key{}}) + "}").outcome, "missing");
  EXPECT_EQ(Apply("kv.fetch", R"({"context":"nobody"})").outcome, "missing");
}

TEST_F(HintsTest, FollowsAContext) {
  const client::HintOutcome paused =
      Apply("kv.pause", R"({"context":"agent","expected_resume_ms":2000,"next_step":"tool"})");
  EXPECT_TRUE(paused.outcome == "accepted" || paused.outcome == "deferred") << paused.detail;
  EXPECT_TRUE(Eventually([](const core::CoreCounters& counters) {
    return counters.tiers[0].block_count == 0;
  })) << "its blocks have left hbm";
  EXPECT_EQ(Apply("kv.resume", R"({"context":"agent","needed_in_ms":10})").outcome, "accepted");
  EXPECT_EQ(Apply("kv.finish", R"({"context":"agent","drop":true})").outcome, "accepted");
  EXPECT_EQ(Apply("kv.finish", R"({"context":"agent"})").outcome, "missing");
  EXPECT_EQ(client_->Lookup(ns_, chain_)->size(), 0U) << "dropped";
}

TEST_F(HintsTest, TruncatesAContext) {
  const std::string type = "kv.truncate";
  EXPECT_EQ(Apply(type, R"({"context":"agent","block_count":1})").outcome, "accepted");
  const client::HintOutcome longer = Apply(type, R"({"context":"agent","block_count":2})");
  EXPECT_EQ(longer.outcome, "rejected");
  EXPECT_THAT(longer.detail, HasSubstr("has 1 blocks"));
  EXPECT_EQ(Apply(type, R"({"context":"agent"})").outcome, "rejected");
  EXPECT_EQ(client_->Lookup(ns_, chain_)->size(), 3U) << "the blocks are still stored";
}

TEST_F(HintsTest, WhatIsNotUnderstoodIsRejectedWithAReason) {
  EXPECT_EQ(Apply("kv.levitate", "{}").outcome, "rejected");
  EXPECT_EQ(Apply("kv.fetch", "{}", "2.0").outcome, "rejected");
  EXPECT_EQ(Apply("kv.fetch", "{}", "1.0", "1.0").outcome, "rejected");
  for (const char* payload :
       {"{}", R"({"context":7})", R"({"context":""})", R"({"block_hashes":[]})",
        R"({"block_hashes":["zz"]})", R"({"context":"agent","needed_in_ms":-1})",
        R"({"context":"agent","needed_in_ms":"soon"})"}) {
    const client::HintOutcome outcome = Apply("kv.fetch", payload);
    EXPECT_EQ(outcome.outcome, "rejected") << payload;
    EXPECT_THAT(outcome.detail, HasSubstr("payload.")) << payload;
  }
  EXPECT_EQ(Apply("kv.pause", R"({"context":"agent","next_step":"nap"})").outcome, "rejected");
  EXPECT_EQ(client_->ApplyHints(ns_, "not JSON").status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(client_->ApplyHints(ns_, R"({"protocol_version":"0.1"})")->size(), 0U);
}

}  // namespace
}  // namespace kvtier
