// SPDX-License-Identifier: Apache-2.0
#include "client/ctl/doctor.h"

#include <toml++/toml.h>

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <sstream>

#include "client/ctl/plan.h"
#include "client/ctl/table.h"
#include "proto/base/status_util.h"

namespace kvtier::ctl {
namespace {

// Beside the tiers: RocksDB, gRPC, the index of a million blocks.
constexpr uint64_t kDaemonBytes = 1ULL << 30;
// Segments of 32 MiB, connections and segment files; the unit's LimitNOFILE= is far above.
constexpr uint64_t kDescriptorsMin = 8192;
// Of these, for connections and what the libraries open.
constexpr uint64_t kDescriptorsBesideSegments = 1024;
// Below this a prefix of 1 GiB takes five seconds, and recomputing is the better choice.
constexpr double kDiskBytesPerSecondMin = 200e6;
constexpr int kCudaVersionMin = 13000;
// Certificates of 30 days are changed by then.
constexpr int64_t kCertificateSecondsMin = 7 * 86'400;

uint64_t MemoryOf(const DoctorPlan& plan) {
  // On the GPU, hbm is no memory of this machine.
  return plan.host_bytes + (plan.device == "cuda" ? 0 : plan.hbm_bytes);
}

Finding Good(std::string check, std::string found) {
  return {Verdict::kGood, std::move(check), std::move(found), ""};
}
Finding Warning(std::string check, std::string found, std::string advice) {
  return {Verdict::kWarning, std::move(check), std::move(found), std::move(advice)};
}
Finding Problem(std::string check, std::string found, std::string advice) {
  return {Verdict::kProblem, std::move(check), std::move(found), std::move(advice)};
}

Finding ExamineMemory(const DoctorPlan& plan, const DoctorFacts& facts) {
  const uint64_t wanted = MemoryOf(plan) + kDaemonBytes;
  const std::string found =
      absl::StrFormat("%s for the tiers and the daemon, of %s available", HumanBytes(wanted),
                      HumanBytes(std::min(facts.available_bytes, facts.cgroup_bytes)));
  if (wanted > std::min(facts.memory_bytes, facts.cgroup_bytes)) {
    return Problem("memory", found,
                   facts.cgroup_bytes < facts.memory_bytes
                       ? "raise the control group's limit (MemoryMax=), or lower "
                         "host.capacity_bytes"
                       : "lower host.capacity_bytes (and hbm.capacity_bytes on the cpu device)");
  }
  if (wanted > facts.available_bytes) {
    return Warning("memory", found, "other processes hold the rest: see what the engine leaves");
  }
  return Good("memory", found);
}

Finding ExamineMemlock(const DoctorPlan& plan, const DoctorFacts& facts) {
  if (facts.memlock_bytes == UINT64_MAX) return Good("memlock", "unlimited");
  const std::string found = HumanBytes(facts.memlock_bytes) + " may be locked";
  if (facts.memlock_bytes >= MemoryOf(plan)) return Good("memlock", found);
  return Warning("memlock", found,
                 "host can be swapped out, and io_uring registers no buffers: "
                 "LimitMEMLOCK=infinity in the unit, or ulimit -l");
}

Finding ExamineHugePages(const DoctorPlan& plan, const DoctorFacts& facts) {
  if (plan.reserved_huge_pages) {
    const std::string found = HumanBytes(facts.free_huge_page_bytes) + " reserved and free";
    if (facts.free_huge_page_bytes >= plan.host_bytes) return Good("huge pages", found);
    return Warning("huge pages", found,
                   absl::StrFormat("sysctl vm.nr_hugepages=%d, for all of host",
                                   (plan.host_bytes + (2 << 20) - 1) / (2 << 20)));
  }
  const std::string found =
      "for shared memory: " + (facts.shmem_huge_pages.empty() ? "unknown" : facts.shmem_huge_pages);
  if (facts.shmem_huge_pages == "never" || facts.shmem_huge_pages.empty()) {
    return Warning("huge pages", found,
                   "reads from nvme into small pages are slower: write advise to "
                   "/sys/kernel/mm/transparent_hugepage/shmem_enabled, or "
                   "host.huge_pages = \"reserved\"");
  }
  return Good("huge pages", found);
}

Finding ExamineNuma(const DoctorFacts& facts) {
  const std::string found =
      absl::StrFormat("%d node%s", facts.numa_node_count, facts.numa_node_count == 1 ? "" : "s");
  if (facts.numa_node_count < 2) return Good("numa", found);
  return Warning("numa", found,
                 "host is on the node that the daemon starts on: give each GPU a daemon on its "
                 "own node (NUMAPolicy=bind and NUMAMask= in the unit)");
}

uint64_t SegmentCount(const DoctorPlan& plan) {
  const auto count = [](uint64_t bytes, uint64_t segment_bytes) {
    return segment_bytes == 0 ? 0 : bytes / segment_bytes;
  };
  return count(plan.hbm_bytes, plan.hbm_segment_bytes) +
         count(plan.host_bytes, plan.host_segment_bytes) +
         (plan.nvme_enabled ? count(plan.nvme_bytes, plan.nvme_segment_bytes) : 0);
}

Finding ExamineDescriptors(const DoctorPlan& plan, const DoctorFacts& facts) {
  const uint64_t wanted_count =
      std::max(kDescriptorsMin, kDescriptorsBesideSegments + SegmentCount(plan));
  const std::string found = HumanCount(facts.descriptor_max) + " at most";
  if (facts.descriptor_max >= wanted_count) return Good("descriptors", found);
  return Warning("descriptors", found,
                 absl::StrFormat("LimitNOFILE=%d or more in the unit: each segment and connection "
                                 "is one",
                                 std::max<uint64_t>(524'288, 2 * wanted_count)));
}

Finding ExamineUring(const DoctorFacts& facts) {
  if (facts.io_uring_errno == 0) return Good("io_uring", "works");
  return Warning("io_uring", std::strerror(facts.io_uring_errno),
                 facts.is_filtered
                     ? "the seccomp profile refuses it; nvme uses threads, with more CPU: "
                       "deploy/kubernetes/seccomp/kvtierd.json allows it"
                     : "nvme uses threads, with more CPU: see kernel.io_uring_disabled");
}

Finding ExamineData(const DoctorPlan& plan, const DoctorFacts& facts) {
  if (!facts.data_error.empty()) {
    return Problem("data directory", facts.data_error,
                   plan.data_dir +
                       " must be the daemon's user's: chown it, or run this as that "
                       "user");
  }
  const std::string found =
      absl::StrFormat("%s, %s free", facts.file_system, HumanBytes(facts.data_free_bytes));
  if (facts.data_free_bytes < plan.nvme_bytes) {
    return Problem("data directory", found,
                   absl::StrFormat("nvme.capacity_bytes is %s: lower it, or another file system",
                                   HumanBytes(plan.nvme_bytes)));
  }
  if (facts.file_system == "tmpfs" || facts.file_system == "overlay" ||
      facts.file_system == "nfs" || facts.file_system == "fuse") {
    return Warning("data directory", found,
                   "a local NVMe drive with ext4 or xfs survives restarts and is faster");
  }
  return Good("data directory", found);
}

Finding ExamineDirs(const DoctorPlan& plan, const DoctorFacts& facts) {
  if (plan.nvme_dirs.empty()) return Good("nvme drives", "below the data directory");
  if (facts.dirs_on_root.empty()) return Good("nvme drives", "not on the root file system");
  std::string dirs;
  for (const std::string& dir : facts.dirs_on_root) dirs += (dirs.empty() ? "" : ", ") + dir;
  return Warning("nvme drives", dirs + " on the root file system",
                 "mount the drive that nvme.dirs means, before kvtierd starts: "
                 "RequiresMountsFor= in the unit");
}

Finding ExamineDirect(const DoctorFacts& facts) {
  if (facts.direct_errno == 0) return Good("O_DIRECT", "works");
  return Warning("O_DIRECT", std::strerror(facts.direct_errno),
                 "reads and writes go through the page cache, and take memory there: another "
                 "file system");
}

Finding ExamineDisk(const DoctorFacts& facts) {
  if (facts.write_bytes_per_second <= 0 || facts.read_bytes_per_second <= 0) {
    return Good("disk speed", "not measured (--disk measures)");
  }
  const std::string found =
      absl::StrFormat("writes %.2f GB/s, reads %.2f GB/s, 1 MiB at a time",
                      facts.write_bytes_per_second / 1e9, facts.read_bytes_per_second / 1e9);
  if (std::min(facts.write_bytes_per_second, facts.read_bytes_per_second) <
      kDiskBytesPerSecondMin) {
    return Warning("disk speed", found,
                   "too slow to be worth more than recomputing; a local NVMe drive, or "
                   "nvme.enabled = false");
  }
  return Good("disk speed", found);
}

Finding ExamineRunDir(const DoctorPlan& plan, const DoctorFacts& facts) {
  if (!facts.run_error.empty()) {
    return Problem("run directory", facts.run_error,
                   plan.run_dir +
                       " must be the daemon's user's: systemd-tmpfiles --create "
                       "kvtier.conf, or chown it");
  }
  if (facts.admin_socket_mode != 0 && facts.admin_socket_mode != 0600) {
    return Problem("run directory",
                   absl::StrFormat("admin.sock has mode %04o", facts.admin_socket_mode),
                   "somebody changed it: restart kvtierd, which makes it 0600");
  }
  return Good("run directory", "can be written");
}

Finding ExamineTls(const DoctorPlan& plan, const DoctorFacts& facts) {
  if (plan.tcp_address.empty()) return Good("tls", "not asked for (server.tcp_address)");
  if (!facts.tls_error.empty()) {
    return Problem("tls", facts.tls_error,
                   "server.tls_cert, server.tls_key and server.tls_ca must be PEM files that fit "
                   "together, and the daemon's user must be able to read them");
  }
  const int64_t days = facts.tls_left_seconds / 86'400;
  if (facts.tls_left_seconds < 0) {
    return Problem("tls", absl::StrFormat("a certificate expired %d days ago", -days),
                   "nobody can connect by TCP: put new certificates in place, which takes no "
                   "restart");
  }
  const std::string found = absl::StrFormat("certificates are good for %d days", days);
  if (facts.tls_left_seconds < kCertificateSecondsMin) {
    return Warning("tls", found, "put new certificates in place, which takes no restart");
  }
  if (facts.tls_key_is_group_readable) {
    return Warning("tls", "the group can read server.tls_key", "chmod 0600 " + plan.tls.key);
  }
  return Good("tls", found);
}

Finding ExamineClock(const DoctorFacts& facts) {
  if (facts.clock_is_synchronized) return Good("clock", "synchronized");
  return Warning("clock", "not synchronized",
                 "logs and the day of the write budget follow it: systemd-timesyncd or chrony");
}

Finding ExamineCuda(const DoctorPlan& plan, const DoctorFacts& facts) {
  if (plan.device != "cuda") return Good("gpu", "not asked for (hbm.device = \"cpu\")");
  if (!facts.cuda_error.empty()) {
    return Problem("gpu", facts.cuda_error,
                   "install NVIDIA's driver and let this process see it, or hbm.device = \"cpu\"");
  }
  const std::string found =
      absl::StrFormat("%d devices, driver for CUDA %d.%d", facts.cuda_device_count,
                      facts.cuda_version / 1000, facts.cuda_version % 1000 / 10);
  if (facts.cuda_device_count == 0) {
    return Problem("gpu", found, "CUDA_VISIBLE_DEVICES hides them, or the driver does");
  }
  if (facts.cuda_version < kCudaVersionMin) {
    return Problem("gpu", found, "driver 580 or newer");
  }
  if (facts.cuda_exporting_count < facts.cuda_device_count) {
    return Problem("gpu",
                   absl::StrFormat("%s, %d of them cannot export memory", found,
                                   facts.cuda_device_count - facts.cuda_exporting_count),
                   "engines map hbm by file descriptors: another GPU, or one without a vGPU");
  }
  return Good("gpu", found);
}

const char* VerdictText(Verdict verdict) {
  switch (verdict) {
    case Verdict::kGood:
      return "ok";
    case Verdict::kWarning:
      return "warning";
    case Verdict::kProblem:
      return "problem";
  }
  return "";
}

absl::Status ReadBytes(const toml::table& config, std::string_view key, uint64_t* field) {
  const auto node = config.at_path(key);
  if (!node) return absl::OkStatus();
  if (const auto integer = node.value_exact<int64_t>(); integer.has_value() && *integer >= 0) {
    *field = static_cast<uint64_t>(*integer);
    return absl::OkStatus();
  }
  const auto text = node.value_exact<std::string>();
  if (!text.has_value()) return Invalid("%s: not a size", key);
  KVT_ASSIGN_OR_RETURN(const double bytes, ParsePlanBytes(*text));
  *field = static_cast<uint64_t>(bytes);
  return absl::OkStatus();
}

void ReadText(const toml::table& config, std::string_view key, std::string* field) {
  if (const auto text = config.at_path(key).value_exact<std::string>()) *field = *text;
}

absl::StatusOr<toml::table> ParseToml(std::string_view text) {
  try {
    return toml::parse(text);
  } catch (const toml::parse_error& error) {
    return Invalid("line %d: %s", error.source().begin.line, error.description());
  }
}

}  // namespace

absl::StatusOr<DoctorPlan> ReadDoctorPlan(std::string_view toml_text) {
  KVT_ASSIGN_OR_RETURN(const toml::table config, ParseToml(toml_text));
  DoctorPlan plan;
  ReadText(config, "server.run_dir", &plan.run_dir);
  ReadText(config, "server.data_dir", &plan.data_dir);
  ReadText(config, "hbm.device", &plan.device);
  KVT_RETURN_IF_ERROR(ReadBytes(config, "hbm.capacity_bytes", &plan.hbm_bytes));
  KVT_RETURN_IF_ERROR(ReadBytes(config, "host.capacity_bytes", &plan.host_bytes));
  KVT_RETURN_IF_ERROR(ReadBytes(config, "nvme.capacity_bytes", &plan.nvme_bytes));
  KVT_RETURN_IF_ERROR(ReadBytes(config, "hbm.segment_bytes", &plan.hbm_segment_bytes));
  KVT_RETURN_IF_ERROR(ReadBytes(config, "host.segment_bytes", &plan.host_segment_bytes));
  KVT_RETURN_IF_ERROR(ReadBytes(config, "nvme.segment_bytes", &plan.nvme_segment_bytes));
  ReadText(config, "server.tcp_address", &plan.tcp_address);
  ReadText(config, "server.tls_cert", &plan.tls.cert);
  ReadText(config, "server.tls_key", &plan.tls.key);
  ReadText(config, "server.tls_ca", &plan.tls.ca);
  plan.nvme_enabled = config.at_path("nvme.enabled").value_or(plan.nvme_enabled);
  std::string dirs;
  ReadText(config, "nvme.dirs", &dirs);
  std::istringstream each(dirs);
  for (std::string dir; std::getline(each, dir, ':');) plan.nvme_dirs.push_back(dir);
  std::string huge_pages;
  ReadText(config, "host.huge_pages", &huge_pages);
  plan.reserved_huge_pages = huge_pages == "reserved";
  return plan;
}

std::vector<Finding> Examine(const DoctorPlan& plan, const DoctorFacts& facts) {
  std::vector<Finding> findings = {
      ExamineCuda(plan, facts),      ExamineMemory(plan, facts), ExamineMemlock(plan, facts),
      ExamineHugePages(plan, facts), ExamineNuma(facts),         ExamineDescriptors(plan, facts),
      ExamineRunDir(plan, facts),    ExamineTls(plan, facts),    ExamineClock(facts)};
  if (plan.nvme_enabled) {
    findings.push_back(ExamineData(plan, facts));
    findings.push_back(ExamineDirs(plan, facts));
    findings.push_back(ExamineDirect(facts));
    findings.push_back(ExamineUring(facts));
    findings.push_back(ExamineDisk(facts));
  }
  return findings;
}

std::string DoctorText(const std::vector<Finding>& findings) {
  TextTable table({"CHECK", "", "FOUND"});
  for (const Finding& finding : findings) {
    table.Add({finding.check, VerdictText(finding.verdict), finding.found});
  }
  std::string text = table.Print();
  for (const Finding& finding : findings) {
    if (finding.advice.empty()) continue;
    text += absl::StrFormat("\n%s: %s\n", finding.check, finding.advice);
  }
  return text;
}

nlohmann::ordered_json DoctorJson(const std::vector<Finding>& findings) {
  nlohmann::ordered_json checks = nlohmann::ordered_json::array();
  Verdict worst = Verdict::kGood;
  for (const Finding& finding : findings) {
    worst = std::max(worst, finding.verdict);
    checks.push_back({{"check", finding.check},
                      {"verdict", VerdictText(finding.verdict)},
                      {"found", finding.found},
                      {"advice", finding.advice}});
  }
  return {{"verdict", VerdictText(worst)}, {"checks", checks}};
}

}  // namespace kvtier::ctl
