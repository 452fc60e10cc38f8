// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvtier {

// Memory for tables of millions of entries that are read at random: straight from the system, at a
// multiple of 2 MiB and of that size, so that it can be one huge page and a look into it one miss
// in the processor's address cache instead of two or three.
inline constexpr size_t kHugeChunkBytes = size_t{2} << 20;

// `is_huge` asks for the huge page, which then is there as a whole from the first byte written on;
// otherwise memory is taken by pages of 4 KiB as it is written. All zero. Thread-safe. Throws
// std::bad_alloc.
void* MapHugeChunk(bool is_huge);
void UnmapHugeChunk(void* chunk);

// Of all chunks there are. malloc's books do not have them.
uint64_t HugeChunkBytes();

}  // namespace kvtier
