// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_TESTS_BENCH_KERNELS_DATA_H_
#define KVTIER_TESTS_BENCH_KERNELS_DATA_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kernels/decode.h"

namespace kvtier::bench {

// Page-aligned memory in huge pages where the kernel has them, touched.
class Buffer {
 public:
  explicit Buffer(uint64_t bytes);

  std::span<std::byte> bytes() const { return {data_.get(), bytes_}; }
  uint16_t* words() const { return reinterpret_cast<uint16_t*>(data_.get()); }

 private:
  struct Free {
    void operator()(std::byte* data) const;
  };
  uint64_t bytes_;
  std::unique_ptr<std::byte, Free> data_;
};

// Normally distributed BF16 numbers, repeated after some megabytes.
void FillBf16(const Buffer& buffer);

// One layer of a context in both forms: NVFP4 blocks of 64 tokens, and BF16 rows
// [kv head][token][dim]. Both are larger than the caches.
class Context {
 public:
  Context(uint64_t token_count, uint32_t kv_head_count, uint32_t group_heads, uint32_t head_dim);

  kernels::DecodeArgs Sealed(kernels::Isa isa);
  kernels::DecodeArgs Bf16(kernels::Isa isa);
  std::span<const std::byte> blocks() const { return blocks_.bytes(); }
  uint64_t SealedBytes() const { return blocks_.bytes().size(); }

 private:
  kernels::DecodeArgs Common(kernels::Isa isa);

  uint64_t token_count_;
  kernels::BlockShape shape_;
  uint32_t query_heads_;
  Buffer k_, v_, blocks_;
  std::vector<const std::byte*> table_;
  std::vector<uint16_t> query_;
  std::vector<float> g_, out_, lse_;
};

}  // namespace kvtier::bench

#endif  // KVTIER_TESTS_BENCH_KERNELS_DATA_H_
