// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace kvtier {

// Unguessable bytes from the kernel. Blocks only before the machine's entropy pool is ready.
void FillRandom(std::span<uint8_t> bytes);

// Never 0.
uint64_t RandomNonZero();

}  // namespace kvtier
