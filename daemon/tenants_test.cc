// SPDX-License-Identifier: Apache-2.0
#include "daemon/tenants.h"

#include <gtest/gtest.h>

namespace kvtier {
namespace {

TEST(TenantTableTest, MapsUidsToTenantsAndRefusesStrangers) {
  Config config;
  config.tenants = {{.name = "a", .uids = {1001, 1002}}, {.name = "default", .uids = {7}}};
  const TenantTable table(config, 1000);
  EXPECT_EQ(table.OwnerOf(0), 0U);
  EXPECT_EQ(table.OwnerOf(1000), 0U);
  EXPECT_EQ(table.OwnerOf(7), 0U);
  EXPECT_EQ(table.OwnerOf(1002), 1U);
  EXPECT_EQ(table.OwnerOf(1003), std::nullopt);
  EXPECT_EQ(table.Name(0), "default");
  EXPECT_EQ(table.Name(1), "a");
}

TEST(TenantTableTest, MapsNamesOfCertificatesToTenantsAndAdmins) {
  Config config;
  config.server.default_tenant_uids = "any";
  config.tenants = {{.name = "a", .certificates = {"spiffe://d/a", "dns:a.test"}},
                    {.name = "b", .certificates = {"dns:b.test"}}};
  config.admins = {{.name = "operator", .certificates = {"cn:me"}}};
  const TenantTable table(config, 1000);
  const auto owner_of = [&table](const std::vector<std::string>& names) {
    return table.OwnerOf(names);
  };
  EXPECT_EQ(owner_of({"dns:x.test", "dns:a.test"}), 1U);
  EXPECT_EQ(owner_of({"dns:b.test"}), 2U);
  EXPECT_EQ(owner_of({"dns:a.test", "dns:b.test"}), std::nullopt) << "of two tenants";
  EXPECT_EQ(owner_of({"cn:a.test"}), std::nullopt) << "the kind is part of the name";
  EXPECT_EQ(owner_of({"cn:me"}), std::nullopt) << "an admin is no tenant";
  EXPECT_EQ(owner_of({}), std::nullopt);
  EXPECT_EQ(table.AdminOf(std::vector<std::string>{"dns:x.test", "cn:me"}), "operator");
  EXPECT_EQ(table.AdminOf(std::vector<std::string>{"dns:a.test"}), "");
}

TEST(TenantTableTest, AnyUidIsDefaultWhenConfiguredSo) {
  Config config;
  config.server.default_tenant_uids = "any";
  config.tenants = {{.name = "a", .uids = {0, 1001}}};
  const TenantTable table(config, 1000);
  EXPECT_EQ(table.OwnerOf(4242), 0U);
  // A tenant that names root or the daemon's own uid has it.
  EXPECT_EQ(table.OwnerOf(0), 1U);
}

}  // namespace
}  // namespace kvtier
