// SPDX-License-Identifier: Apache-2.0
//
// The HTTP port of a whole daemon, beside the admin service.
#include "daemon/status_page.h"

#include <gmock/gmock.h>
#include <google/protobuf/util/json_util.h>
#include <gtest/gtest.h>

#include "absl/strings/str_format.h"
#include "daemon/daemon.h"
#include "daemon/http_test_client.h"
#include "daemon/test_client.h"
#include "tiers/tier_test_util.h"

namespace kvtier {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

constexpr uint32_t kBytes = 64 << 10;

class MonitoringTest : public testing::Test {
 protected:
  void SetUp() override {
    config_.server.run_dir = folder_.path() + "/run";
    config_.server.data_dir = folder_.path() + "/data";
    config_.hbm = {.capacity_bytes = 1 << 20, .segment_bytes = 256 << 10};
    config_.host = {.capacity_bytes = 2 << 20, .segment_bytes = 256 << 10};
    config_.nvme.capacity_bytes = 64 << 20;
    config_.nvme.segment_bytes = 4 << 20;
    config_.metrics.listen = "127.0.0.1:0";
    auto daemon = Daemon::Start(config_);
    ASSERT_TRUE(daemon.ok()) << daemon.status();
    daemon_ = std::move(daemon).value();
  }

  std::string Get(const std::string& path) const {
    return HttpTestClient::Get(daemon_->http_port(), path);
  }

  TempFolder folder_;
  Config config_;
  std::unique_ptr<Daemon> daemon_;
};

TEST_F(MonitoringTest, MetricsAreTheCountersOfTheAdminService) {
  TestClient client(config_.server.run_dir);
  client.OpenWithLayout(kBytes);
  const std::vector<Key> keys = TestChain(1, 6);
  client.Put({keys.begin(), keys.begin() + 4});
  client.Lookup(keys);
  client.Lookup(keys);

  v1::GetTiersResponse tiers;
  ASSERT_TRUE(
      client.admin().GetTiers(TestClient::Deadline().get(), v1::GetTiersRequest(), &tiers).ok());
  EXPECT_EQ(tiers.store().lookup_block_count(), 12U);
  const std::string text = Get("/metrics");
  EXPECT_THAT(text, StartsWith("HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4"));
  EXPECT_THAT(text, HasSubstr("kvtier_lookup_blocks_total 12\n"));
  EXPECT_THAT(text, HasSubstr("kvtier_lookup_miss_blocks_total 4\n"));
  uint64_t hits = 0;
  for (const v1::TierStats& tier : tiers.tiers()) {
    hits += tier.hit_block_count();
    const std::string name = tier.tier() == v1::TIER_HBM    ? "hbm"
                             : tier.tier() == v1::TIER_HOST ? "host"
                                                            : "nvme";
    EXPECT_THAT(text, HasSubstr(absl::StrFormat("kvtier_lookup_hit_blocks_total{tier=\"%s\"} %d\n",
                                                name, tier.hit_block_count())));
  }
  EXPECT_EQ(hits, 8U);
  // Looking changes nothing.
  EXPECT_THAT(Get("/metrics"), HasSubstr("kvtier_lookup_blocks_total 12\n"));
}

TEST_F(MonitoringTest, ThePageAndItsNumbers) {
  EXPECT_THAT(Get("/"), HasSubstr("<title>kvtierd</title>"));
  // No resource from elsewhere, and no way to change anything.
  for (const char* forbidden : {"src=", "href=", "url(", "import", "<form", "method:"}) {
    EXPECT_THAT(std::string(kStatusPage), Not(HasSubstr(forbidden)));
  }
  const std::string json = Get("/status.json");
  EXPECT_THAT(json, HasSubstr("\"tier\":\"TIER_HBM\""));
  EXPECT_THAT(json, HasSubstr("\"capacity_bytes\":\"1048576\""));
  EXPECT_THAT(json, HasSubstr("\"device\":\"cpu\""));
}

TEST_F(MonitoringTest, ReadyWhileItServes) {
  EXPECT_THAT(Get("/readyz"), StartsWith("HTTP/1.1 200 "));
  const uint16_t port = daemon_->http_port();
  EXPECT_NE(port, 0);
  daemon_->Stop();
  EXPECT_EQ(daemon_->http_port(), 0);
}

TEST_F(MonitoringTest, APortThatIsTakenRefusesTheStart) {
  Config second = config_;
  second.server.run_dir = folder_.path() + "/run2";
  second.server.data_dir = folder_.path() + "/data2";
  second.metrics.listen = absl::StrFormat("127.0.0.1:%d", daemon_->http_port());
  const auto refused = Daemon::Start(second);
  ASSERT_FALSE(refused.ok());
  EXPECT_THAT(std::string(refused.status().message()), StartsWith("metrics.listen: listen on"));
}

}  // namespace
}  // namespace kvtier
