// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_TESTS_BENCH_KERNELS_MLA_DATA_H_
#define KVTIER_TESTS_BENCH_KERNELS_MLA_DATA_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/mla.h"
#include "tests/bench/kernels/data.h"

namespace kvtier::bench {

// One layer of an MLA context in both forms: blocks of 64 tokens, and BF16 rows [token][576].
class MlaContext {
 public:
  MlaContext(uint64_t token_count, uint32_t head_count);

  kernels::DecodeMlaArgs Sealed(kernels::Isa isa);
  kernels::DecodeMlaArgs Bf16(kernels::Isa isa);
  std::span<const std::byte> blocks() const { return blocks_.bytes(); }
  uint64_t SealedBytes() const { return blocks_.bytes().size(); }
  uint64_t Bf16Bytes() const { return rows_.bytes().size(); }

 private:
  kernels::DecodeMlaArgs Common(kernels::Isa isa);

  uint64_t token_count_;
  uint32_t head_count_;
  kernels::MlaBlockShape shape_;
  Buffer rows_, blocks_;
  std::vector<const std::byte*> table_;
  std::vector<uint16_t> query_;
  std::vector<float> out_, lse_;
};

}  // namespace kvtier::bench

#endif  // KVTIER_TESTS_BENCH_KERNELS_MLA_DATA_H_
