// SPDX-License-Identifier: Apache-2.0
#include "daemon/config.h"

#include <toml++/toml.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <filesystem>
#include <set>
#include <system_error>

#include "daemon/config_keys.h"
#include "proto/base/status_util.h"

namespace kvtier {
namespace {

constexpr size_t kTenantsMax = 256;
constexpr size_t kTenantNameBytesMax = 64;
constexpr std::array<const char*, 3> kTierNames = {"hbm", "host", "nvme"};
constexpr size_t kAdminsMax = 64;
constexpr size_t kCertificatesMax = 1024;
// Of a SPIFFE id, which is the longest name.
constexpr size_t kCertificateNameBytesMax = 2048;

RawValue FromToml(const toml::node& node) {
  if (const auto* integer = node.as_integer()) {
    return {RawKind::kInteger, absl::StrFormat("%d", integer->get())};
  }
  if (const auto* real = node.as_floating_point()) {
    return {RawKind::kFloat, FormatReal(real->get())};
  }
  if (const auto* boolean = node.as_boolean()) {
    return {RawKind::kBool, boolean->get() ? "true" : "false"};
  }
  if (const auto* text = node.as_string()) return {RawKind::kString, text->get()};
  return {RawKind::kOther, node.is_table() ? "a table" : "an array or date"};
}

std::string Where(const std::string& file, const toml::node& node) {
  return absl::StrFormat("%s:%d", file, node.source().begin.line);
}

// `uids` must be an array of integers that fit a uid.
absl::StatusOr<std::vector<uint32_t>> ParseUids(const toml::node& node) {
  absl::Status error = Invalid("tenant.uids: needs an array of 1..1024 integers in 0..4294967294");
  const toml::array* array = node.as_array();
  if (array == nullptr || array->empty() || array->size() > 1024) return error;
  std::vector<uint32_t> uids;
  for (const toml::node& item : *array) {
    const auto* uid = item.as_integer();
    if (uid == nullptr || uid->get() < 0 || uid->get() > 4294967294LL) return error;
    uids.push_back(static_cast<uint32_t>(uid->get()));
  }
  return uids;
}

// As a certificate has it, with its kind in front; empty for what is none. The names of hosts have
// no case.
std::string ParseCertificateName(std::string_view text) {
  const auto is_graphic = [](char c) { return c > 0x20 && c < 0x7f; };
  const auto is_of_a_host = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '.' || c == '-' || c == '_' ||
           c == '*';
  };
  if (text.size() > kCertificateNameBytesMax) return "";
  std::string name(text);
  std::string_view rest = text.substr(std::min(text.size(), text.find(':') + 1));
  if (text.starts_with("spiffe://")) {
    rest.remove_prefix(2);
    const size_t slash = rest.find('/');
    const bool has_domain_and_path = slash > 0 && slash < rest.size() - 1;
    return has_domain_and_path && std::ranges::all_of(rest, is_graphic) ? name : "";
  }
  if (text.starts_with("dns:")) {
    std::ranges::transform(name, name.begin(), [](char c) {
      return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
    });
    return !rest.empty() && std::ranges::all_of(name.substr(4), is_of_a_host) ? name : "";
  }
  const bool is_text = std::ranges::none_of(
      rest, [](char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7f; });
  return text.starts_with("cn:") && !rest.empty() && is_text ? name : "";
}

// `certificates` must be an array of names.
absl::StatusOr<std::vector<std::string>> ParseCertificates(std::string_view key,
                                                           const toml::node& node) {
  absl::Status error = Invalid(
      "%s.certificates: needs an array of 1..%d texts, each \"spiffe://DOMAIN/PATH\", "
      "\"dns:HOST\" or \"cn:COMMON NAME\"",
      key, kCertificatesMax);
  const toml::array* array = node.as_array();
  if (array == nullptr || array->empty() || array->size() > kCertificatesMax) return error;
  std::vector<std::string> names;
  for (const toml::node& item : *array) {
    const auto* text = item.as_string();
    if (text == nullptr) return error;
    names.push_back(ParseCertificateName(text->get()));
    if (names.back().empty()) return error;
  }
  return names;
}

bool IsTenantName(std::string_view name) {
  const auto allowed = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' ||
           c == '_' || c == '.';
  };
  return !name.empty() && name.size() <= kTenantNameBytesMax &&
         std::all_of(name.begin(), name.end(), allowed);
}

// "8 GiB", a number of bytes, or "12.5%".
std::optional<TierShare> ParseShare(const toml::node& node) {
  if (const auto* integer = node.as_integer()) {
    if (integer->get() < 0) return std::nullopt;
    return TierShare{.bytes = static_cast<uint64_t>(integer->get())};
  }
  const auto* text = node.as_string();
  if (text == nullptr) return std::nullopt;
  std::string_view number = text->get();
  if (!number.ends_with('%')) {
    const std::optional<uint64_t> bytes = ParseBytes(number);
    if (!bytes.has_value()) return std::nullopt;
    return TierShare{.bytes = *bytes};
  }
  number.remove_suffix(1);
  if (number.ends_with(' ')) number.remove_suffix(1);
  double percent = 0;
  const auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), percent);
  if (error != std::errc() || end != number.data() + number.size()) return std::nullopt;
  if (!(percent >= 0 && percent <= 100)) return std::nullopt;
  return TierShare{.percent = percent};
}

// A quota or a reserve.
absl::Status ParseTenantShare(const std::string& key, const toml::node& node,
                              TenantConfig* tenant) {
  for (size_t tier = 0; tier < kTierNames.size(); ++tier) {
    const bool is_quota = key == absl::StrCat(kTierNames[tier], "_quota");
    if (!is_quota && key != absl::StrCat(kTierNames[tier], "_reserve")) continue;
    const std::optional<TierShare> share = ParseShare(node);
    if (!share.has_value()) {
      return Invalid(
          "tenant.%s: needs bytes, as an integer or \"N KiB|MiB|GiB|TiB\", or "
          "\"N%%\" of the tier's capacity, at most 100",
          key);
    }
    (is_quota ? tenant->quotas : tenant->reserves)[tier] = share;
    return absl::OkStatus();
  }
  return Invalid(
      "tenant.%s: unknown key (known: name, uids, certificates, calls_per_second, and "
      "hbm|host|nvme with _quota or "
      "_reserve)",
      key);
}

absl::StatusOr<TenantConfig> ParseTenant(const toml::node& node) {
  const toml::table* table = node.as_table();
  if (table == nullptr) return Invalid("tenant: each must be a [[tenant]] table");
  TenantConfig tenant;
  for (const auto& [key, value] : *table) {
    if (key.str() == "name") {
      const auto* name = value.as_string();
      if (name == nullptr || !IsTenantName(name->get())) {
        return Invalid("tenant.name: needs 1..64 of the characters A-Z a-z 0-9 . _ -");
      }
      tenant.name = name->get();
    } else if (key.str() == "uids") {
      KVT_ASSIGN_OR_RETURN(tenant.uids, ParseUids(value));
    } else if (key.str() == "certificates") {
      KVT_ASSIGN_OR_RETURN(tenant.certificates, ParseCertificates("tenant", value));
    } else if (key.str() == "calls_per_second") {
      const auto* rate = value.as_integer();
      if (rate == nullptr || rate->get() < 1 || rate->get() > 1'000'000) {
        return Invalid("tenant.calls_per_second: needs an integer, 1..1000000");
      }
      tenant.calls_per_second = static_cast<uint32_t>(rate->get());
    } else {
      KVT_RETURN_IF_ERROR(ParseTenantShare(std::string(key.str()), value, &tenant));
    }
  }
  if (tenant.name.empty()) return Invalid("tenant.name: missing");
  // The tenant "default" has uids without naming any.
  if (tenant.uids.empty() && tenant.certificates.empty() && tenant.name != "default") {
    return Invalid("tenant.uids, tenant.certificates: both missing for tenant %s", tenant.name);
  }
  return tenant;
}

absl::StatusOr<AdminConfig> ParseAdmin(const toml::node& node) {
  const toml::table* table = node.as_table();
  if (table == nullptr) return Invalid("admin: each must be an [[admin]] table");
  AdminConfig admin;
  for (const auto& [key, value] : *table) {
    if (key.str() == "name") {
      const auto* name = value.as_string();
      if (name == nullptr || !IsTenantName(name->get())) {
        return Invalid("admin.name: needs 1..64 of the characters A-Z a-z 0-9 . _ -");
      }
      admin.name = name->get();
    } else if (key.str() == "certificates") {
      KVT_ASSIGN_OR_RETURN(admin.certificates, ParseCertificates("admin", value));
    } else {
      return Invalid("admin.%s: unknown key (known: name, certificates)", key.str());
    }
  }
  if (admin.name.empty()) return Invalid("admin.name: missing");
  if (admin.certificates.empty()) {
    return Invalid("admin.certificates: missing for admin %s", admin.name);
  }
  return admin;
}

absl::Status ParseAdmins(const toml::node& node, Config* config) {
  const toml::array* admins = node.as_array();
  if (admins == nullptr) return Invalid("admin: each must be an [[admin]] table");
  if (admins->size() > kAdminsMax) return Invalid("admin: more than %d", kAdminsMax);
  std::set<std::string> certificates;
  for (const toml::node& item : *admins) {
    KVT_ASSIGN_OR_RETURN(AdminConfig admin, ParseAdmin(item));
    for (const std::string& name : admin.certificates) {
      if (!certificates.insert(name).second) {
        return Invalid("admin.certificates: %s appears twice", name);
      }
    }
    config->admins.push_back(std::move(admin));
  }
  return absl::OkStatus();
}

absl::Status ParseTenants(const toml::node& node, Config* config) {
  const toml::array* tenants = node.as_array();
  if (tenants == nullptr) return Invalid("tenant: each must be a [[tenant]] table");
  if (tenants->size() > kTenantsMax) return Invalid("tenant: more than %d", kTenantsMax);
  std::set<std::string> names;
  std::set<uint32_t> uids;
  std::set<std::string> certificates;
  for (const toml::node& item : *tenants) {
    KVT_ASSIGN_OR_RETURN(TenantConfig tenant, ParseTenant(item));
    if (!names.insert(tenant.name).second) {
      return Invalid("tenant.name: %s appears twice", tenant.name);
    }
    for (const uint32_t uid : tenant.uids) {
      if (!uids.insert(uid).second) {
        return Invalid("tenant.uids: uid %d belongs to two tenants", uid);
      }
    }
    for (const std::string& name : tenant.certificates) {
      if (!certificates.insert(name).second) {
        return Invalid("tenant.certificates: %s appears twice", name);
      }
    }
    config->tenants.push_back(std::move(tenant));
  }
  return absl::OkStatus();
}

absl::Status ApplySection(const std::string& file, std::string_view section, const toml::node& node,
                          Config* config) {
  const toml::table* table = node.as_table();
  if (table == nullptr || !IsConfigSection(section)) {
    return Invalid("%s [%s]", UnknownKey(section).message(), Where(file, node));
  }
  for (const auto& [key, value] : *table) {
    const std::string name = absl::StrFormat("%s.%s", section, key.str());
    if (absl::Status set = SetConfigKey(name, FromToml(value), config); !set.ok()) {
      return Invalid("%s [%s]", set.message(), Where(file, value));
    }
  }
  return absl::OkStatus();
}

// Debian's toml++ reports errors by exception; they end here.
absl::StatusOr<toml::table> ParseFile(const std::string& file) {
  std::error_code ignored;
  if (std::filesystem::is_directory(file, ignored)) return Invalid("%s is a directory", file);
  try {
    return toml::parse_file(file);
  } catch (const toml::parse_error& error) {
    return Invalid("%s:%d: %s", file, error.source().begin.line, error.description());
  }
}

absl::Status ApplyFile(const std::string& file, Config* config) {
  KVT_ASSIGN_OR_RETURN(const toml::table table, ParseFile(file));
  for (const auto& [key, value] : table) {
    if (key.str() != "tenant" && key.str() != "admin") {
      KVT_RETURN_IF_ERROR(ApplySection(file, key.str(), value, config));
      continue;
    }
    const absl::Status tables =
        key.str() == "tenant" ? ParseTenants(value, config) : ParseAdmins(value, config);
    if (!tables.ok()) return Invalid("%s [%s]", tables.message(), Where(file, value));
  }
  return absl::OkStatus();
}

absl::Status ApplyEnvironment(const std::vector<std::string>& environment, Config* config) {
  for (const std::string& entry : environment) {
    const size_t equals = entry.find('=');
    if (equals == std::string::npos) continue;
    const std::string name = entry.substr(0, equals);
    const std::string key = ConfigKeyOfEnvironment(name);
    if (key.empty()) continue;
    absl::Status set = SetConfigKey(key, {RawKind::kText, entry.substr(equals + 1)}, config);
    if (!set.ok()) return Invalid("%s [environment %s]", set.message(), name);
  }
  return absl::OkStatus();
}

absl::Status CheckMarks(std::string_view section, double low, double high) {
  if (low <= high) return absl::OkStatus();
  return Invalid("%s.low_watermark: %g is above %s.high_watermark %g", section, low, section, high);
}

absl::Status CheckSegments(std::string_view section, uint64_t segment_bytes,
                           uint64_t capacity_bytes) {
  if (segment_bytes % 4096 != 0) {
    return Invalid("%s.segment_bytes: %d is not a multiple of 4 KiB", section, segment_bytes);
  }
  if (segment_bytes > capacity_bytes) {
    return Invalid("%s.segment_bytes: %s is above %s.capacity_bytes %s", section,
                   FormatBytes(segment_bytes), section, FormatBytes(capacity_bytes));
  }
  return absl::OkStatus();
}

std::array<uint64_t, 3> Capacities(const Config& config) {
  return {config.hbm.capacity_bytes, config.host.capacity_bytes, config.nvme.capacity_bytes};
}

// Every reserve can be kept at once, and is not above its tenant's quota.
absl::Status CheckReserves(const Config& config) {
  const std::array<uint64_t, 3> capacities = Capacities(config);
  for (size_t tier = 0; tier < kTierNames.size(); ++tier) {
    uint64_t reserved_bytes = 0;
    std::string each;
    for (const TenantConfig& tenant : config.tenants) {
      const TenantBytes bytes = BytesOf(tenant, config);
      if (bytes.reserves[tier] == 0) continue;
      if (bytes.reserves[tier] > bytes.quotas[tier]) {
        return Invalid("tenant.%s_reserve: %s for tenant %s is above its %s_quota of %s",
                       kTierNames[tier], FormatBytes(bytes.reserves[tier]), tenant.name,
                       kTierNames[tier], FormatBytes(bytes.quotas[tier]));
      }
      // Each is at most the tier's capacity and a segment, and tenants are few: no overflow.
      reserved_bytes += bytes.reserves[tier];
      each += absl::StrFormat("%s%s %s", each.empty() ? "" : ", ", tenant.name,
                              FormatBytes(bytes.reserves[tier]));
    }
    if (reserved_bytes > capacities[tier]) {
      return Invalid(
          "tenant.%s_reserve: all tenants together have %s (%s), which is above "
          "%s.capacity_bytes %s%s",
          kTierNames[tier], FormatBytes(reserved_bytes), each, kTierNames[tier],
          FormatBytes(capacities[tier]),
          kTierNames[tier] == std::string_view("nvme") ? ""
                                                       : "; a reserve there is whole segments");
    }
  }
  return absl::OkStatus();
}

// There is no plaintext on TCP, and nobody is trusted there without a certificate.
absl::Status CheckTls(const ServerConfig& server) {
  if (server.tcp_address.empty()) return absl::OkStatus();
  std::string missing;
  for (const auto& [key, path] :
       {std::pair("server.tls_cert", &server.tls_cert),
        std::pair("server.tls_key", &server.tls_key), std::pair("server.tls_ca", &server.tls_ca)}) {
    if (path->empty()) missing += absl::StrFormat("%s%s", missing.empty() ? "" : ", ", key);
  }
  if (missing.empty()) return absl::OkStatus();
  return Invalid(
      "server.tcp_address: TCP is served with mutual TLS only: set %s too, or leave the address "
      "empty for unix sockets alone",
      missing);
}

// What no key can tell alone.
absl::Status CheckTogether(const Config& config) {
  KVT_RETURN_IF_ERROR(CheckTls(config.server));
  KVT_RETURN_IF_ERROR(CheckMarks("hbm", config.hbm.low_watermark, config.hbm.high_watermark));
  KVT_RETURN_IF_ERROR(CheckMarks("host", config.host.low_watermark, config.host.high_watermark));
  KVT_RETURN_IF_ERROR(CheckMarks("nvme", config.nvme.low_watermark, config.nvme.high_watermark));
  KVT_RETURN_IF_ERROR(CheckSegments("hbm", config.hbm.segment_bytes, config.hbm.capacity_bytes));
  KVT_RETURN_IF_ERROR(CheckSegments("host", config.host.segment_bytes, config.host.capacity_bytes));
  KVT_RETURN_IF_ERROR(CheckSegments("nvme", config.nvme.segment_bytes, config.nvme.capacity_bytes));
  return CheckReserves(config);
}

}  // namespace

uint64_t TierShare::BytesOf(uint64_t capacity_bytes) const {
  if (percent == 0) return bytes;
  return static_cast<uint64_t>(static_cast<double>(capacity_bytes) * (percent / 100));
}

TenantBytes BytesOf(const TenantConfig& tenant, const Config& config) {
  const std::array<uint64_t, 3> capacities = Capacities(config);
  const std::array<uint64_t, 3> units = {config.hbm.segment_bytes, config.host.segment_bytes, 1};
  TenantBytes bytes;
  for (size_t tier = 0; tier < capacities.size(); ++tier) {
    bytes.quotas[tier] = tenant.quotas[tier].has_value()
                             ? tenant.quotas[tier]->BytesOf(capacities[tier])
                             : UINT64_MAX;
    if (!tenant.reserves[tier].has_value()) continue;
    // More than the tier has is as wrong, whatever it is.
    const uint64_t wanted =
        std::min(tenant.reserves[tier]->BytesOf(capacities[tier]), capacities[tier] + 1);
    bytes.reserves[tier] = (wanted + units[tier] - 1) / units[tier] * units[tier];
  }
  return bytes;
}

absl::StatusOr<Config> LoadConfig(const ConfigSources& sources) {
  Config config;
  if (!sources.file.empty()) KVT_RETURN_IF_ERROR(ApplyFile(sources.file, &config));
  KVT_RETURN_IF_ERROR(ApplyEnvironment(sources.environment, &config));
  for (const auto& [key, value] : sources.flags) {
    absl::Status set = SetConfigKey(key, {RawKind::kText, value}, &config);
    if (!set.ok()) return Invalid("%s [flag --%s]", set.message(), key);
  }
  KVT_RETURN_IF_ERROR(CheckTogether(config));
  return config;
}

}  // namespace kvtier
