// SPDX-License-Identifier: Apache-2.0
//
// The process that nvme_crash_test kills.
//   nvme_crash_child DIR SEED           writes and frees blocks for ever and says so on stdout,
//                                       while another thread verifies what is live
//   nvme_crash_child --no-io-uring DIR  forbids io_uring as a container does, then uses a tier
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "proto/base/check.h"
#include "tiers/nvme/nvme_tier.h"
#include "tiers/tier_test_util.h"

namespace kvtier {
namespace {

// One write(2) a line: whole lines reach the pipe, whenever the process dies.
void Say(char what, const BlockMeta& meta, uint64_t seed) {
  const std::string line = std::string(1, what) + " " + meta.key.Hex() + " " +
                           std::to_string(seed) + " " + std::to_string(meta.payload_bytes) + "\n";
  KVT_CHECK(write(STDOUT_FILENO, line.data(), line.size()) == static_cast<ssize_t>(line.size()));
}

std::unique_ptr<NvmeTier> OpenTier(const std::string& dir) {
  auto tier = NvmeTier::Create({.dir = dir, .capacity_bytes = 12 << 20, .segment_bytes = 1 << 20});
  if (!tier.ok()) {
    std::fprintf(stderr, "%s\n", tier.status().ToString().c_str());
    std::exit(1);
  }
  return std::move(tier).value();
}

class Writer {
 public:
  Writer(const std::string& dir, uint64_t seed)
      : tier_(OpenTier(dir)), random_(seed), next_seed_(seed) {
    const absl::Status recovered = tier_->Recover([this](const BlockMeta& meta, ReplicaId replica) {
      absl::MutexLock lock(&mutex_);
      live_.push_back({.meta = meta, .seed = 0, .replica = replica});
    });
    KVT_CHECK(recovered.ok());
  }

  [[noreturn]] void Run() {
    const std::jthread verifier([this, seed = next_seed_] { VerifyForEver(seed); });
    while (true) {
      WaitForRoomInFlight();
      if (random_() % 3 == 0) FreeSome(1);
      const uint64_t seed = next_seed_++;
      const auto payload_bytes = static_cast<uint32_t>(1 + random_() % 200000);
      auto block = std::make_unique<TestBlock>(MakeBlock(seed, payload_bytes));
      const auto replica = tier_->Reserve(payload_bytes, 1);
      if (!replica.ok()) {
        FreeSome(3);
        continue;
      }
      {
        absl::MutexLock lock(&mutex_);
        ++in_flight_count_;
      }
      const TestBlock& written = *block;
      Say('S', written.meta, seed);
      tier_->Write(*replica, written.meta, written.payload.bytes(),
                   [this, seed, id = *replica, block = std::move(block)](absl::Status status) {
                     EndWrite(*block, seed, id, status);
                   });
    }
  }

 private:
  struct Live {
    BlockMeta meta;
    uint64_t seed = 0;
    ReplicaId replica = kNoReplica;
  };
  static constexpr int kInFlightMax = 6;

  // One live block after the other, each out of the writer's reach meanwhile.
  [[noreturn]] void VerifyForEver(uint64_t seed) {
    for (std::mt19937_64 random(seed);;) {
      Live live;
      {
        absl::MutexLock lock(&mutex_);
        mutex_.Await(absl::Condition(this, &Writer::HasLive));
        std::swap(live_[random() % live_.size()], live_.back());
        live = live_.back();
        live_.pop_back();
      }
      PageBuffer target(live.meta.payload_bytes);
      const absl::Status status = ReadAndWait(*tier_, live.replica, live.meta, target.bytes());
      KVT_CHECK(status.ok());
      absl::MutexLock lock(&mutex_);
      live_.push_back(live);
    }
  }

  bool HasLive() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return !live_.empty(); }
  bool HasRoomInFlight() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return in_flight_count_ < kInFlightMax;
  }
  void WaitForRoomInFlight() {
    absl::MutexLock lock(&mutex_);
    mutex_.Await(absl::Condition(this, &Writer::HasRoomInFlight));
  }
  void EndWrite(const TestBlock& block, uint64_t seed, ReplicaId replica,
                const absl::Status& status) {
    if (status.ok()) {
      Say('W', block.meta, seed);
    } else {
      tier_->Free(replica);
    }
    absl::MutexLock lock(&mutex_);
    --in_flight_count_;
    if (status.ok()) live_.push_back({.meta = block.meta, .seed = seed, .replica = replica});
  }
  void FreeSome(int count) {
    for (int i = 0; i < count; ++i) {
      Live victim;
      {
        absl::MutexLock lock(&mutex_);
        if (live_.empty()) return;
        std::swap(live_[random_() % live_.size()], live_.back());
        victim = live_.back();
        live_.pop_back();
      }
      // Before it happens: a block that is gone was announced.
      Say('F', victim.meta, victim.seed);
      tier_->Free(victim.replica);
    }
  }

  std::unique_ptr<NvmeTier> tier_;
  std::mt19937_64 random_;
  uint64_t next_seed_;
  absl::Mutex mutex_;
  int in_flight_count_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<Live> live_ ABSL_GUARDED_BY(mutex_);
};

// Docker's and containerd's default policy: EPERM for io_uring_setup.
void ForbidIoUring() {
  sock_filter filter[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_io_uring_setup, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog program = {.len = sizeof(filter) / sizeof(filter[0]), .filter = filter};
  KVT_CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
  KVT_CHECK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0);
}

int RunWithoutIoUring(const std::string& dir) {
  ForbidIoUring();
  NvmeOptions options{.dir = dir,
                      .capacity_bytes = 12 << 20,
                      .segment_bytes = 1 << 20,
                      .io_engine = NvmeIoEngine::kIoUring};
  KVT_CHECK(NvmeTier::Create(options).status().code() == absl::StatusCode::kFailedPrecondition);
  std::unique_ptr<NvmeTier> tier = OpenTier(dir);
  KVT_CHECK(tier->Recover([](const BlockMeta&, ReplicaId) {}).ok());
  const TestBlock block = MakeBlock(1, 100000);
  const auto replica = tier->Reserve(100000, 1);
  KVT_CHECK(replica.ok());
  KVT_CHECK(WriteAndWait(*tier, *replica, block.meta, block.payload.bytes()).ok());
  KVT_CHECK(ReadAndCompare(*tier, *replica, block).ok());
  std::printf("%s\n", tier->Stats().io_engine.c_str());
  return 0;
}

}  // namespace
}  // namespace kvtier

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  if (std::string_view(argv[1]) == "--no-io-uring") return kvtier::RunWithoutIoUring(argv[2]);
  kvtier::Writer(argv[1], std::strtoull(argv[2], nullptr, 10)).Run();
}
