// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace kvtier {

// Copies `source` to the start of `target` and returns the CRC-32C of what it wrote there. Each
// byte of the source is read once: it may be memory that others change meanwhile. With carry-less
// multiplication of vectors (AVX-512 or AVX2) at least as fast as copying alone; blocks do not stay
// in the caches. Requires: target.size() >= source.size(), and no overlap.
uint32_t CopyWithCrc32c(std::span<std::byte> target, std::span<const std::byte> source);

// One way to do the same. For tests.
struct CheckedCopy {
  const char* name;
  uint32_t (*copy)(std::span<std::byte> target, std::span<const std::byte> source);
};
// Those this CPU can run, the fastest first; the last one runs on every CPU.
std::vector<CheckedCopy> CheckedCopies();

}  // namespace kvtier
