// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

namespace kvtier {

// The size of a huge page that segments may be made of.
inline constexpr uint64_t kHugePageBytes = 2ULL << 20;

// What the memory tier asks of the kernel. A seam: tests stand in for machines with huge pages,
// several nodes or tight limits by overriding a call. Results are 0 (a descriptor) or -errno.
// Thread-safe.
class MemoryCalls {
 public:
  virtual ~MemoryCalls() = default;

  virtual int CreateMemfd(const char* name, unsigned flags);
  // The whole file, shared, readable and writable, at a multiple of kHugePageBytes.
  virtual int Map(int fd, uint64_t bytes, void** base);
  virtual int Advise(std::span<std::byte> memory, int advice);
  virtual int Lock(std::span<std::byte> memory);
  // Prefers the node for every page of the file behind `memory`, whoever touches it first.
  virtual int PreferNode(std::span<std::byte> memory, uint32_t node_idx);
  // What this process may lock in all; UINT64_MAX with CAP_IPC_LOCK or without a limit.
  virtual uint64_t LockableBytes();
};

// The kernel's. Never destroyed.
MemoryCalls& KernelMemoryCalls();

// The memory node whose CPUs alone this process may run on; nothing when it may run on several, or
// the machine has one. The root is for tests.
std::optional<uint32_t> NodeOfThisProcess(const std::string& sys_root = "/sys");

}  // namespace kvtier
