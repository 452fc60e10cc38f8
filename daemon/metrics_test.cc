// SPDX-License-Identifier: Apache-2.0
#include "daemon/metrics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <sstream>

namespace kvtier {
namespace {

using ::testing::HasSubstr;
using ::testing::MatchesRegex;
using ::testing::Not;

v1::GetTiersResponse Tiers() {
  v1::GetTiersResponse tiers;
  for (const v1::Tier tier : {v1::TIER_HBM, v1::TIER_HOST, v1::TIER_NVME}) {
    tiers.add_tiers()->set_tier(tier);
    for (const v1::Tier target : {v1::TIER_HBM, v1::TIER_HOST, v1::TIER_NVME}) {
      if (target == tier) continue;
      v1::LinkStats* link = tiers.add_links();
      link->set_source(tier);
      link->set_target(target);
    }
  }
  tiers.mutable_tiers(0)->set_capacity_bytes(4096);
  tiers.mutable_tiers(1)->set_used_bytes(1ULL << 40);
  tiers.mutable_tiers(1)->set_hit_block_count(7);
  tiers.mutable_links(2)->set_moved_bytes(11);
  tiers.mutable_store()->set_lookup_block_count(10);
  tiers.mutable_store()->set_lookup_hit_block_count(7);
  return tiers;
}

v1::ListTenantsResponse Tenants() {
  v1::ListTenantsResponse tenants;
  for (const char* name : {"default", "engines"}) {
    v1::TenantInfo* tenant = tenants.add_tenants();
    tenant->set_tenant(name);
    for (const v1::Tier tier : {v1::TIER_HBM, v1::TIER_HOST, v1::TIER_NVME}) {
      tenant->add_tiers()->set_tier(tier);
    }
  }
  tenants.mutable_tenants(1)->mutable_tiers(0)->set_quota_bytes(0);
  tenants.mutable_tenants(1)->mutable_tiers(1)->set_displaced_block_count(5);
  return tenants;
}

v1::GetStatusResponse Status() {
  v1::GetStatusResponse status;
  status.set_version("1.2.3");
  status.set_device("cpu");
  status.set_uptime_ms(61'500);
  v1::TierHealth* health = status.add_tier_healths();
  health->set_tier(v1::TIER_NVME);
  health->set_degraded(true);
  return status;
}

TEST(MetricsTest, SamplesHaveTheirLabelsAndValues) {
  const std::string text = MetricsText(Status(), Tiers(), Tenants());
  for (const char* line : {
           "kvtier_build_info{version=\"1.2.3\",device=\"cpu\",io_engine=\"\"} 1\n",
           "kvtier_uptime_seconds 61\n",
           "kvtier_tier_healthy{tier=\"nvme\"} 0\n",
           "kvtier_tier_used_bytes{tier=\"host\"} 1099511627776\n",
           "kvtier_tier_used_bytes{tier=\"hbm\"} 0\n",
           "kvtier_lookup_hit_blocks_total{tier=\"host\"} 7\n",
           "kvtier_lookup_blocks_total 10\n",
           "kvtier_lookup_miss_blocks_total 3\n",
           "kvtier_transfer_bytes_total{src=\"host\",dst=\"hbm\"} 11\n",
           "kvtier_tenant_quota_bytes{tenant=\"default\",tier=\"hbm\"} 4096\n",
           "kvtier_tenant_quota_bytes{tenant=\"engines\",tier=\"hbm\"} 0\n",
           "kvtier_tenant_displaced_blocks_total{tenant=\"engines\",tier=\"host\"} 5\n",
           "kvtier_tenant_displaced_blocks_total{tenant=\"default\",tier=\"host\"} 0\n",
           "kvtier_acquired_blocks_total{path=\"after_read\"} 0\n",
       }) {
    EXPECT_THAT(text, HasSubstr(line));
  }
  EXPECT_THAT(text, Not(HasSubstr("unknown")));
}

// The rules of names: one prefix, base units, _total on counters and on nothing else.
TEST(MetricsTest, NamesFollowTheRules) {
  std::istringstream lines(MetricsText(Status(), Tiers(), Tenants()));
  std::set<std::string> names;
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string hash;
    std::string what;
    std::string name;
    std::string type;
    words >> hash >> what >> name >> type;
    if (what != "TYPE") continue;
    EXPECT_TRUE(names.insert(name).second) << name << " is there twice";
    EXPECT_THAT(name, MatchesRegex("kvtier_[a-z_]+"));
    EXPECT_EQ(name.ends_with("_total"), type == "counter") << name;
    EXPECT_THAT(name, Not(MatchesRegex(".*_(ms|us|kb|mib|percent)(_.*|$)")));
  }
  EXPECT_GE(names.size(), 30U);
}

}  // namespace
}  // namespace kvtier
