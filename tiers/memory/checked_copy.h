// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace kvtier {

// Copies `source` to the start of `target` and returns the CRC-32C of what it wrote there. Each
// byte of the source is read once: it may be memory that others change meanwhile. With AVX-512 as
// fast as copying alone; blocks do not stay in the caches. Requires: target.size() >=
// source.size(), and no overlap.
uint32_t CopyWithCrc32c(std::span<std::byte> target, std::span<const std::byte> source);

// The same for every CPU. For tests.
uint32_t CopyWithCrc32cPortable(std::span<std::byte> target, std::span<const std::byte> source);

}  // namespace kvtier
