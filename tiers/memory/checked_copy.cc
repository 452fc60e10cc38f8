// SPDX-License-Identifier: Apache-2.0
#include "tiers/memory/checked_copy.h"

#include <algorithm>
#include <cstring>

#include "proto/base/check.h"
#include "proto/base/crc32c.h"

#ifdef __x86_64__
#include <immintrin.h>
#endif

namespace kvtier {
namespace {

// What is copied is still in the second-level cache when its checksum is computed.
constexpr size_t kPortablePieceBytes = 32 << 10;

#ifdef __x86_64__
#define KVTIER_AVX2_TARGET target("avx2,vpclmulqdq,pclmul,sse4.2")
#define KVTIER_AVX512_TARGET target("avx512f,avx512vl,vpclmulqdq,pclmul,sse4.2")
#define KVTIER_AVX2 __attribute__((KVTIER_AVX2_TARGET, always_inline)) inline
#define KVTIER_AVX512 __attribute__((KVTIER_AVX512_TARGET, always_inline)) inline

// What one step of the loops copies: the sum has as many lanes of 16 bytes.
constexpr size_t kStrideBytes = 256;
constexpr size_t kLanes = kStrideBytes / 16;
// How far ahead of the copy the source is fetched; the best of 1 to 16 KiB on AMD EPYC.
constexpr size_t kPrefetchBytes = 3072;

// The polynomial's remainders of x^(8n - 33) and x^(8n + 31), bits reversed: they move 128 bits on
// by n bytes.
struct Multipliers {
  long long low;
  long long high;
};
constexpr Multipliers kBy16 = {.low = 0xF20C0DFE, .high = 0x493C7D27};
constexpr Multipliers kBy256 = {.low = 0xDCB17AA4, .high = 0xB9E02B86};

// Before the first byte the register holds ones.
constexpr long long kSeed = 0xFFFFFFFF;

inline void Fetch(const std::byte* source) {
  for (size_t line = 0; line < kStrideBytes; line += 64) {
    _mm_prefetch(reinterpret_cast<const char*>(source + line), _MM_HINT_T0);
  }
}

// The checksum of all lanes, each 16 bytes before the next.
__attribute__((target("pclmul,sse4.2"))) uint32_t Reduce(const __m128i (&lanes)[kLanes]) {
  const __m128i by16 = _mm_set_epi64x(kBy16.high, kBy16.low);
  __m128i sum = lanes[0];
  for (size_t i = 1; i < kLanes; ++i) {
    const __m128i moved =
        _mm_xor_si128(_mm_clmulepi64_si128(sum, by16, 0x00), _mm_clmulepi64_si128(sum, by16, 0x11));
    sum = _mm_xor_si128(moved, lanes[i]);
  }
  uint64_t crc = _mm_crc32_u64(0, static_cast<uint64_t>(_mm_extract_epi64(sum, 0)));
  crc = _mm_crc32_u64(crc, static_cast<uint64_t>(_mm_extract_epi64(sum, 1)));
  return ~static_cast<uint32_t>(crc);
}

KVTIER_AVX512 __m512i Fold(__m512i sum, __m512i by, __m512i next) {
  constexpr int kXorOfThree = 0x96;
  return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(sum, by, 0x00),
                                   _mm512_clmulepi64_epi128(sum, by, 0x11), next, kXorOfThree);
}
KVTIER_AVX2 __m256i Fold(__m256i sum, __m256i by, __m256i next) {
  return _mm256_xor_si256(_mm256_xor_si256(_mm256_clmulepi64_epi128(sum, by, 0x00),
                                           _mm256_clmulepi64_epi128(sum, by, 0x11)),
                          next);
}

// Past the caches: the target is not read for it, and what is in them stays.
KVTIER_AVX512 __m512i Copy64(std::byte* target, const std::byte* source) {
  const __m512i bytes = _mm512_loadu_si512(source);
  _mm512_stream_si512(reinterpret_cast<__m512i*>(target), bytes);
  return bytes;
}
KVTIER_AVX2 __m256i Copy32(std::byte* target, const std::byte* source) {
  const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source));
  _mm256_stream_si256(reinterpret_cast<__m256i*>(target), bytes);
  return bytes;
}

// Copies `bytes`, a multiple of 256 and not 0. Requires: `target` is aligned to 64.
__attribute__((KVTIER_AVX512_TARGET)) uint32_t CopyStridesAvx512(std::byte* target,
                                                                 const std::byte* source,
                                                                 size_t bytes) {
  const __m512i by256 = _mm512_set_epi64(kBy256.high, kBy256.low, kBy256.high, kBy256.low,
                                         kBy256.high, kBy256.low, kBy256.high, kBy256.low);
  __m512i sums[4];
#pragma GCC unroll 4
  for (size_t i = 0; i < 4; ++i) sums[i] = Copy64(target + 64 * i, source + 64 * i);
  sums[0] = _mm512_xor_si512(sums[0], _mm512_set_epi64(0, 0, 0, 0, 0, 0, 0, kSeed));
  for (size_t at = kStrideBytes; at < bytes; at += kStrideBytes) {
    Fetch(source + at + kPrefetchBytes);
#pragma GCC unroll 4
    for (size_t i = 0; i < 4; ++i) {
      sums[i] = Fold(sums[i], by256, Copy64(target + at + 64 * i, source + at + 64 * i));
    }
  }
  // Streamed stores are not ordered with those that publish the block.
  _mm_sfence();
  __m128i lanes[kLanes];
  std::memcpy(lanes, sums, sizeof(lanes));
  return Reduce(lanes);
}

// The same for CPUs without AVX-512.
__attribute__((KVTIER_AVX2_TARGET)) uint32_t CopyStridesAvx2(std::byte* target,
                                                             const std::byte* source,
                                                             size_t bytes) {
  const __m256i by256 = _mm256_set_epi64x(kBy256.high, kBy256.low, kBy256.high, kBy256.low);
  __m256i sums[8];
#pragma GCC unroll 8
  for (size_t i = 0; i < 8; ++i) sums[i] = Copy32(target + 32 * i, source + 32 * i);
  sums[0] = _mm256_xor_si256(sums[0], _mm256_set_epi64x(0, 0, 0, kSeed));
  for (size_t at = kStrideBytes; at < bytes; at += kStrideBytes) {
    Fetch(source + at + kPrefetchBytes);
#pragma GCC unroll 8
    for (size_t i = 0; i < 8; ++i) {
      sums[i] = Fold(sums[i], by256, Copy32(target + at + 32 * i, source + at + 32 * i));
    }
  }
  _mm_sfence();
  __m128i lanes[kLanes];
  std::memcpy(lanes, sums, sizeof(lanes));
  return Reduce(lanes);
}
#undef KVTIER_AVX2
#undef KVTIER_AVX512
#undef KVTIER_AVX2_TARGET
#undef KVTIER_AVX512_TARGET

bool HasVectorsOfClmul() {
  return __builtin_cpu_supports("vpclmulqdq") && __builtin_cpu_supports("pclmul") &&
         __builtin_cpu_supports("sse4.2");
}
bool HasAvx512() {
  return HasVectorsOfClmul() && __builtin_cpu_supports("avx512f") &&
         __builtin_cpu_supports("avx512vl");
}
bool HasAvx2() { return HasVectorsOfClmul() && __builtin_cpu_supports("avx2"); }
#endif

uint32_t CopyPieces(std::byte* target, std::span<const std::byte> source, uint32_t crc) {
  while (!source.empty()) {
    const size_t bytes = std::min(source.size(), kPortablePieceBytes);
    std::memcpy(target, source.data(), bytes);
    crc = Crc32c({target, bytes}, crc);
    target += bytes;
    source = source.subspan(bytes);
  }
  return crc;
}

uint32_t CopyPortable(std::span<std::byte> target, std::span<const std::byte> source) {
  KVT_CHECK(target.size() >= source.size());
  return CopyPieces(target.data(), source, 0);
}

#ifdef __x86_64__
template <uint32_t (*copy_strides)(std::byte*, const std::byte*, size_t)>
uint32_t CopyInStrides(std::span<std::byte> target, std::span<const std::byte> source) {
  const size_t bytes = source.size() / kStrideBytes * kStrideBytes;
  const bool aligned = reinterpret_cast<uintptr_t>(target.data()) % 64 == 0;
  if (!aligned || bytes == 0) return CopyPortable(target, source);
  KVT_CHECK(target.size() >= source.size());
  const uint32_t crc = copy_strides(target.data(), source.data(), bytes);
  return CopyPieces(target.data() + bytes, source.subspan(bytes), crc);
}
#endif

}  // namespace

std::vector<CheckedCopy> CheckedCopies() {
  std::vector<CheckedCopy> copies;
#ifdef __x86_64__
  if (HasAvx512()) copies.push_back({"avx512", &CopyInStrides<&CopyStridesAvx512>});
  if (HasAvx2()) copies.push_back({"avx2", &CopyInStrides<&CopyStridesAvx2>});
#endif
  copies.push_back({"portable", &CopyPortable});
  return copies;
}

uint32_t CopyWithCrc32c(std::span<std::byte> target, std::span<const std::byte> source) {
  static const auto fastest = CheckedCopies().front().copy;
  return fastest(target, source);
}

}  // namespace kvtier
