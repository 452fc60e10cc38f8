// SPDX-License-Identifier: Apache-2.0
//
// Whether a node is fit for kvtierd: what was found (facts), and what it means (findings). Examine
// is a pure function; GatherFacts looks at the machine.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "proto/base/tls_material.h"

namespace kvtier::ctl {

// What the daemon is to have. The defaults are those of kvtierd.
struct DoctorPlan {
  std::string run_dir = "/run/kvtierd";
  std::string data_dir = "/var/lib/kvtierd";
  // "cpu" or "cuda".
  std::string device = "cpu";
  uint64_t hbm_bytes = 64ULL << 20;
  uint64_t host_bytes = 256ULL << 20;
  uint64_t nvme_bytes = 1ULL << 30;
  uint64_t hbm_segment_bytes = 16ULL << 20;
  uint64_t host_segment_bytes = 32ULL << 20;
  uint64_t nvme_segment_bytes = 64ULL << 20;
  bool nvme_enabled = true;
  // Empty: below data_dir.
  std::vector<std::string> nvme_dirs = {};
  bool reserved_huge_pages = false;
  // Empty: no TCP, and the files are not looked at.
  std::string tcp_address;
  TlsPaths tls;
};

// A TOML file of kvtierd, as --print-config writes it: keys that are missing keep their defaults.
absl::StatusOr<DoctorPlan> ReadDoctorPlan(std::string_view toml);

// Of this machine, for this user and control group. Bytes, unless the name says something else.
struct DoctorFacts {
  uint64_t memory_bytes = 0;
  uint64_t available_bytes = 0;
  // UINT64_MAX: no limit.
  uint64_t cgroup_bytes = UINT64_MAX;
  uint64_t memlock_bytes = UINT64_MAX;
  uint64_t descriptor_max = 0;
  uint32_t numa_node_count = 1;
  // "always", "within_size", "advise", "never" or empty.
  std::string shmem_huge_pages;
  uint64_t free_huge_page_bytes = 0;

  // 0: io_uring works.
  int io_uring_errno = 0;
  bool is_filtered = false;  // seccomp

  // Why a file cannot be written in data_dir, or in its next parent that is there; empty: it can.
  std::string data_error;
  std::string file_system;
  uint64_t data_free_bytes = 0;
  // Of the directories that are named for nvme.
  std::vector<std::string> dirs_on_root = {};
  // 0: O_DIRECT works.
  int direct_errno = 0;
  // 0: not measured.
  double write_bytes_per_second = 0;
  double read_bytes_per_second = 0;

  std::string run_error;
  // Mode of admin.sock; 0: no daemon has run here.
  uint32_t admin_socket_mode = 0;

  // Why TCP could not be served with its three files; empty: it could.
  std::string tls_error;
  bool tls_key_is_group_readable = false;
  // From now to the end of the first certificate that ends; negative: it has ended.
  int64_t tls_left_seconds = INT64_MAX;

  bool clock_is_synchronized = true;
  // Microseconds of the wall clock's estimated error; 0: unknown.
  int64_t clock_error_us = 0;

  // Why there is no CUDA; empty: there is.
  std::string cuda_error;
  uint32_t cuda_device_count = 0;
  // Of the driver: 13000 is 13.0.
  int cuda_version = 0;
  // Devices that can export memory as file descriptors.
  uint32_t cuda_exporting_count = 0;
};

// Looks at the machine; `measures_disk` writes and reads 256 MiB in data_dir. Leaves nothing
// behind.
DoctorFacts GatherFacts(const DoctorPlan& plan, bool measures_disk);

enum class Verdict : uint8_t { kGood, kWarning, kProblem };

struct Finding {
  Verdict verdict = Verdict::kGood;
  // "memory", "io_uring": stable names.
  std::string check;
  std::string found;
  // What to do; empty when it is good.
  std::string advice;
};

// Every check, good or not, in a fixed order.
std::vector<Finding> Examine(const DoctorPlan& plan, const DoctorFacts& facts);

std::string DoctorText(const std::vector<Finding>& findings);
nlohmann::ordered_json DoctorJson(const std::vector<Finding>& findings);

}  // namespace kvtier::ctl
