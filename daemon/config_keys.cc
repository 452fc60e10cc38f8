// SPDX-License-Identifier: Apache-2.0
#include "daemon/config_keys.h"

#include <arpa/inet.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <optional>
#include <variant>

#include "proto/base/status_util.h"

namespace kvtier {
namespace {

constexpr uint64_t kKiB = 1ULL << 10;
constexpr uint64_t kMiB = 1ULL << 20;
constexpr uint64_t kGiB = 1ULL << 30;
constexpr uint64_t kTiB = 1ULL << 40;

// Kinds of keys: where the value lies in Config, and what it takes.
struct BytesKey {
  uint64_t& (*field)(Config&);
  uint64_t min;
  uint64_t max;
};
struct IntegerKey {
  uint32_t& (*field)(Config&);
  uint32_t min;
  uint32_t max;
};
struct ModeKey {
  uint32_t& (*field)(Config&);
};
struct RatioKey {
  double& (*field)(Config&);
};
struct BoolKey {
  bool& (*field)(Config&);
};
struct PathKey {
  std::string& (*field)(Config&);
  bool may_be_empty = false;
};
struct PathsKey {
  std::string& (*field)(Config&);
};
struct AddressKey {
  std::string& (*field)(Config&);
};
struct ChoiceKey {
  std::string& (*field)(Config&);
  std::vector<std::string_view> choices;
};

struct KeySpec {
  std::string_view name;
  std::variant<BytesKey, IntegerKey, ModeKey, RatioKey, BoolKey, PathKey, PathsKey, AddressKey,
               ChoiceKey>
      kind;
  std::string_view help;
};

#define KVTIER_FIELD(member) [](Config& c) -> auto& { return c.member; }

const std::vector<KeySpec>& Keys() {
  static const std::vector<KeySpec> keys = {
      {"server.run_dir", PathKey{KVTIER_FIELD(server.run_dir)},
       "Directory of the sockets kvtierd.sock, handles.sock, admin.sock and of the lock."},
      {"server.data_dir", PathKey{KVTIER_FIELD(server.data_dir)},
       "Directory of what survives a restart: the nvme tier."},
      {"server.socket_mode", ModeKey{KVTIER_FIELD(server.socket_mode)},
       "Permissions of kvtierd.sock and handles.sock. admin.sock is always 0600."},
      {"server.sessions_max", IntegerKey{KVTIER_FIELD(server.sessions_max), 1, 65'536},
       "Engine processes connected at once."},
      {"server.drain_timeout_ms", IntegerKey{KVTIER_FIELD(server.drain_timeout_ms), 100, 600'000},
       "Milliseconds from SIGTERM to exit; memory blocks are written to nvme meanwhile."},
      {"server.default_tenant_uids",
       ChoiceKey{KVTIER_FIELD(server.default_tenant_uids), {"same", "any"}},
       "Who is the tenant \"default\": uid 0 and the daemon's own uid, or every uid that no "
       "[[tenant]] names."},
      {"server.tenant_calls_per_second",
       IntegerKey{KVTIER_FIELD(server.tenant_calls_per_second), 0, 1'000'000},
       "Calls that each tenant may make in a second, with those of one second at once; the client "
       "library waits for what is more. calls_per_second of a [[tenant]] is stronger; 0 is no "
       "limit."},
      {"server.tcp_address", AddressKey{KVTIER_FIELD(server.tcp_address)},
       "Where engines and admins of other machines reach the daemon by TCP with mutual TLS, which "
       "needs the three files of server.tls_*; empty is nowhere. Who is which tenant or admin is "
       "told by the names in their certificates: certificates of [[tenant]] and [[admin]]."},
      {"server.tls_cert", PathKey{KVTIER_FIELD(server.tls_cert), true},
       "The daemon's certificate in PEM, followed by those between it and its authority. This and "
       "the next two are read again when they change."},
      {"server.tls_key", PathKey{KVTIER_FIELD(server.tls_key), true},
       "The private key of that certificate, readable by its owner (or its group) only."},
      {"server.tls_ca", PathKey{KVTIER_FIELD(server.tls_ca), true},
       "The authorities that issue certificates of engines and admins, in PEM."},
      {"hbm.device", ChoiceKey{KVTIER_FIELD(hbm_device.device), {"cpu", "cuda"}},
       "Where hbm is: cuda is the memory of a GPU, cpu is shared memory that stands in for it."},
      {"hbm.cuda_device_idx", IntegerKey{KVTIER_FIELD(hbm_device.cuda_device_idx), 0, 63},
       "The GPU of the cuda device, counted as CUDA_VISIBLE_DEVICES lets the daemon see them."},
      {"hbm.demote_bytes_per_second",
       BytesKey{KVTIER_FIELD(hbm_device.demote_bytes_per_second), 0, kTiB},
       "Limits what leaves hbm for host, per second, for engines that need the link or the "
       "memory's bandwidth; 0 is no limit. What comes to hbm never waits for what leaves it."},
      {"hbm.capacity_bytes", BytesKey{KVTIER_FIELD(hbm.capacity_bytes), kMiB, 16 * kTiB},
       "Size of the hbm tier."},
      {"hbm.segment_bytes", BytesKey{KVTIER_FIELD(hbm.segment_bytes), 64 * kKiB, kGiB},
       "Unit in which hbm is given to tenants and block sizes; a block must fit. On the cuda "
       "device "
       "a multiple of 2 MiB."},
      {"hbm.high_watermark", RatioKey{KVTIER_FIELD(hbm.high_watermark)},
       "Share of capacity above which blocks are demoted to host."},
      {"hbm.low_watermark", RatioKey{KVTIER_FIELD(hbm.low_watermark)},
       "Share of capacity at which demotion stops."},
      {"host.capacity_bytes", BytesKey{KVTIER_FIELD(host.capacity_bytes), kMiB, 16 * kTiB},
       "Size of the host tier."},
      {"host.segment_bytes", BytesKey{KVTIER_FIELD(host.segment_bytes), 64 * kKiB, kGiB},
       "Unit in which host memory is given to tenants and block sizes; a block must fit."},
      {"host.high_watermark", RatioKey{KVTIER_FIELD(host.high_watermark)},
       "Share of capacity above which blocks are demoted to nvme."},
      {"host.low_watermark", RatioKey{KVTIER_FIELD(host.low_watermark)},
       "Share of capacity at which demotion stops."},
      {"host.lock_memory", ChoiceKey{KVTIER_FIELD(host_memory.lock_memory), {"auto", "on", "off"}},
       "Whether host memory is locked, so that it is never swapped out: on refuses to start when "
       "RLIMIT_MEMLOCK is below the capacity, auto then goes without."},
      {"host.huge_pages",
       ChoiceKey{KVTIER_FIELD(host_memory.huge_pages), {"transparent", "reserved"}},
       "transparent asks the kernel for huge pages where it has some; reserved takes those of "
       "vm.nr_hugepages as long as they last. Needs host.segment_bytes of whole 2 MiB."},
      {"host.warm_restart",
       ChoiceKey{KVTIER_FIELD(host_memory.warm_restart), {"auto", "off", "holder"}},
       "What keeps host blocks over a restart of the daemon: auto is systemd's descriptor store "
       "(FileDescriptorStoreMax=) under systemd and nothing elsewhere, holder a process beside the "
       "daemon."},
      {"host.hold_seconds", IntegerKey{KVTIER_FIELD(host_memory.hold_seconds), 1, 86'400},
       "How long the holder keeps host memory while no daemon runs."},
      {"nvme.enabled", BoolKey{KVTIER_FIELD(nvme.enabled)},
       "Whether there is a cold tier, below server.data_dir."},
      {"nvme.dirs", PathsKey{KVTIER_FIELD(nvme.dirs)},
       "Directories of the nvme tier, best one on each drive; each takes an equal share of the "
       "capacity, and a drive that fails takes its blocks only. Empty is server.data_dir/nvme."},
      {"nvme.capacity_bytes", BytesKey{KVTIER_FIELD(nvme.capacity_bytes), 16 * kMiB, 1024 * kTiB},
       "Bytes of the file system that the nvme tier may take, index and spare segments included."},
      {"nvme.segment_bytes", BytesKey{KVTIER_FIELD(nvme.segment_bytes), kMiB, kGiB},
       "Size of one segment file, at most a sixteenth of the capacity; a block with its header "
       "must "
       "fit."},
      {"nvme.io_engine", ChoiceKey{KVTIER_FIELD(nvme.io_engine), {"auto", "io_uring", "pread"}},
       "auto takes io_uring where the kernel allows it."},
      {"nvme.admission", ChoiceKey{KVTIER_FIELD(nvme.admission), {"all", "seen_again"}},
       "Which blocks are worth a write to nvme."},
      {"nvme.write_bytes_per_day_max",
       BytesKey{KVTIER_FIELD(nvme.write_bytes_per_day_max), 0, 1024 * kTiB},
       "Bytes written to nvme in a day (UTC) after which it takes no more blocks until the next "
       "day, so that the drive lasts; 0 is no limit."},
      {"nvme.scrub_bytes_per_second",
       BytesKey{KVTIER_FIELD(nvme.scrub_bytes_per_second), 0, 16 * kGiB},
       "Rate at which every block on nvme is read again and again to find damage early; 0 is "
       "never."},
      {"nvme.high_watermark", RatioKey{KVTIER_FIELD(nvme.high_watermark)},
       "Share of capacity above which blocks are evicted."},
      {"nvme.low_watermark", RatioKey{KVTIER_FIELD(nvme.low_watermark)},
       "Share of capacity at which eviction stops."},
      {"policy.eviction", ChoiceKey{KVTIER_FIELD(policy.eviction), {"lru", "hazard"}},
       "Which blocks leave a full tier: the least recently used, or those that are least likely to "
       "be used again, learned while serving (docs/policy.md)."},
      {"metrics.listen", AddressKey{KVTIER_FIELD(metrics.listen)},
       "Where /metrics for Prometheus, /readyz and a status page are served by HTTP, to whoever "
       "reaches it; empty is nowhere."},
      {"log.level", ChoiceKey{KVTIER_FIELD(log.level), {"debug", "info", "warning", "error"}},
       "The least severe messages that are written."},
      {"log.format", ChoiceKey{KVTIER_FIELD(log.format), {"text", "json"}},
       "Form of the log lines on standard error."},
  };
  return keys;
}
#undef KVTIER_FIELD

std::string Section(std::string_view name) { return std::string(name.substr(0, name.find('.'))); }

std::string JoinChoices(const ChoiceKey& key) {
  std::string joined;
  for (const std::string_view choice : key.choices) {
    joined += absl::StrFormat("%s%s", joined.empty() ? "" : " | ", choice);
  }
  return joined;
}

// What a key takes, in words: the range part of errors and help.
struct RangeText {
  std::string operator()(const BytesKey& key) const {
    return absl::StrFormat("bytes, %s..%s, as an integer or \"N KiB|MiB|GiB|TiB\"",
                           FormatBytes(key.min), FormatBytes(key.max));
  }
  std::string operator()(const IntegerKey& key) const {
    return absl::StrFormat("integer, %d..%d", key.min, key.max);
  }
  std::string operator()(const ModeKey&) const { return "octal, \"0000\"..\"0777\""; }
  std::string operator()(const RatioKey&) const { return "number, above 0 up to 1"; }
  std::string operator()(const BoolKey&) const { return "true | false"; }
  std::string operator()(const PathKey& key) const {
    return absl::StrFormat("absolute path, 2..4000 bytes of UTF-8%s",
                           key.may_be_empty ? ", or empty" : "");
  }
  std::string operator()(const PathsKey&) const {
    return "absolute paths in UTF-8, separated by ':', or empty";
  }
  std::string operator()(const AddressKey&) const {
    return "\"IPv4:PORT\" or \"[IPv6]:PORT\", or empty";
  }
  std::string operator()(const ChoiceKey& key) const { return JoinChoices(key); }
};

// The whole text as a number, or nothing. `form` is a base or a std::chars_format.
template <typename Number, typename... Form>
std::optional<Number> ParseAll(std::string_view text, Form... form) {
  Number number{};
  const auto [end, error] = std::from_chars(text.begin(), text.end(), number, form...);
  if (error != std::errc() || end != text.end()) return std::nullopt;
  return number;
}

// "8 GiB" or "12.5%", as a text.
std::string FormatShare(const TierShare& share) {
  if (share.percent != 0) return absl::StrFormat("\"%s%%\"", FormatReal(share.percent));
  const std::string text = FormatBytes(share.bytes);
  return text.ends_with("iB") ? absl::StrFormat("\"%s\"", text) : text;
}

}  // namespace

std::optional<uint64_t> ParseBytes(std::string_view text) {
  uint64_t unit = 1;
  const std::pair<std::string_view, uint64_t> units[] = {
      {"KiB", kKiB}, {"MiB", kMiB}, {"GiB", kGiB}, {"TiB", kTiB}};
  for (const auto& [suffix, bytes] : units) {
    if (!text.ends_with(suffix)) continue;
    unit = bytes;
    text.remove_suffix(suffix.size());
    if (text.ends_with(' ')) text.remove_suffix(1);
    break;
  }
  const auto count = ParseAll<uint64_t>(text);
  if (!count.has_value() || *count > UINT64_MAX / unit) return std::nullopt;
  return *count * unit;
}

namespace {

// A file says a text only in UTF-8, so a flag does, too. Neither overlong nor a surrogate.
bool IsUtf8(std::string_view text) {
  while (!text.empty()) {
    const auto first = static_cast<unsigned char>(text.front());
    const size_t size_bytes = first < 0x80 ? 1 : first < 0xE0 ? 2 : first < 0xF0 ? 3 : 4;
    constexpr uint32_t kLeast[] = {0, 0x80, 0x800, 0x10000};
    if ((first >= 0x80 && first < 0xC2) || first > 0xF4 || text.size() < size_bytes) return false;
    uint32_t point = size_bytes == 1 ? first : first & (0x7FU >> size_bytes);
    for (size_t i = 1; i < size_bytes; ++i) {
      const auto next = static_cast<unsigned char>(text[i]);
      if ((next & 0xC0) != 0x80) return false;
      point = point << 6 | (next & 0x3F);
    }
    const bool is_surrogate = point >= 0xD800 && point < 0xE000;
    if (point < kLeast[size_bytes - 1] || point > 0x10FFFF || is_surrogate) return false;
    text.remove_prefix(size_bytes);
  }
  return true;
}

bool IsPathText(std::string_view text) {
  return text.find('\0') == std::string_view::npos && IsUtf8(text);
}

// "127.0.0.1:9464" or "[::1]:9464"; a name is none, as it may be several.
bool IsAddress(const std::string& text) {
  const size_t colon = text.rfind(':');
  if (colon == std::string::npos) return false;
  const auto port = ParseAll<uint16_t>(std::string_view(text).substr(colon + 1));
  if (!port.has_value()) return false;
  std::string host = text.substr(0, colon);
  in6_addr address{};
  if (!host.starts_with('[')) return inet_pton(AF_INET, host.c_str(), &address) == 1;
  if (!host.ends_with(']')) return false;
  host = host.substr(1, host.size() - 2);
  return inet_pton(AF_INET6, host.c_str(), &address) == 1;
}

// Sets the field and says true, or leaves it and says false.
struct Assign {
  const RawValue& value;
  Config* config;

  bool Typed(RawKind kind) const { return value.kind == kind || value.kind == RawKind::kText; }

  bool operator()(const BytesKey& key) const {
    if (!Typed(RawKind::kInteger) && value.kind != RawKind::kString) return false;
    const auto bytes = ParseBytes(value.text);
    if (!bytes.has_value() || *bytes < key.min || *bytes > key.max) return false;
    key.field(*config) = *bytes;
    return true;
  }
  bool operator()(const IntegerKey& key) const {
    const auto number = ParseAll<uint32_t>(value.text);
    if (!Typed(RawKind::kInteger) || !number.has_value()) return false;
    if (*number < key.min || *number > key.max) return false;
    key.field(*config) = *number;
    return true;
  }
  // A TOML integer is a number already (0o660), a text is octal digits.
  bool operator()(const ModeKey& key) const {
    if (!Typed(RawKind::kString) && value.kind != RawKind::kInteger) return false;
    const auto mode = ParseAll<uint32_t>(value.text, value.kind == RawKind::kInteger ? 10 : 8);
    if (!mode.has_value() || *mode > 0777) return false;
    key.field(*config) = *mode;
    return true;
  }
  bool operator()(const RatioKey& key) const {
    if (!Typed(RawKind::kFloat) && value.kind != RawKind::kInteger) return false;
    const auto ratio = ParseAll<double>(value.text);
    if (!ratio.has_value() || !std::isfinite(*ratio) || *ratio <= 0 || *ratio > 1) return false;
    key.field(*config) = *ratio;
    return true;
  }
  bool operator()(const BoolKey& key) const {
    if (!Typed(RawKind::kBool) || (value.text != "true" && value.text != "false")) return false;
    key.field(*config) = value.text == "true";
    return true;
  }
  bool operator()(const PathKey& key) const {
    if (!Typed(RawKind::kString)) return false;
    if (!value.text.empty() || !key.may_be_empty) {
      if (value.text.size() < 2 || value.text.size() > 4000) return false;
      if (value.text.front() != '/' || !IsPathText(value.text)) return false;
    }
    key.field(*config) = value.text;
    return true;
  }
  bool operator()(const PathsKey& key) const {
    if (!Typed(RawKind::kString) || !IsPathText(value.text)) return false;
    for (const std::string_view path : SplitPaths(value.text)) {
      if (path.size() < 2 || path.size() > 4000 || path.front() != '/') return false;
    }
    key.field(*config) = value.text;
    return true;
  }
  bool operator()(const AddressKey& key) const {
    if (!Typed(RawKind::kString) || value.text.find('\0') != std::string::npos) return false;
    if (!value.text.empty() && !IsAddress(value.text)) return false;
    key.field(*config) = value.text;
    return true;
  }
  bool operator()(const ChoiceKey& key) const {
    if (!Typed(RawKind::kString)) return false;
    if (std::find(key.choices.begin(), key.choices.end(), value.text) == key.choices.end()) {
      return false;
    }
    key.field(*config) = value.text;
    return true;
  }
};

std::string Quoted(std::string_view text) {
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') quoted += '\\';
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) {
      quoted += absl::StrFormat("\\u%04X", static_cast<unsigned>(c));
    } else {
      quoted += c;
    }
  }
  return quoted + "\"";
}

// The value as TOML.
struct Print {
  Config& config;

  std::string operator()(const BytesKey& key) const {
    const std::string text = FormatBytes(key.field(config));
    return text.ends_with("iB") ? Quoted(text) : text;
  }
  std::string operator()(const IntegerKey& key) const {
    return absl::StrFormat("%d", key.field(config));
  }
  std::string operator()(const ModeKey& key) const {
    return absl::StrFormat("\"%04o\"", key.field(config));
  }
  std::string operator()(const RatioKey& key) const {
    // TOML tells 1 from 1.0; both are taken.
    return FormatReal(key.field(config));
  }
  std::string operator()(const BoolKey& key) const { return key.field(config) ? "true" : "false"; }
  std::string operator()(const PathKey& key) const { return Quoted(key.field(config)); }
  std::string operator()(const PathsKey& key) const { return Quoted(key.field(config)); }
  std::string operator()(const AddressKey& key) const { return Quoted(key.field(config)); }
  std::string operator()(const ChoiceKey& key) const { return Quoted(key.field(config)); }
};

std::string PrintCertificates(const std::vector<std::string>& names) {
  std::string list;
  for (const std::string& name : names) {
    list += absl::StrFormat("%s%s", list.empty() ? "" : ", ", Quoted(name));
  }
  return list.empty() ? "" : absl::StrFormat("certificates = [%s]\n", list);
}

std::string Environment(std::string_view name) {
  std::string variable = "KVTIER_";
  for (const char c : name) {
    variable += c == '.' ? '_' : static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  }
  return variable;
}

constexpr std::string_view kFaultInjectionKey = "nvme.fault_injection";

absl::Status SetFaultInjection([[maybe_unused]] const RawValue& value,
                               [[maybe_unused]] Config* config) {
#ifdef KVTIER_FAULT_INJECTION
  if (value.kind != RawKind::kText && value.kind != RawKind::kString) {
    return Invalid("%s: is not a text", kFaultInjectionKey);
  }
  config->nvme.fault_injection = value.text;
  return absl::OkStatus();
#else
  return Invalid(
      "%s: this kvtierd was built without it (KVTIER_FAULT_INJECTION), for it is a test's",
      kFaultInjectionKey);
#endif
}

}  // namespace

std::string FormatReal(double real) {
  char text[32];
  return {text, std::to_chars(text, text + sizeof(text), real).ptr};
}

absl::Status UnknownKey(std::string_view name) {
  return Invalid("%s: unknown key (kvtierd --help lists the known ones)", name);
}

bool IsConfigSection(std::string_view section) {
  return std::any_of(Keys().begin(), Keys().end(),
                     [&](const KeySpec& key) { return Section(key.name) == section; });
}

absl::Status SetConfigKey(std::string_view name, const RawValue& value, Config* config) {
  if (name == kFaultInjectionKey) return SetFaultInjection(value, config);
  const auto key = std::find_if(Keys().begin(), Keys().end(),
                                [&](const KeySpec& spec) { return spec.name == name; });
  if (key == Keys().end()) return UnknownKey(name);
  if (std::visit(Assign{value, config}, key->kind)) return absl::OkStatus();
  return Invalid("%s: %s is not in range (%s)", name, Quoted(value.text),
                 std::visit(RangeText{}, key->kind));
}

std::string ConfigKeyOfEnvironment(std::string_view variable) {
  for (const KeySpec& key : Keys()) {
    const std::string section = Section(key.name);
    const std::string prefix = Environment(section) + "_";
    if (!variable.starts_with(prefix)) continue;
    std::string name = section + ".";
    for (const char c : variable.substr(prefix.size())) {
      name += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    }
    return name;
  }
  return "";
}

std::string PrintConfig(const Config& config) {
  Config copy = config;
  std::string text;
  std::string section;
  for (const KeySpec& key : Keys()) {
    if (Section(key.name) != section) {
      text += absl::StrFormat("%s[%s]\n", section.empty() ? "" : "\n", Section(key.name));
      section = Section(key.name);
    }
    text += absl::StrFormat("# %s (%s)\n%s = %s\n", key.help, std::visit(RangeText{}, key.kind),
                            key.name.substr(section.size() + 1), std::visit(Print{copy}, key.kind));
  }
  for (const TenantConfig& tenant : config.tenants) {
    std::string uids;
    for (const uint32_t uid : tenant.uids) {
      uids += absl::StrFormat("%s%d", uids.empty() ? "" : ", ", uid);
    }
    text += absl::StrFormat("\n[[tenant]]\nname = %s\n", Quoted(tenant.name));
    if (!uids.empty()) text += absl::StrFormat("uids = [%s]\n", uids);
    const char* const tiers[] = {"hbm", "host", "nvme"};
    for (size_t tier = 0; tier < tenant.quotas.size(); ++tier) {
      if (const auto& quota = tenant.quotas[tier]; quota.has_value()) {
        text += absl::StrFormat("%s_quota = %s\n", tiers[tier], FormatShare(*quota));
      }
      if (const auto& reserve = tenant.reserves[tier]; reserve.has_value()) {
        text += absl::StrFormat("%s_reserve = %s\n", tiers[tier], FormatShare(*reserve));
      }
    }
    text += PrintCertificates(tenant.certificates);
    if (tenant.calls_per_second > 0) {
      text += absl::StrFormat("calls_per_second = %d\n", tenant.calls_per_second);
    }
  }
  for (const AdminConfig& admin : config.admins) {
    text += absl::StrFormat("\n[[admin]]\nname = %s\n", Quoted(admin.name));
    text += PrintCertificates(admin.certificates);
  }
  return text;
}

std::string ConfigHelp() {
  Config defaults;
  std::string text;
  for (const KeySpec& key : Keys()) {
    text += absl::StrFormat("  --%s=VALUE\n      %s\n      %s; default %s; environment %s\n",
                            key.name, key.help, std::visit(RangeText{}, key.kind),
                            std::visit(Print{defaults}, key.kind), Environment(key.name));
  }
  return text;
}

std::vector<std::string> SplitPaths(std::string_view paths) {
  std::vector<std::string> split;
  while (!paths.empty()) {
    const size_t end = std::min(paths.find(':'), paths.size());
    split.emplace_back(paths.substr(0, end));
    // A colon at the end is followed by an empty path.
    if (end + 1 == paths.size()) split.emplace_back();
    paths.remove_prefix(std::min(end + 1, paths.size()));
  }
  return split;
}

std::string FormatBytes(uint64_t bytes) {
  const std::pair<std::string_view, uint64_t> units[] = {
      {"TiB", kTiB}, {"GiB", kGiB}, {"MiB", kMiB}, {"KiB", kKiB}};
  for (const auto& [suffix, unit] : units) {
    if (bytes >= unit && bytes % unit == 0) return absl::StrFormat("%d %s", bytes / unit, suffix);
  }
  return absl::StrFormat("%d", bytes);
}

}  // namespace kvtier
