// SPDX-License-Identifier: Apache-2.0
//
// What an operator can set. One table (config.cc) names every key with its type, unit, range and
// meaning; parsing, validation, --help and --print-config are generated from it.
// Sources, strongest first: flags --section.key=VALUE, environment KVTIER_SECTION_KEY, TOML file,
// defaults.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"

namespace kvtier {

// A part of a tier, in bytes or in per cent of its capacity.
struct TierShare {
  double percent = 0;
  // Where percent is 0.
  uint64_t bytes = 0;

  uint64_t BytesOf(uint64_t capacity_bytes) const;
};

// Processes of these uids are this tenant, and so are peers on TCP whose certificate has one of
// these names: "spiffe://...", "dns:..." in lower case, "cn:...". See daemon/peer_names.h.
struct TenantConfig {
  std::string name;
  std::vector<uint32_t> uids = {};
  // Of hbm, host and nvme: the most it may have, and what others leave to it. Not set: no quota, no
  // reserve.
  std::array<std::optional<TierShare>, 3> quotas = {};
  std::array<std::optional<TierShare>, 3> reserves = {};
  std::vector<std::string> certificates = {};
  // In the place of server.tenant_calls_per_second; 0: that one.
  uint32_t calls_per_second = 0;
};

// Peers on TCP whose certificate has one of these names may call AdminService.
struct AdminConfig {
  std::string name;
  std::vector<std::string> certificates;
};

struct MemoryTierConfig {
  uint64_t capacity_bytes = 0;
  uint64_t segment_bytes = 0;
  double high_watermark = 0.95;
  double low_watermark = 0.90;
};

// How host gets its memory; keys of the section host, too.
struct HostMemoryConfig {
  // "auto": locked if RLIMIT_MEMLOCK lets it.
  std::string lock_memory = "auto";
  // "reserved": from vm.nr_hugepages as long as it lasts.
  std::string huge_pages = "transparent";
  // What keeps its contents while no daemon runs. "auto": systemd, under systemd.
  std::string warm_restart = "auto";
  uint32_t hold_seconds = 600;
};

// Where hbm is; keys of the section hbm, too.
struct HbmDeviceConfig {
  // "cuda": memory of a GPU. "cpu": shared memory that stands in for it.
  std::string device = "cpu";
  uint32_t cuda_device_idx = 0;
  // 0: no limit.
  uint64_t demote_bytes_per_second = 0;
};

struct ServerConfig {
  std::string run_dir = "/run/kvtierd";
  std::string data_dir = "/var/lib/kvtierd";
  uint32_t socket_mode = 0660;
  uint32_t sessions_max = 1024;
  uint32_t drain_timeout_ms = 20'000;
  // "same": uid 0 and the daemon's own uid are the tenant "default". "any": every uid that no other
  // tenant names is.
  std::string default_tenant_uids = "same";
  // What each tenant may make; 0: no limit.
  uint32_t tenant_calls_per_second = 0;
  // Mutual TLS on TCP: "0.0.0.0:7443". Empty: unix sockets only.
  std::string tcp_address;
  std::string tls_cert;
  std::string tls_key;
  std::string tls_ca;
};

struct NvmeConfig {
  bool enabled = true;
  uint64_t capacity_bytes = 1ULL << 30;
  uint64_t segment_bytes = 64ULL << 20;
  std::string io_engine = "auto";
  std::string admission = "all";
  // Separated by ':'; empty: server.data_dir + "/nvme".
  std::string dirs;
  uint64_t write_bytes_per_day_max = 0;
  uint64_t scrub_bytes_per_second = 8ULL << 20;
  double high_watermark = 0.95;
  double low_watermark = 0.90;
  // What goes wrong on the disk (tiers/nvme/fault_injection.h): a key that no list of keys names,
  // of builds with KVTIER_FAULT_INJECTION.
  std::string fault_injection;
};

struct PolicyConfig {
  std::string eviction = "hazard";
};

struct MetricsConfig {
  // "127.0.0.1:9464"; empty: no port.
  std::string listen;
};

struct LogConfig {
  std::string level = "info";
  std::string format = "text";
};

// A plain value.
struct Config {
  ServerConfig server;
  HbmDeviceConfig hbm_device;
  MemoryTierConfig hbm{.capacity_bytes = 64ULL << 20, .segment_bytes = 16ULL << 20};
  MemoryTierConfig host{.capacity_bytes = 256ULL << 20, .segment_bytes = 32ULL << 20};
  HostMemoryConfig host_memory;
  NvmeConfig nvme;
  PolicyConfig policy;
  MetricsConfig metrics;
  LogConfig log;
  // [[tenant]] tables of the file, in order.
  std::vector<TenantConfig> tenants;
  // [[admin]] tables of the file, in order.
  std::vector<AdminConfig> admins;
};

struct ConfigSources {
  // Empty: no file.
  std::string file;
  // "NAME=VALUE", as in environ. Names that are not KVTIER_<known section>_... are left alone.
  std::vector<std::string> environment;
  // Key ("hbm.capacity_bytes") and value.
  std::vector<std::pair<std::string, std::string>> flags;
};

// INVALID_ARGUMENT with one line that names key, range and source.
absl::StatusOr<Config> LoadConfig(const ConfigSources& sources);

// What a tenant's quotas and reserves come to, for hbm, host and nvme. Quotas that are not set are
// UINT64_MAX; a reserve of a memory tier is whole segments.
struct TenantBytes {
  std::array<uint64_t, 3> quotas{};
  std::array<uint64_t, 3> reserves{};
};
TenantBytes BytesOf(const TenantConfig& tenant, const Config& config);

// A TOML file that, loaded, gives `config`; every key with its meaning and range as a comment.
std::string PrintConfig(const Config& config);

// One paragraph a key, for --help.
std::string ConfigHelp();

// "/a:/b" -> {"/a", "/b"}; none of nothing.
std::vector<std::string> SplitPaths(std::string_view paths);

// "64 MiB" -> 67108864; nothing for what is no number of bytes.
std::optional<uint64_t> ParseBytes(std::string_view text);
// 67108864 -> "64 MiB"; a number of bytes that is no whole unit is printed in bytes.
std::string FormatBytes(uint64_t bytes);

}  // namespace kvtier
