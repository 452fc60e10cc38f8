// SPDX-License-Identifier: Apache-2.0
#include "daemon/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <sstream>

#include "proto/base/status_util.h"

namespace kvtier {
namespace {

using ::testing::HasSubstr;

// Loads `text` as the file.
absl::StatusOr<Config> LoadToml(const std::string& text) {
  const std::string path =
      absl::StrFormat("%s/kvtier-config-%d.toml", testing::TempDir(), getpid());
  std::ofstream(path) << text;
  auto config = LoadConfig({.file = path, .environment = {}, .flags = {}});
  std::remove(path.c_str());
  return config;
}

absl::StatusOr<Config> LoadFlag(const std::string& key, const std::string& value) {
  return LoadConfig({.file = "", .environment = {}, .flags = {{key, value}}});
}

TEST(ConfigTest, DefaultsAreValidAndPrintAsThemselves) {
  const auto defaults = LoadConfig({});
  ASSERT_TRUE(defaults.ok()) << defaults.status();
  const std::string printed = PrintConfig(*defaults);
  const auto again = LoadToml(printed);
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(PrintConfig(*again), printed);
}

TEST(ConfigTest, WhatIsPrintedIsWhatWasSet) {
  const auto config =
      LoadConfig({.file = "",
                  .environment = {},
                  .flags = {{"hbm.low_watermark", "0.12345678901234567"},
                            {"server.data_dir", "/a \"b\"\\\n\x7f\xc3\xa9\xf0\x9f\x90\xa7"}}});
  ASSERT_TRUE(config.ok()) << config.status();
  const auto again = LoadToml(PrintConfig(*config));
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(again->hbm.low_watermark, config->hbm.low_watermark);
  EXPECT_EQ(again->server.data_dir, config->server.data_dir);
}

TEST(ConfigTest, FaultsAreForTestsAndInNoList) {
  const auto config = LoadFlag("nvme.fault_injection", "write 3 EIO");
#ifdef KVTIER_FAULT_INJECTION
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->nvme.fault_injection, "write 3 EIO");
  EXPECT_EQ(LoadToml("[nvme]\nfault_injection = 3").status().message().substr(0, 36),
            "nvme.fault_injection: is not a text ");
#else
  EXPECT_THAT(std::string(config.status().message()),
              HasSubstr("nvme.fault_injection: this kvtierd was built without it"));
#endif
  EXPECT_EQ(ConfigHelp().find("fault_injection"), std::string::npos);
  EXPECT_EQ(PrintConfig(Config{}).find("fault_injection"), std::string::npos);
}

TEST(ConfigTest, PathsAreUtf8AsAFileCanSayThem) {
  for (const char* path : {"/\xff", "/\xc3", "/\xc3(", "/\xc0\xaf", "/\xed\xa0\x80", "/\xe2\x82",
                           "/\xf4\x90\x80\x80", "/\xf8\x88\x80\x80\x80", "/a\x80"}) {
    EXPECT_FALSE(LoadFlag("server.data_dir", path).ok());
    EXPECT_FALSE(LoadFlag("nvme.dirs", path).ok());
  }
  for (const char* path : {"/\x7f", "/\xc2\x80", "/\xe2\x82\xac", "/\xf0\x9f\x90\xa7"}) {
    EXPECT_TRUE(LoadFlag("server.data_dir", path).ok());
    EXPECT_TRUE(LoadFlag("nvme.dirs", path).ok());
  }
}

TEST(ConfigTest, FlagsBeatEnvironmentBeatsFile) {
  const std::string path = absl::StrFormat("%s/kvtier-order-%d.toml", testing::TempDir(), getpid());
  std::ofstream(path) << "[server]\nsessions_max = 1\ndrain_timeout_ms = 1000\n"
                         "run_dir = \"/file\"\n";
  const auto config = LoadConfig(
      {.file = path,
       .environment = {"KVTIER_SERVER_SESSIONS_MAX=2", "KVTIER_SERVER_DRAIN_TIMEOUT_MS=2000",
                       "KVTIER_TRACES=/x", "PATH=/bin"},
       .flags = {{"server.sessions_max", "3"}}});
  std::remove(path.c_str());
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->server.sessions_max, 3U);
  EXPECT_EQ(config->server.drain_timeout_ms, 2000U);
  EXPECT_EQ(config->server.run_dir, "/file");
}

TEST(ConfigTest, BytesTakeIntegersAndBinaryUnits) {
  EXPECT_EQ(LoadToml("[hbm]\ncapacity_bytes = 134217728")->hbm.capacity_bytes, 128ULL << 20);
  EXPECT_EQ(LoadToml("[hbm]\ncapacity_bytes = \"2 GiB\"")->hbm.capacity_bytes, 2ULL << 30);
  EXPECT_EQ(LoadFlag("hbm.capacity_bytes", "65536KiB")->hbm.capacity_bytes, 64ULL << 20);
  EXPECT_EQ(LoadFlag("nvme.capacity_bytes", "1 TiB")->nvme.capacity_bytes, 1ULL << 40);
  EXPECT_EQ(LoadFlag("nvme.dirs", "/mnt/a:/mnt/b")->nvme.dirs, "/mnt/a:/mnt/b");
  EXPECT_EQ(LoadFlag("nvme.dirs", "")->nvme.dirs, "");
  for (const char* address : {"127.0.0.1:9464", "0.0.0.0:0", "[::1]:65535", ""}) {
    EXPECT_EQ(LoadFlag("metrics.listen", address)->metrics.listen, address);
  }
  for (const char* address : {"9464", ":9464", "localhost:9464", "127.0.0.1", "127.0.0.1:65536",
                              "127.0.0.1:", "::1:9464", "[::1:9464", "[127.0.0.1]:9464",
                              "127.0.0.1:9464,127.0.0.1:9465", "127.0.0.1:9464s", "[]:1", "[:1"}) {
    EXPECT_FALSE(LoadFlag("metrics.listen", address).ok()) << address;
  }
  for (const char* paths : {"a", "/mnt/a:", ":/mnt/a", "/mnt/a::/mnt/b", "/"}) {
    EXPECT_FALSE(LoadFlag("nvme.dirs", paths).ok()) << paths;
  }
  EXPECT_EQ(SplitPaths("/a:/b"), (std::vector<std::string>{"/a", "/b"}));
  EXPECT_TRUE(SplitPaths("").empty());
}

struct BadValue {
  const char* toml;
  const char* key;
};

class ConfigRejects : public testing::TestWithParam<BadValue> {};

TEST_P(ConfigRejects, WithOneLineNamingTheKey) {
  const auto config = LoadToml(GetParam().toml);
  ASSERT_FALSE(config.ok()) << GetParam().toml;
  const std::string message(config.status().message());
  EXPECT_EQ(config.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(message, HasSubstr(GetParam().key));
  EXPECT_EQ(message.find('\n'), std::string::npos) << message;
}

INSTANTIATE_TEST_SUITE_P(
    Table, ConfigRejects,
    testing::Values(BadValue{"[hbm]\ncapacity_bytes = 0", "hbm.capacity_bytes"},
                    BadValue{"[hbm]\ncapacity_bytes = -1", "1 MiB..16 TiB"},
                    BadValue{"[hbm]\ncapacity_bytes = nan", "hbm.capacity_bytes"},
                    BadValue{"[hbm]\ncapacity_bytes = 1e30", "hbm.capacity_bytes"},
                    BadValue{"[hbm]\ncapacity_bytes = 9223372036854775807", "hbm.capacity_bytes"},
                    BadValue{"[hbm]\ncapacity_bytes = \"10 GB\"", "hbm.capacity_bytes"},
                    BadValue{"[hbm]\ncapacity_bytes = \"17179869184 GiB\"", "hbm.capacity_bytes"},
                    BadValue{"[hbm]\ncapacity_bytes = true", "hbm.capacity_bytes"},
                    BadValue{"[hbm]\ncapacity_bytes = [1]", "hbm.capacity_bytes"},
                    BadValue{"[hbm]\nhigh_watermark = nan", "hbm.high_watermark"},
                    BadValue{"[hbm]\nhigh_watermark = 1e30", "hbm.high_watermark"},
                    BadValue{"[hbm]\nhigh_watermark = 0", "above 0 up to 1"},
                    BadValue{"[hbm]\nhigh_watermark = \"0.5\"", "hbm.high_watermark"},
                    BadValue{"[hbm]\nhigh_watermark = 0.5", "hbm.low_watermark"},
                    BadValue{"[hbm]\nsegment_bytes = 100000", "hbm.segment_bytes"},
                    BadValue{"[hbm]\nsegment_bytes = \"1 GiB\"", "hbm.segment_bytes"},
                    BadValue{"[server]\nsessions_max = 0", "1..65536"},
                    BadValue{"[server]\nsessions_max = \"10\"", "server.sessions_max"},
                    BadValue{"[server]\nsessions_max = 4294967296", "server.sessions_max"},
                    BadValue{"[server]\nsocket_mode = \"0999\"", "server.socket_mode"},
                    BadValue{"[server]\nsocket_mode = 0o1777", "server.socket_mode"},
                    BadValue{"[server]\nrun_dir = \"relative\"", "server.run_dir"},
                    BadValue{"[server]\nrun_dri = \"/x\"", "server.run_dri: unknown key"},
                    BadValue{"[sever]\nrun_dir = \"/x\"", "sever: unknown key"},
                    BadValue{"run_dir = \"/x\"", "run_dir: unknown key"},
                    BadValue{"[nvme]\nenabled = \"true\"", "nvme.enabled"},
                    BadValue{"[nvme]\nio_engine = \"aio\"", "auto | io_uring | pread"},
                    BadValue{"[log]\nlevel = 3", "log.level"},
                    BadValue{"[[tenant]]\nname = \"a\"", "tenant.uids"},
                    BadValue{"[[tenant]]\nuids = [1]", "tenant.name"},
                    BadValue{"[[tenant]]\nname = \"a b\"\nuids = [1]", "tenant.name"},
                    BadValue{"[[tenant]]\nname = \"a\"\nuids = [-1]", "tenant.uids"},
                    BadValue{"[[tenant]]\nname = \"a\"\nuids = [1]\ngids = [1]", "tenant.gids"},
                    BadValue{"[[tenant]]\nname = \"a\"\nuids = [1]\n"
                             "[[tenant]]\nname = \"b\"\nuids = [1]",
                             "two tenants"},
                    BadValue{"[server]\ntcp_address = \"0.0.0.0:7443\"",
                             "set server.tls_cert, server.tls_key, server.tls_ca too"},
                    BadValue{"[server]\ntcp_address = \"0.0.0.0:7443\"\ntls_cert = \"/a\"\n"
                             "tls_ca = \"/b\"",
                             "set server.tls_key too"},
                    BadValue{"[server]\ntls_cert = \"relative\"", "server.tls_cert"},
                    BadValue{"[[tenant]]\nname = \"a\"", "tenant.certificates"},
                    BadValue{"[[tenant]]\nname = \"a\"\ncertificates = []", "tenant.certificates"},
                    BadValue{"[[tenant]]\nname = \"a\"\ncertificates = [\"cn:x\", 1]",
                             "tenant.certificates"},
                    BadValue{"[[tenant]]\nname = \"a\"\ncertificates = [\"cn:x\"]\n"
                             "[[tenant]]\nname = \"b\"\ncertificates = [\"cn:x\"]",
                             "cn:x appears twice"},
                    BadValue{"[[tenant]]\nname = \"a\"\nuids = [1]\ncalls_per_second = 0",
                             "tenant.calls_per_second"},
                    BadValue{"[[admin]]\nname = \"a\"", "admin.certificates"},
                    BadValue{"[[admin]]\ncertificates = [\"cn:x\"]", "admin.name"},
                    BadValue{"[[admin]]\nname = \"a\"\nuids = [1]", "admin.uids"},
                    BadValue{"[admin]\nname = \"a\"", "[[admin]]"}, BadValue{"[hbm\n", ".toml:"}));

TEST(ConfigTest, RejectsUnknownFlagsAndVariablesOfKnownSections) {
  EXPECT_THAT(std::string(LoadFlag("hbm.size", "1").status().message()),
              HasSubstr("hbm.size: unknown key"));
  const auto config =
      LoadConfig({.file = "", .environment = {"KVTIER_HBM_CAPACITY=1"}, .flags = {}});
  EXPECT_THAT(std::string(config.status().message()), HasSubstr("KVTIER_HBM_CAPACITY"));
}

TEST(ConfigTest, ADirectoryIsNoFile) {
  ConfigSources sources;
  sources.file = testing::TempDir();
  const auto config = LoadConfig(sources);
  EXPECT_EQ(config.status().code(), absl::StatusCode::kInvalidArgument) << config.status();
}

TEST(ConfigTest, SocketModeIsOctal) {
  EXPECT_EQ(LoadToml("[server]\nsocket_mode = \"0600\"")->server.socket_mode, 0600U);
  EXPECT_EQ(LoadToml("[server]\nsocket_mode = 0o640")->server.socket_mode, 0640U);
  EXPECT_EQ(LoadFlag("server.socket_mode", "0660")->server.socket_mode, 0660U);
}

TEST(ConfigTest, ReadsTenants) {
  const auto config = LoadToml("[[tenant]]\nname = \"a\"\nuids = [7, 8]\n");
  ASSERT_TRUE(config.ok()) << config.status();
  ASSERT_EQ(config->tenants.size(), 1U);
  EXPECT_EQ(config->tenants[0].name, "a");
  EXPECT_THAT(config->tenants[0].uids, testing::ElementsAre(7U, 8U));
}

TEST(ConfigTest, ReadsQuotasAndReserves) {
  const auto config = LoadToml(
      "[hbm]\ncapacity_bytes = \"64 MiB\"\nsegment_bytes = \"16 MiB\"\n"
      "[[tenant]]\nname = \"a\"\nuids = [7]\nhbm_quota = \"50%\"\nhbm_reserve = \"17 MiB\"\n"
      "nvme_quota = \"12.5 %\"\nhost_reserve = 4096\n"
      "[[tenant]]\nname = \"default\"\nhost_quota = 0\n");
  ASSERT_TRUE(config.ok()) << config.status();
  const TenantBytes a = BytesOf(config->tenants[0], *config);
  EXPECT_THAT(a.quotas, testing::ElementsAre(32 << 20, UINT64_MAX, 128 << 20));
  // Whole segments.
  EXPECT_THAT(a.reserves, testing::ElementsAre(32 << 20, config->host.segment_bytes, 0));
  EXPECT_THAT(BytesOf(config->tenants[1], *config).quotas,
              testing::ElementsAre(UINT64_MAX, 0, UINT64_MAX));
  const auto again = LoadToml(PrintConfig(*config));
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(PrintConfig(*again), PrintConfig(*config));
  EXPECT_THAT(PrintConfig(*config), HasSubstr("nvme_quota = \"12.5%\""));
}

TEST(ConfigTest, ReservesThatCannotAllBeKeptAreRefusedWithTheNumbers) {
  const auto message = [](const std::string& tenants) {
    return std::string(
        LoadToml("[host]\ncapacity_bytes = \"64 MiB\"\n" + tenants).status().message());
  };
  const std::string two =
      "[[tenant]]\nname = \"a\"\nuids = [1]\nhost_reserve = \"50%\"\n"
      "[[tenant]]\nname = \"b\"\nuids = [2]\nhost_reserve = ";
  EXPECT_EQ(message(two + "\"32 MiB\""), "");
  EXPECT_THAT(message(two + "\"33 MiB\""),
              HasSubstr("all tenants together have 96 MiB (a 32 MiB, b 64 MiB), which is above "
                        "host.capacity_bytes 64 MiB"));
  EXPECT_THAT(message(two + "\"1 MiB\"\nhost_quota = \"2 MiB\""),
              HasSubstr("32 MiB for tenant b is above its host_quota of 2 MiB"));
  EXPECT_THAT(message("[[tenant]]\nname = \"default\"\nnvme_reserve = \"2 GiB\""),
              HasSubstr("above nvme.capacity_bytes 1 GiB"));
  for (const char* bad :
       {"\"101%\"", "\"-1%\"", "\"nan%\"", "-1", "\"%\"", "\"1 MB\"", "true", "1.5"}) {
    EXPECT_THAT(message(two + bad), HasSubstr("tenant.host_reserve: needs bytes")) << bad;
  }
}

TEST(ConfigTest, NamesOfCertificatesHaveAKind) {
  const auto config = LoadToml(
      "[[tenant]]\nname = \"a\"\n"
      "certificates = [\"spiffe://d/p/q\", \"dns:Host.Test\", \"cn:A b\"]\n"
      "calls_per_second = 5\n"
      "[[admin]]\nname = \"ops\"\ncertificates = [\"cn:A b\"]\n");
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_THAT(config->tenants[0].certificates,
              testing::ElementsAre("spiffe://d/p/q", "dns:host.test", "cn:A b"));
  EXPECT_EQ(config->admins[0].name, "ops");
  EXPECT_THAT(config->admins[0].certificates, testing::ElementsAre("cn:A b"));
  const auto again = LoadToml(PrintConfig(*config));
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(again->tenants[0].certificates, config->tenants[0].certificates);
  EXPECT_EQ(again->tenants[0].calls_per_second, 5U);
  EXPECT_EQ(again->admins[0].certificates, config->admins[0].certificates);
  for (const char* name :
       {"", "host", "spiffe://", "spiffe://d", "spiffe://d/", "spiffe:///p", "spiffe://d/a b",
        "SPIFFE://d/p", "dns:", "dns:a b", "cn:", "cn:\\n", "uri:a", "dns:h\\u00e9"}) {
    EXPECT_FALSE(
        LoadToml(absl::StrFormat("[[tenant]]\nname = \"a\"\ncertificates = [\"%s\"]", name)).ok())
        << name;
  }
}

TEST(ConfigTest, HelpNamesEveryPrintedKey) {
  const std::string help = ConfigHelp();
  std::string section;
  size_t key_count = 0;
  std::istringstream lines(PrintConfig(Config{}));
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with("[")) section = line.substr(1, line.size() - 2);
    if (line.empty() || line.starts_with("#") || line.starts_with("[")) continue;
    EXPECT_THAT(help, HasSubstr("--" + section + "." + line.substr(0, line.find(' ')) + "="));
    ++key_count;
  }
  EXPECT_GE(key_count, 20U);
}

}  // namespace
}  // namespace kvtier
