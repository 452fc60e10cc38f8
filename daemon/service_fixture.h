// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "daemon/daemon.h"
#include "daemon/monotonic.h"
#include "daemon/test_client.h"
#include "tiers/tier_test_util.h"

namespace kvtier {

// A whole daemon in the test's process, with room for 16 and 32 blocks of kBytes, spoken to over
// its sockets.
class ServiceFixture : public testing::Test {
 protected:
  static constexpr uint32_t kBytes = 64 << 10;

  void SetUp() override {
    config_.server.run_dir = folder_.path() + "/run";
    config_.server.data_dir = folder_.path() + "/data";
    config_.server.drain_timeout_ms = 5000;
    // Nothing is demoted before they are full.
    config_.hbm = {.capacity_bytes = 1 << 20,
                   .segment_bytes = 256 << 10,
                   .high_watermark = 1,
                   .low_watermark = 1};
    config_.host = {.capacity_bytes = 2 << 20,
                    .segment_bytes = 256 << 10,
                    .high_watermark = 1,
                    .low_watermark = 1};
    config_.nvme.capacity_bytes = 64 << 20;
    config_.nvme.segment_bytes = 4 << 20;
    Start();
  }

  void Start() {
    auto daemon = Daemon::Start(config_);
    ASSERT_TRUE(daemon.ok()) << daemon.status();
    daemon_ = std::move(daemon).value();
  }

  std::unique_ptr<TestClient> NewClient() {
    auto client = std::make_unique<TestClient>(config_.server.run_dir);
    client->OpenWithLayout(kBytes);
    return client;
  }

  core::CoreCounters Counters() {
    return daemon_->store().Run(
        [](core::StoreCore& core, core::TimeMs, core::Effects*) { return core.Counters(); });
  }

  // Polls the counters; false after ten seconds.
  bool Eventually(const std::function<bool(const core::CoreCounters&)>& holds) {
    const uint64_t deadline_ms = MonotonicMs() + 10'000;
    while (MonotonicMs() < deadline_ms) {
      if (holds(Counters())) return true;
      std::this_thread::yield();
    }
    return false;
  }

  void Drop(const std::vector<Key>& keys, TestClient& client) {
    auto request = client.Ask<v1::ReportBadRequest>();
    request.set_keys(PackKeys(keys));
    v1::ReportBadResponse response;
    EXPECT_TRUE(client.stub().ReportBad(TestClient::Deadline().get(), request, &response).ok());
  }

  TempFolder folder_;
  Config config_;
  std::unique_ptr<Daemon> daemon_;
};

}  // namespace kvtier
