// SPDX-License-Identifier: Apache-2.0
#include "client/ctl/doctor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cerrno>
#include <functional>
#include <nlohmann/json.hpp>

#include "proto/base/status_util.h"

namespace kvtier::ctl {
namespace {

using ::testing::HasSubstr;

// A node without a fault, for the default plan.
DoctorFacts Fit() {
  DoctorFacts facts;
  facts.memory_bytes = 64ULL << 30;
  facts.available_bytes = 60ULL << 30;
  facts.descriptor_max = 524'288;
  facts.shmem_huge_pages = "advise";
  facts.file_system = "ext4";
  facts.data_free_bytes = 1ULL << 40;
  facts.write_bytes_per_second = 2e9;
  facts.read_bytes_per_second = 3e9;
  facts.admin_socket_mode = 0600;
  facts.cuda_device_count = 8;
  facts.cuda_exporting_count = 8;
  facts.cuda_version = 13'000;
  return facts;
}

TEST(DoctorTest, AFitNodeHasNoFinding) {
  for (const char* device : {"cpu", "cuda"}) {
    DoctorPlan plan;
    plan.device = device;
    for (const Finding& finding : Examine(plan, Fit())) {
      EXPECT_EQ(finding.verdict, Verdict::kGood) << finding.check << ": " << finding.found;
      EXPECT_EQ(finding.advice, "") << finding.check;
    }
  }
}

struct Fault {
  const char* check;
  Verdict verdict;
  // What its advice must name.
  const char* advice;
  std::function<void(DoctorPlan*, DoctorFacts*)> plant;
};

class DoctorFindsTest : public ::testing::TestWithParam<Fault> {};

TEST_P(DoctorFindsTest, ThePlantedFaultAndNoOther) {
  DoctorPlan plan;
  DoctorFacts facts = Fit();
  GetParam().plant(&plan, &facts);
  for (const Finding& finding : Examine(plan, facts)) {
    if (finding.check == GetParam().check) {
      EXPECT_EQ(finding.verdict, GetParam().verdict) << finding.found;
      EXPECT_THAT(finding.advice, HasSubstr(GetParam().advice));
    } else {
      EXPECT_EQ(finding.verdict, Verdict::kGood) << finding.check << ": " << finding.found;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Faults, DoctorFindsTest,
    ::testing::Values(
        Fault{"memory", Verdict::kProblem, "host.capacity_bytes",
              [](DoctorPlan* plan, DoctorFacts*) { plan->host_bytes = 64ULL << 30; }},
        Fault{"memory", Verdict::kProblem, "MemoryMax=",
              [](DoctorPlan*, DoctorFacts* facts) { facts->cgroup_bytes = 1ULL << 30; }},
        Fault{"memory", Verdict::kWarning, "other processes",
              [](DoctorPlan*, DoctorFacts* facts) { facts->available_bytes = 1ULL << 30; }},
        Fault{"memlock", Verdict::kWarning, "LimitMEMLOCK=infinity",
              [](DoctorPlan*, DoctorFacts* facts) { facts->memlock_bytes = 64 << 10; }},
        Fault{"huge pages", Verdict::kWarning, "shmem_enabled",
              [](DoctorPlan*, DoctorFacts* facts) { facts->shmem_huge_pages = "never"; }},
        Fault{"huge pages", Verdict::kWarning, "vm.nr_hugepages=128",
              [](DoctorPlan* plan, DoctorFacts*) { plan->reserved_huge_pages = true; }},
        Fault{"numa", Verdict::kWarning,
              "NUMAMask=", [](DoctorPlan*, DoctorFacts* facts) { facts->numa_node_count = 2; }},
        Fault{"descriptors", Verdict::kWarning, "LimitNOFILE=",
              [](DoctorPlan*, DoctorFacts* facts) { facts->descriptor_max = 1024; }},
        Fault{"descriptors", Verdict::kWarning, "LimitNOFILE=4196376 or more",
              [](DoctorPlan* plan, DoctorFacts* facts) {
                facts->data_free_bytes = 4ULL << 40;
                plan->nvme_bytes = 2ULL << 40;
                plan->nvme_segment_bytes = 1ULL << 20;
              }},
        Fault{"io_uring", Verdict::kWarning, "kernel.io_uring_disabled",
              [](DoctorPlan*, DoctorFacts* facts) { facts->io_uring_errno = EPERM; }},
        Fault{"io_uring", Verdict::kWarning, "seccomp profile",
              [](DoctorPlan*, DoctorFacts* facts) {
                facts->io_uring_errno = EPERM;
                facts->is_filtered = true;
              }},
        Fault{"data directory", Verdict::kProblem, "chown",
              [](DoctorPlan*, DoctorFacts* facts) { facts->data_error = "Permission denied"; }},
        Fault{"data directory", Verdict::kProblem, "nvme.capacity_bytes",
              [](DoctorPlan* plan, DoctorFacts*) { plan->nvme_bytes = 2ULL << 40; }},
        Fault{"data directory", Verdict::kWarning, "ext4 or xfs",
              [](DoctorPlan*, DoctorFacts* facts) { facts->file_system = "overlay"; }},
        Fault{"nvme drives", Verdict::kWarning, "RequiresMountsFor=",
              [](DoctorPlan* plan, DoctorFacts* facts) {
                plan->nvme_dirs = {"/mnt/a", "/mnt/b"};
                facts->dirs_on_root = {"/mnt/b"};
              }},
        Fault{"O_DIRECT", Verdict::kWarning, "page cache",
              [](DoctorPlan*, DoctorFacts* facts) { facts->direct_errno = EINVAL; }},
        Fault{"disk speed", Verdict::kWarning, "recomputing",
              [](DoctorPlan*, DoctorFacts* facts) { facts->read_bytes_per_second = 90e6; }},
        Fault{"run directory", Verdict::kProblem, "tmpfiles",
              [](DoctorPlan*, DoctorFacts* facts) { facts->run_error = "Permission denied"; }},
        Fault{"tls", Verdict::kProblem, "server.tls_key",
              [](DoctorPlan* plan, DoctorFacts* facts) {
                plan->tcp_address = "0.0.0.0:7443";
                facts->tls_error = "/etc/kvtier/tls.key: No such file or directory";
              }},
        Fault{"tls", Verdict::kProblem, "no restart",
              [](DoctorPlan* plan, DoctorFacts* facts) {
                plan->tcp_address = "0.0.0.0:7443";
                facts->tls_left_seconds = -1;
              }},
        Fault{"tls", Verdict::kWarning, "no restart",
              [](DoctorPlan* plan, DoctorFacts* facts) {
                plan->tcp_address = "0.0.0.0:7443";
                facts->tls_left_seconds = 6 * 86'400;
              }},
        Fault{"tls", Verdict::kWarning, "chmod 0600",
              [](DoctorPlan* plan, DoctorFacts* facts) {
                plan->tcp_address = "0.0.0.0:7443";
                facts->tls_key_is_group_readable = true;
              }},
        Fault{"run directory", Verdict::kProblem, "0600",
              [](DoctorPlan*, DoctorFacts* facts) { facts->admin_socket_mode = 0666; }},
        Fault{"clock", Verdict::kWarning, "chrony",
              [](DoctorPlan*, DoctorFacts* facts) { facts->clock_is_synchronized = false; }},
        Fault{"gpu", Verdict::kProblem, "driver",
              [](DoctorPlan* plan, DoctorFacts* facts) {
                plan->device = "cuda";
                facts->cuda_error = "no libcuda.so.1";
              }},
        Fault{"gpu", Verdict::kProblem, "CUDA_VISIBLE_DEVICES",
              [](DoctorPlan* plan, DoctorFacts* facts) {
                plan->device = "cuda";
                facts->cuda_device_count = 0;
              }},
        Fault{"gpu", Verdict::kProblem, "580",
              [](DoctorPlan* plan, DoctorFacts* facts) {
                plan->device = "cuda";
                facts->cuda_version = 12'080;
              }},
        Fault{"gpu", Verdict::kProblem, "file descriptors",
              [](DoctorPlan* plan, DoctorFacts* facts) {
                plan->device = "cuda";
                facts->cuda_exporting_count = 7;
              }}));

TEST(DoctorTest, HbmOnAGpuIsNoMemoryOfTheMachine) {
  DoctorPlan plan;
  plan.device = "cuda";
  plan.hbm_bytes = 80ULL << 30;
  for (const Finding& finding : Examine(plan, Fit())) {
    EXPECT_EQ(finding.verdict, Verdict::kGood) << finding.check;
  }
}

TEST(DoctorTest, WithoutNvmeTheDiskIsNoMatter) {
  DoctorPlan plan;
  plan.nvme_enabled = false;
  DoctorFacts facts = Fit();
  facts.data_error = "Permission denied";
  for (const Finding& finding : Examine(plan, facts)) {
    EXPECT_NE(finding.check, "data directory");
  }
}

TEST(DoctorTest, ReadsTheDaemonsConfiguration) {
  const auto plan = ReadDoctorPlan(
      "[server]\ndata_dir = \"/data\"\n[hbm]\ndevice = \"cuda\"\ncapacity_bytes = \"2 GiB\"\n"
      "[host]\ncapacity_bytes = 4096\nsegment_bytes = \"1 GiB\"\nhuge_pages = "
      "\"reserved\"\n[nvme]\nenabled = false\ndirs = \"/mnt/a:/mnt/b\"\n");
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->data_dir, "/data");
  EXPECT_EQ(plan->run_dir, DoctorPlan().run_dir);
  EXPECT_EQ(plan->device, "cuda");
  EXPECT_EQ(plan->hbm_bytes, 2ULL << 30);
  EXPECT_EQ(plan->host_bytes, 4096U);
  EXPECT_EQ(plan->host_segment_bytes, 1ULL << 30);
  EXPECT_EQ(plan->hbm_segment_bytes, DoctorPlan().hbm_segment_bytes);
  EXPECT_TRUE(plan->reserved_huge_pages);
  EXPECT_FALSE(plan->nvme_enabled);
  EXPECT_EQ(plan->nvme_dirs, (std::vector<std::string>{"/mnt/a", "/mnt/b"}));
  for (const char* bad : {"[hbm", "[hbm]\ncapacity_bytes = true", "[hbm]\ncapacity_bytes = \"x\"",
                          "[hbm]\ncapacity_bytes = -1"}) {
    EXPECT_EQ(ReadDoctorPlan(bad).status().code(), absl::StatusCode::kInvalidArgument) << bad;
  }
}

TEST(DoctorTest, GathersFromThisMachine) {
  DoctorPlan plan;
  plan.data_dir = ::testing::TempDir() + "/not/there/yet";
  plan.run_dir = ::testing::TempDir();
  // "/" is on the root file system, /proc is not.
  plan.nvme_dirs = {"/", "/proc"};
  const DoctorFacts facts = GatherFacts(plan, false);
  EXPECT_GT(facts.memory_bytes, 0U);
  EXPECT_GE(facts.memory_bytes, facts.available_bytes);
  EXPECT_EQ(facts.dirs_on_root, std::vector<std::string>{"/"});
  EXPECT_GT(facts.descriptor_max, 0U);
  EXPECT_GE(facts.numa_node_count, 1U);
  EXPECT_EQ(facts.data_error, "");
  EXPECT_EQ(facts.run_error, "");
  EXPECT_NE(facts.file_system, "");
  EXPECT_GT(facts.data_free_bytes, 0U);
  EXPECT_EQ(facts.write_bytes_per_second, 0) << "not asked for";
}

TEST(DoctorTest, SaysWhatCannotBeWritten) {
  DoctorPlan plan;
  plan.data_dir = "/proc/kvtier";
  plan.run_dir = "/proc/kvtier";
  const DoctorFacts facts = GatherFacts(plan, false);
  EXPECT_THAT(facts.data_error, HasSubstr("/proc: "));
  // Root may "write" there as far as access() knows.
  if (geteuid() == 0) return;
  EXPECT_THAT(facts.run_error, HasSubstr("/proc: "));
}

TEST(DoctorTest, TextAndJsonSayTheSame) {
  DoctorFacts facts = Fit();
  facts.direct_errno = EINVAL;
  const auto findings = Examine({}, facts);
  const std::string text = DoctorText(findings);
  EXPECT_THAT(text, HasSubstr("O_DIRECT        warning  Invalid argument\n"));
  EXPECT_THAT(text, HasSubstr("\nO_DIRECT: reads and writes go through"));
  const auto json = DoctorJson(findings);
  EXPECT_EQ(json["verdict"], "warning");
  EXPECT_EQ(json["checks"].size(), findings.size());
}

}  // namespace
}  // namespace kvtier::ctl
