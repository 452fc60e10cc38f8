// SPDX-License-Identifier: Apache-2.0
#include "tiers/memory/memory_calls.h"

#include <linux/capability.h>
#include <linux/mempolicy.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <fstream>
#include <sstream>
#include <vector>

namespace kvtier {
namespace {

constexpr uint32_t kNodesMax = 1024;

int NegativeErrno(long result) { return result < 0 ? -errno : static_cast<int>(result); }

// Whether the process is exempt from RLIMIT_MEMLOCK.
bool MayLockAnything() {
  __user_cap_header_struct header{.version = _LINUX_CAPABILITY_VERSION_3, .pid = 0};
  std::array<__user_cap_data_struct, _LINUX_CAPABILITY_U32S_3> data{};
  if (syscall(SYS_capget, &header, data.data()) != 0) return false;
  return (data[CAP_TO_INDEX(CAP_IPC_LOCK)].effective & CAP_TO_MASK(CAP_IPC_LOCK)) != 0;
}

// "0-3,8" as numbers below `end`.
std::vector<uint32_t> ReadList(const std::string& path, uint32_t end) {
  std::vector<uint32_t> numbers;
  std::ifstream file(path);
  for (std::string range; std::getline(file, range, ',');) {
    std::istringstream text(range);
    uint32_t first = 0;
    if (!(text >> first)) continue;
    uint32_t last = first;
    if (char dash = 0; text >> dash) text >> last;
    for (uint32_t number = first; number <= last && number < end; ++number) {
      numbers.push_back(number);
    }
  }
  return numbers;
}

}  // namespace

int MemoryCalls::CreateMemfd(const char* name, unsigned flags) {
  return NegativeErrno(memfd_create(name, flags));
}

int MemoryCalls::Map(int fd, uint64_t bytes, void** base) {
  // Room for it at a multiple of a huge page: elsewhere the kernel makes none of its pages huge.
  const uint64_t room_bytes = bytes + kHugePageBytes;
  void* const room =
      mmap(nullptr, room_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (room == MAP_FAILED) return -errno;
  auto* const begin = static_cast<std::byte*>(room);
  const uint64_t skipped_bytes = -reinterpret_cast<uintptr_t>(room) % kHugePageBytes;
  std::byte* const wanted = begin + skipped_bytes;
  *base = mmap(wanted, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0);
  if (*base == MAP_FAILED) {
    const int error = errno;
    munmap(room, room_bytes);
    return -error;
  }
  if (skipped_bytes > 0) munmap(room, skipped_bytes);
  if (skipped_bytes < kHugePageBytes) munmap(wanted + bytes, kHugePageBytes - skipped_bytes);
  return 0;
}

int MemoryCalls::Advise(std::span<std::byte> memory, int advice) {
  return NegativeErrno(madvise(memory.data(), memory.size(), advice));
}

int MemoryCalls::Lock(std::span<std::byte> memory) {
  return NegativeErrno(mlock(memory.data(), memory.size()));
}

int MemoryCalls::PreferNode(std::span<std::byte> memory, uint32_t node_idx) {
  if (node_idx >= kNodesMax) return -EINVAL;
  constexpr size_t kWordBits = CHAR_BIT * sizeof(unsigned long);
  std::array<unsigned long, kNodesMax / kWordBits> nodes{};
  nodes[node_idx / kWordBits] = 1UL << (node_idx % kWordBits);
  // The kernel reads one bit less than it is told.
  return NegativeErrno(syscall(SYS_mbind, memory.data(), memory.size(), MPOL_PREFERRED,
                               nodes.data(), static_cast<unsigned long>(kNodesMax) + 1, 0));
}

uint64_t MemoryCalls::LockableBytes() {
  rlimit limit{};
  if (MayLockAnything() || getrlimit(RLIMIT_MEMLOCK, &limit) != 0) return UINT64_MAX;
  return limit.rlim_cur == RLIM_INFINITY ? UINT64_MAX : uint64_t{limit.rlim_cur};
}

MemoryCalls& KernelMemoryCalls() {
  static MemoryCalls* const calls = new MemoryCalls();
  return *calls;
}

std::optional<uint32_t> NodeOfThisProcess(const std::string& sys_root) {
  const std::string folder = sys_root + "/devices/system/node";
  const std::vector<uint32_t> nodes = ReadList(folder + "/online", kNodesMax);
  cpu_set_t allowed;
  if (nodes.size() < 2 || sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return std::nullopt;
  for (const uint32_t node : nodes) {
    const std::vector<uint32_t> cpus =
        ReadList(folder + "/node" + std::to_string(node) + "/cpulist", CPU_SETSIZE);
    const auto here = std::count_if(cpus.begin(), cpus.end(),
                                    [&](uint32_t cpu) { return CPU_ISSET(cpu, &allowed); });
    if (here == CPU_COUNT(&allowed)) return node;
    if (here > 0) return std::nullopt;
  }
  return std::nullopt;
}

}  // namespace kvtier
