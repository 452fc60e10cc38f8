// SPDX-License-Identifier: Apache-2.0
//
// kvtierd where something of the kernel's is missing: io_uring, memory that may be locked,
// O_DIRECT, a plain file system. It serves nvme on a lower rung and says which and why, or it ends
// with one line that says what to change.
//   rungs_test KVTIERD
//   rungs_test --with RESTRICTION PROGRAM [ARGUMENT]...    runs a program under a restriction
#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/audit.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <iostream>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "client/src/admin_client.h"
#include "tests/integration/daemon_process.h"

namespace kvtier::testing {
namespace {

using std::chrono::milliseconds;

std::string g_self;
std::string g_kvtierd;

// What the launcher ends with when this machine, or this user, has no such restriction.
constexpr int kExitNotHere = 77;
constexpr rlim_t kMemlockBytes = 64 << 10;
constexpr size_t kBlocks = 64;
constexpr uint64_t kHostBytes = 4 << 20;

#if defined(__x86_64__)
constexpr uint32_t kArchitecture = AUDIT_ARCH_X86_64;
#elif defined(__aarch64__)
constexpr uint32_t kArchitecture = AUDIT_ARCH_AARCH64;
#endif

// --- the launcher ---

// Everything is allowed but what `rules` (after the number of the call was loaded) refuse.
bool Filter(std::vector<sock_filter> rules) {
  std::vector<sock_filter> program = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, arch)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, kArchitecture, 1, 0),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
  };
  program.insert(program.end(), rules.begin(), rules.end());
  program.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
  const sock_fprog filter{.len = static_cast<unsigned short>(program.size()),
                          .filter = program.data()};
  return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0;
}

bool RefuseIoUring(uint32_t error) {
  return Filter({BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_io_uring_setup, 0, 1),
                 BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | error)});
}

// As open(2) answers on a file system without it.
bool RefuseDirect() {
  // The low half of the third argument.
  constexpr uint32_t kFlags = offsetof(seccomp_data, args) + 2 * sizeof(uint64_t);
  return Filter({BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_openat, 0, 3),
                 BPF_STMT(BPF_LD | BPF_W | BPF_ABS, kFlags),
                 BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, O_DIRECT, 0, 1),
                 BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EINVAL)});
}

bool LimitLockedMemory() {
  const rlimit limit{.rlim_cur = kMemlockBytes, .rlim_max = kMemlockBytes};
  // Root has the right to exceed it again after exec, unless it is out of its bounds.
  if (geteuid() == 0 && prctl(PR_CAPBSET_DROP, CAP_IPC_LOCK, 0, 0, 0) != 0) return false;
  return setrlimit(RLIMIT_MEMLOCK, &limit) == 0;
}

// An overlay of `directory`/lower and upper at `directory`/merged, for this process and its own.
bool MountOverlay(const std::string& directory) {
  for (const char* name : {"lower", "upper", "work", "merged"}) {
    std::error_code error;
    std::filesystem::create_directory(directory + "/" + name, error);
    if (error) return false;
  }
  const std::string options = "lowerdir=" + directory + "/lower,upperdir=" + directory +
                              "/upper,workdir=" + directory + "/work";
  return unshare(CLONE_NEWNS) == 0 && mount("", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
         mount("overlay", (directory + "/merged").c_str(), "overlay", 0, options.c_str()) == 0;
}

bool Restrict(std::string_view restriction) {
  const std::string_view value =
      restriction.substr(std::min(restriction.size(), restriction.find('=') + 1));
  if (restriction == "io_uring=EPERM") return RefuseIoUring(EPERM);
  if (restriction == "io_uring=ENOSYS") return RefuseIoUring(ENOSYS);
  if (restriction == "o_direct") return RefuseDirect();
  if (restriction == "memlock") return LimitLockedMemory();
  if (restriction.starts_with("overlay=")) return MountOverlay(std::string(value));
  return restriction == "none";
}

int RunWith(std::string_view restriction, char** arguments) {
  if (!Restrict(restriction)) {
    std::fprintf(stderr, "%s: %s\n", std::string(restriction).c_str(), std::strerror(errno));
    return kExitNotHere;
  }
  execv(arguments[0], arguments);
  std::perror(arguments[0]);
  return EXIT_FAILURE;
}

// --- the tests ---

std::vector<std::string> SmallTiers(const std::vector<std::string>& more) {
  std::vector<std::string> options = {
      "--hbm.capacity_bytes=1MiB", "--hbm.segment_bytes=256KiB",  "--host.capacity_bytes=4MiB",
      "--host.segment_bytes=1MiB", "--nvme.capacity_bytes=64MiB", "--nvme.segment_bytes=2MiB",
      "--host.warm_restart=off",
  };
  options.insert(options.end(), more.begin(), more.end());
  return options;
}

// The lines that have `text`.
std::vector<std::string> LinesWith(const std::string& log, const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(log);
  for (std::string line; std::getline(stream, line);) {
    if (line.find(text) != std::string::npos) lines.push_back(line);
  }
  return lines;
}

std::string LastLine(const std::string& log) {
  const std::vector<std::string> lines = LinesWith(log, "");
  return lines.empty() ? "" : lines.back();
}

class RungsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!IsHere("none")) GTEST_SKIP() << "programs cannot be started";
  }

  static bool IsHere(const std::string& restriction) {
    DaemonProcess probe("/bin/true", {}, {g_self, "--with", restriction});
    const auto status = probe.RunToEnd(milliseconds(30'000));
    EXPECT_TRUE(status.ok()) << status.status();
    return status.ok() && *status == 0;
  }

  void Open(const std::string& restriction, const std::vector<std::string>& more = {}) {
    daemon_ = std::make_unique<DaemonProcess>(
        g_kvtierd, SmallTiers(more), std::vector<std::string>{g_self, "--with", restriction});
  }

  void Start() {
    const absl::Status started = daemon_->Start();
    ASSERT_TRUE(started.ok()) << started;
    auto client = daemon_->Connect();
    ASSERT_TRUE(client.ok()) << client.status();
    client_ = std::move(*client);
    const auto ns = client_->RegisterLayout(SmallLayout());
    ASSERT_TRUE(ns.ok()) << ns.status();
    ns_ = *ns;
  }

  // Blocks go to nvme, the daemon is killed, and the next one reads them back.
  void ExpectNvmeServes() {
    ASSERT_NO_FATAL_FAILURE(Start());
    const std::vector<Key> keys = MakeChain(ns_, 1, kBlocks);
    ASSERT_EQ(*PutChain(client_.get(), ns_, keys), kBlocks);
    client::AdminClient admin({.run_dir = daemon_->run_dir()});
    const auto flushed = admin.Flush();
    ASSERT_TRUE(flushed.ok()) << flushed.status();
    daemon_->Kill9();
    ASSERT_NO_FATAL_FAILURE(Start());
    const auto read = CheckChain(client_.get(), ns_, keys);
    ASSERT_TRUE(read.ok()) << read.status();
    EXPECT_EQ(read->right, kBlocks) << daemon_->Log();
  }

  // The line of `kvtierctl tiers` about this tier.
  v1::TierStats TierLine(v1::Tier tier) {
    client::AdminClient admin({.run_dir = daemon_->run_dir()});
    const auto tiers = admin.GetTiers();
    EXPECT_TRUE(tiers.ok()) << tiers.status();
    if (!tiers.ok()) return {};
    const auto line = std::ranges::find(tiers->tiers(), tier, &v1::TierStats::tier);
    return line == tiers->tiers().end() ? v1::TierStats() : *line;
  }

  // What `kvtierctl status` shows, and the line about the tiers at each of the two starts.
  void ExpectSays(const std::string& engine, const std::string& description) {
    client::AdminClient admin({.run_dir = daemon_->run_dir()});
    const auto status = admin.GetStatus();
    ASSERT_TRUE(status.ok()) << status.status();
    EXPECT_EQ(status->io_engine(), engine);
    for (const v1::TierHealth& health : status->tier_healths()) {
      EXPECT_FALSE(health.degraded()) << health.reason();
    }
    const v1::NvmeStats nvme = TierLine(v1::TIER_NVME).nvme();
    EXPECT_EQ(nvme.io_engine(), description);
    EXPECT_EQ(nvme.recovered_block_count(), kBlocks);
    ASSERT_EQ(nvme.directories_size(), 1);
    EXPECT_EQ(nvme.directories(0).failure(), "");
    EXPECT_GT(nvme.directories(0).used_bytes(), 0U);
    const std::vector<std::string> lines = LinesWith(daemon_->Log(), "tiers open");
    ASSERT_EQ(lines.size(), 2U) << daemon_->Log();
    for (const std::string& line : lines) {
      EXPECT_NE(line.find("io_engine=\"" + description + "\""), std::string::npos) << line;
    }
    EXPECT_EQ(*daemon_->Stop(), 0) << daemon_->Log();
  }

  // The daemon does not start; its last line is `line`.
  void ExpectRefuses(const std::string& line) {
    const auto status = daemon_->RunToEnd(milliseconds(30'000));
    ASSERT_TRUE(status.ok()) << status.status() << "\n" << daemon_->Log();
    EXPECT_NE(*status, 0);
    EXPECT_NE(*status, kExitNotHere);
    EXPECT_LT(*status, 128) << "a signal";
    EXPECT_EQ(LastLine(daemon_->Log()), line) << daemon_->Log();
  }

  std::unique_ptr<DaemonProcess> daemon_;
  std::unique_ptr<client::Client> client_;
  client::Namespace ns_;
};

TEST_F(RungsTest, WithEverythingAllMemoryOfHostIsRegistered) {
  for (const bool locks : {true, false}) {
    SCOPED_TRACE(locks);
    Open("none", {locks ? "--host.lock_memory=auto" : "--host.lock_memory=off"});
    ASSERT_NO_FATAL_FAILURE(Start());
    if (TierLine(v1::TIER_NVME).nvme().io_engine() != "io_uring") {
      GTEST_SKIP() << "less here: " << TierLine(v1::TIER_NVME).nvme().io_engine();
    }
    EXPECT_TRUE(Eventually(milliseconds(30'000), [&] {
      const v1::TierStats host = TierLine(v1::TIER_HOST);
      return host.ready_bytes() == host.capacity_bytes();
    }));
    if (locks) {
      // And what hbm has by now.
      EXPECT_TRUE(Eventually(milliseconds(30'000), [&] {
        return TierLine(v1::TIER_NVME).nvme().registered_bytes() >= kHostBytes;
      })) << TierLine(v1::TIER_NVME).nvme().registered_bytes();
    } else {
      EXPECT_EQ(TierLine(v1::TIER_NVME).nvme().registered_bytes(), 0U);
    }
    EXPECT_EQ(*daemon_->Stop(), 0) << daemon_->Log();
  }
}

TEST_F(RungsTest, WithoutIoUringThePreadPoolServes) {
  const std::pair<const char*, const char*> refusals[] = {
      {"io_uring=EPERM", "Operation not permitted"},
      {"io_uring=ENOSYS", "Function not implemented"}};
  for (const auto& [restriction, error] : refusals) {
    SCOPED_TRACE(restriction);
    Open(restriction);
    ASSERT_NO_FATAL_FAILURE(ExpectNvmeServes());
    ExpectSays("pread",
               std::string("pread, without io_uring: UNAVAILABLE: io_uring_setup: ") + error);
  }
}

TEST_F(RungsTest, IoUringThatIsAskedForAndRefusedIsOneLine) {
  Open("io_uring=EPERM", {"--nvme.io_engine=io_uring"});
  ExpectRefuses("kvtierd: " + daemon_->data_dir() +
                "/nvme: io_uring_setup: Operation not permitted");
}

TEST_F(RungsTest, WithLittleLockableMemoryIoUringServesUnregistered) {
  if (!IsHere("io_uring=EPERM")) GTEST_SKIP() << "no seccomp here";
  Open("memlock");
  ASSERT_NO_FATAL_FAILURE(ExpectNvmeServes());
  client::AdminClient admin({.run_dir = daemon_->run_dir()});
  if (admin.GetStatus()->io_engine() != "io_uring") GTEST_SKIP() << "no io_uring here";
  ExpectSays("io_uring", "io_uring, without registered memory: RLIMIT_MEMLOCK is 65536 bytes");
}

TEST_F(RungsTest, MemoryThatMustBeLockedAndCannotBeIsOneLine) {
  Open("memlock", {"--host.lock_memory=on"});
  ExpectRefuses(
      "kvtierd: host: memory is not locked: capacity_bytes 4194304 is more than the 65536 bytes of "
      "RLIMIT_MEMLOCK; raise it (LimitMEMLOCK= of the service, ulimit -l), or set host.lock_memory "
      "= auto");
}

TEST_F(RungsTest, WithoutODirectThePageCacheServes) {
  Open("o_direct");
  ASSERT_NO_FATAL_FAILURE(ExpectNvmeServes());
  client::AdminClient admin({.run_dir = daemon_->run_dir()});
  const std::string engine = admin.GetStatus()->io_engine();
  ExpectSays(engine, engine + ", without O_DIRECT: the file system has none");
}

TEST_F(RungsTest, AnOverlayServes) {
  // Only for its directory.
  const DaemonProcess home(g_kvtierd, {});
  const std::string directory = home.data_dir();
  ASSERT_TRUE(std::filesystem::create_directory(directory));
  const std::string restriction = "overlay=" + directory;
  if (!IsHere(restriction)) GTEST_SKIP() << "an overlay cannot be mounted here (root can)";
  Open(restriction, {"--nvme.dirs=" + directory + "/merged/nvme"});
  ASSERT_NO_FATAL_FAILURE(ExpectNvmeServes());
  EXPECT_TRUE(std::filesystem::exists(directory + "/upper/nvme/LOCK"));
  EXPECT_EQ(*daemon_->Stop(), 0) << daemon_->Log();
}

}  // namespace
}  // namespace kvtier::testing

int main(int argc, char** argv) {
  if (argc > 3 && std::string_view(argv[1]) == "--with") {
    return kvtier::testing::RunWith(argv[2], argv + 3);
  }
  ::testing::InitGoogleTest(&argc, argv);
  if (argc != 2) {
    std::cerr << "usage: rungs_test KVTIERD\n";
    return 2;
  }
  kvtier::testing::g_self = std::filesystem::read_symlink("/proc/self/exe");
  kvtier::testing::g_kvtierd = argv[1];
  return RUN_ALL_TESTS();
}
