// SPDX-License-Identifier: Apache-2.0
#include "client/ctl/format.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "client/ctl/table.h"
#include "client/ctl/traffic_meter.h"

namespace kvtier::ctl {
namespace {

v1::GetStatusResponse Status() {
  v1::GetStatusResponse status;
  status.set_epoch(0xAB);
  status.set_version("0.1.0");
  status.set_uptime_ms(3'723'000);
  status.set_device("cpu");
  status.set_io_engine("io_uring");
  status.set_session_count(2);
  status.set_context_count(12'345);
  status.set_block_count(7);
  status.set_pid(4711);
  v1::TierHealth* hbm = status.add_tier_healths();
  hbm->set_tier(v1::TIER_HBM);
  v1::TierHealth* nvme = status.add_tier_healths();
  nvme->set_tier(v1::TIER_NVME);
  nvme->set_degraded(true);
  nvme->set_reason("no space left on device");
  return status;
}

v1::GetTiersResponse Tiers() {
  v1::GetTiersResponse tiers;
  tiers.set_epoch(1);
  v1::TierStats* hbm = tiers.add_tiers();
  hbm->set_tier(v1::TIER_HBM);
  hbm->set_capacity_bytes(64 << 20);
  hbm->set_used_bytes(16 << 20);
  hbm->set_block_count(4'096);
  hbm->set_hit_block_count(10);
  v1::LinkStats* link = tiers.add_links();
  link->set_source(v1::TIER_HBM);
  link->set_target(v1::TIER_HOST);
  link->set_moved_bytes(1'536);
  link->set_moved_block_count(1);
  tiers.mutable_store()->set_lookup_block_count(20);
  tiers.mutable_store()->set_lookup_hit_block_count(10);
  return tiers;
}

v1::ListContextsResponse Contexts() {
  v1::ListContextsResponse contexts;
  contexts.set_epoch(1);
  contexts.set_total_count(2);
  v1::ContextInfo* context = contexts.add_contexts();
  context->set_context("agent-00001");
  context->set_tenant("default");
  context->set_state("paused");
  context->set_block_count(100);
  context->set_host_block_count(90);
  context->set_missing_block_count(10);
  context->set_idle_ms(61'000);
  return contexts;
}

v1::WhereResponse Where() {
  v1::WhereResponse where;
  where.set_epoch(1);
  v1::BlockInfo* block = where.add_blocks();
  block->set_key(std::string(32, '\x5a'));
  block->set_depth(3);
  block->set_bytes(2'304);
  block->add_tiers(v1::TIER_HBM);
  block->add_tiers(v1::TIER_NVME);
  block->set_lease_count(1);
  block->set_use_count(4);
  block->set_state("committed");
  return where;
}

TEST(FormatTest, StatusText) {
  EXPECT_EQ(StatusText(Status()),
            "kvtierd 0.1.0, pid 4711, degraded for 1h 2m\n"
            "  epoch     00000000000000ab\n"
            "  device    cpu, nvme by io_uring\n"
            "  sessions  2\n"
            "  contexts  12,345\n"
            "  blocks    7\n"
            "  hbm       ok\n"
            "  nvme      DEGRADED: no space left on device\n");
}

TEST(FormatTest, StatusTextNamesADirectoryThatIsOfNoUse) {
  v1::GetStatusResponse status = Status();
  status.mutable_tier_healths(1)->set_degraded(false);
  status.mutable_tier_healths(1)->set_reason("/drive1: no such device");
  const std::string text = StatusText(status);
  EXPECT_NE(text.find("  nvme      ok, without /drive1: no such device\n"), std::string::npos)
      << text;
  EXPECT_NE(text.find("serving"), std::string::npos) << text;
}

TEST(FormatTest, StatusJson) {
  EXPECT_EQ(StatusJson(Status()).dump(),
            R"({"version":"0.1.0","epoch":"00000000000000ab","pid":4711,"uptime_ms":3723000,)"
            R"("device":"cpu","io_engine":"io_uring","draining":false,"session_count":2,)"
            R"("context_count":12345,"block_count":7,"tiers":[)"
            R"({"tier":"hbm","degraded":false,"reason":""},)"
            R"({"tier":"nvme","degraded":true,"reason":"no space left on device"}]})");
}

TEST(FormatTest, TiersText) {
  EXPECT_EQ(TiersText(Tiers()),
            "TIER  CAPACITY      USED     FULL  PINNED  BLOCKS  HITS  EVICTED  CORRUPT  STATE\n"
            "hbm   64.0 MiB  16.0 MiB  25.00 %     0 B   4,096    10        0        0  ok\n"
            "\n"
            "LINK           MOVED  BLOCKS  FAILED  IN FLIGHT\n"
            "hbm -> host  1.5 KiB       1       0          0\n"
            "\n"
            "BLOCKS               COUNT\n"
            "looked up               20\n"
            "found                   10\n"
            "committed                0\n"
            "leased in place          0\n"
            "leased after a read      0\n");
}

v1::ListTenantsResponse TenantsResponse() {
  v1::ListTenantsResponse response;
  response.set_epoch(0xE);
  v1::TenantInfo* tenant = response.add_tenants();
  tenant->set_tenant("engines");
  v1::TenantTier* hbm = tenant->add_tiers();
  hbm->set_tier(v1::TIER_HBM);
  hbm->set_used_bytes(3 << 20);
  hbm->set_quota_bytes(4 << 20);
  hbm->set_reserve_bytes(1 << 20);
  hbm->set_pinned_bytes(1 << 10);
  hbm->set_block_count(3);
  hbm->set_displaced_block_count(2);
  tenant->add_tiers()->set_tier(v1::TIER_NVME);
  v1::TenantTier* nobody = response.add_unclaimed();
  nobody->set_tier(v1::TIER_NVME);
  return response;
}

TEST(FormatTest, TenantsText) {
  v1::ListTenantsResponse response = TenantsResponse();
  EXPECT_EQ(TenantsText(response),
            "TENANT   TIER     USED    QUOTA  RESERVE   PINNED  BLOCKS  DISPLACED\n"
            "engines  hbm   3.0 MiB  4.0 MiB  1.0 MiB  1.0 KiB       3          2\n"
            "engines  nvme      0 B        -        -      0 B       0          0\n");
  response.mutable_unclaimed(0)->set_block_count(7);
  EXPECT_NE(TenantsText(response).find("(unclaimed)"), std::string::npos);
}

TEST(FormatTest, TenantsJson) {
  const Json json = TenantsJson(TenantsResponse());
  EXPECT_EQ(json["tenants"][0]["tenant"], "engines");
  EXPECT_EQ(json["tenants"][0]["tiers"][0].dump(),
            R"({"tier":"hbm","used_bytes":3145728,"quota_bytes":4194304,"reserve_bytes":1048576,)"
            R"("pinned_bytes":1024,"block_count":3,"displaced_block_count":2})");
  EXPECT_EQ(json["tenants"][0]["tiers"][1]["quota_bytes"], nullptr);
  EXPECT_EQ(json["unclaimed"].size(), 1U);
}

TEST(FormatTest, TiersJson) {
  EXPECT_EQ(
      TiersJson(Tiers()).dump(),
      R"({"epoch":"0000000000000001","tiers":[{"tier":"hbm","capacity_bytes":67108864,)"
      R"("used_bytes":16777216,"pinned_bytes":0,"quarantined_bytes":0,"physical_bytes":0,)"
      R"("ready_bytes":0,"block_count":4096,"hit_block_count":10,"evicted_block_count":0,)"
      R"("corrupt_block_count":0,"degraded":false}],"links":[{"source":"hbm","target":"host",)"
      R"("moved_bytes":1536,"moved_block_count":1,"failed_block_count":0,"inflight_count":0}],)"
      R"("store":{"lookup_block_count":20,"lookup_hit_block_count":10,)"
      R"("committed_block_count":0,"committed_bytes":0,"acquired_in_place_block_count":0,)"
      R"("acquired_after_read_block_count":0,"lease_count":0,"pending_fill_count":0,)"
      R"("admission_rejected_block_count":0}})");
}

TEST(FormatTest, TiersJsonOfNvme) {
  v1::GetTiersResponse response;
  v1::TierStats* const tier = response.add_tiers();
  tier->set_tier(v1::TIER_NVME);
  v1::NvmeStats* const nvme = tier->mutable_nvme();
  nvme->set_io_engine("pread, without io_uring: no");
  nvme->set_registered_bytes(1);
  nvme->set_direct(true);
  nvme->set_segment_count(2);
  nvme->set_written_bytes(3);
  nvme->set_moved_bytes(4);
  nvme->set_useful_read_bytes(5);
  nvme->set_written_today_bytes(6);
  nvme->set_write_bytes_per_day_max(7);
  nvme->set_scrubbed_block_count(8);
  nvme->set_scrub_lost_block_count(9);
  nvme->set_scrub_round_count(10);
  nvme->set_recovered_block_count(11);
  nvme->set_dropped_block_count(12);
  nvme->set_rebuilt(true);
  v1::NvmeDirectory* const directory = nvme->add_directories();
  directory->set_path("/a");
  directory->set_failure("gone");
  directory->set_capacity_bytes(13);
  directory->set_used_bytes(14);
  directory->set_physical_bytes(15);
  EXPECT_EQ(TiersJson(response)["tiers"][0]["nvme"].dump(),
            R"({"io_engine":"pread, without io_uring: no","registered_bytes":1,"direct":true,)"
            R"("segment_count":2,"written_bytes":3,"moved_bytes":4,"useful_read_bytes":5,)"
            R"("written_today_bytes":6,"write_bytes_per_day_max":7,"scrubbed_block_count":8,)"
            R"("scrub_lost_block_count":9,"scrub_round_count":10,"recovered_block_count":11,)"
            R"("dropped_block_count":12,"rebuilt":true,"directories":[{"path":"/a",)"
            R"("failure":"gone","capacity_bytes":13,"used_bytes":14,"physical_bytes":15}]})");
}

TEST(FormatTest, ContextsTextSaysWhatItLeftOut) {
  EXPECT_EQ(ContextsText(Contexts()),
            "CONTEXT      TENANT   STATE   BLOCKS  HBM  HOST  NVME  MISSING   IDLE\n"
            "agent-00001  default  paused     100    0    90     0       10  1m 1s\n"
            "1 more\n");
}

TEST(FormatTest, ContextsJson) {
  EXPECT_EQ(ContextsJson(Contexts()).dump(),
            R"({"epoch":"0000000000000001","total_count":2,"contexts":[)"
            R"({"context":"agent-00001","tenant":"default","state":"paused","block_count":100,)"
            R"("hbm_block_count":0,"host_block_count":90,"nvme_block_count":0,)"
            R"("missing_block_count":10,"idle_ms":61000}]})");
}

TEST(FormatTest, WhereText) {
  EXPECT_EQ(WhereText(Where()),
            "DEPTH  KEY                                                               BYTES"
            "  STATE      TIERS     LEASES  USES\n"
            "    3  5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a  2,304"
            "  committed  hbm+nvme       1     4\n");
}

TEST(FormatTest, WhereJson) {
  EXPECT_EQ(WhereJson(Where()).dump(),
            R"({"epoch":"0000000000000001","blocks":[{"key":)"
            R"("5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a",)"
            R"("depth":3,"bytes":2304,"state":"committed","tiers":["hbm","nvme"],)"
            R"("lease_count":1,"use_count":4}]})");
}

TEST(TableTest, HumanNumbers) {
  EXPECT_EQ(HumanBytes(0), "0 B");
  EXPECT_EQ(HumanBytes(1'023), "1023 B");
  EXPECT_EQ(HumanBytes(1'536), "1.5 KiB");
  EXPECT_EQ(HumanBytes(300ULL << 30), "300 GiB");
  EXPECT_EQ(HumanDuration(999), "0s");
  EXPECT_EQ(HumanDuration(59'000), "59s");
  EXPECT_EQ(HumanDuration(90'061'000), "1d 1h");
  EXPECT_EQ(HumanCount(999), "999");
  EXPECT_EQ(HumanCount(1'234'567), "1,234,567");
  EXPECT_EQ(HumanShare(0.0345), "3.45 %");
}

v1::GetTiersResponse Moved(uint64_t epoch, uint64_t bytes) {
  v1::GetTiersResponse tiers;
  tiers.set_epoch(epoch);
  v1::LinkStats* link = tiers.add_links();
  link->set_source(v1::TIER_HOST);
  link->set_target(v1::TIER_NVME);
  link->set_moved_bytes(bytes);
  link->set_moved_block_count(bytes / 10);
  return tiers;
}

TEST(TrafficMeterTest, AddsUpOverRestartsWithoutWhatWasBefore) {
  TrafficMeter meter;
  meter.Add(Moved(7, 100));
  meter.Add(Moved(7, 150));
  meter.Add(Moved(8, 20));
  meter.Add(Moved(8, 30));
  const std::vector<LinkTraffic> totals = meter.Totals();
  ASSERT_EQ(totals.size(), 1U);
  EXPECT_EQ(totals[0].moved_bytes, 80U);
  EXPECT_EQ(totals[0].moved_block_count, 8U);
}

}  // namespace
}  // namespace kvtier::ctl
