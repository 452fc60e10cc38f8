// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace kvtier {

// CRC-32C (Castagnoli, reflected, initial value and final xor 0xFFFFFFFF): 0xE3069283 for
// "123456789". `seed` is the CRC of the bytes before these, 0 at the start. Pure; 20+ GB/s per core
// (ISA-L).
uint32_t Crc32c(std::span<const std::byte> data, uint32_t seed = 0);

}  // namespace kvtier
