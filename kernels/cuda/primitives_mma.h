// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_KERNELS_CUDA_PRIMITIVES_MMA_H_
#define KVTIER_KERNELS_CUDA_PRIMITIVES_MMA_H_

#include <cstdint>

#include "kernels/cuda/primitives_warp.h"
#include "kernels/cuda/target.h"

#if !defined(__CUDACC__)
#include "kernels/cuda/emu/warp_functions.h"
#endif

// Matrix instructions of one warp; all 32 lanes take part. g = lane / 4, t = lane % 4; a register
// holds two 16-bit elements, the lower index in the low half.
//   A (16x16): a[0] = A[g][2t..], a[1] = A[g+8][2t..], a[2] = A[g][2t+8..], a[3] = A[g+8][2t+8..]
//   B (16x8):  b0 = B[2t..2t+1][g], b1 = B[2t+8..2t+9][g]
//   C, D (16x8, FP32): c[0] = C[g][2t], c[1] = C[g][2t+1], c[2] = C[g+8][2t], c[3] = C[g+8][2t+1]

namespace kvtier::kernels::cuda::inline KVTIER_CUDA_FLAVOUR {

#if defined(__CUDACC__)

// c += A * B.
KVTIER_DEVICE void MmaF16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
KVTIER_DEVICE void MmaBf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
      "{%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// An 8x8 matrix of 16-bit elements, row g columns 2t and 2t+1 in each lane, transposed.
KVTIER_DEVICE uint32_t TransposeMatrix(uint32_t row) {
  uint32_t result;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(row));
  return result;
}

#else  // The emulation.

KVTIER_DEVICE void EmulateMma(emu::WarpFunction function, float (&c)[4], const uint32_t (&a)[4],
                              uint32_t b0, uint32_t b1, const std::source_location& site) {
  const uint32_t in[] = {a[0], a[1],         a[2],         a[3],         b0,
                         b1,   BitsOf(c[0]), BitsOf(c[1]), BitsOf(c[2]), BitsOf(c[3])};
  uint32_t out[4];
  emu::Collective(function, kAllLanes, in, out, site);
  for (uint32_t i = 0; i < 4; ++i) c[i] = FloatOf(out[i]);
}

KVTIER_DEVICE void MmaF16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                          uint32_t b1 KVTIER_SITE) {
  EmulateMma(&emu::MmaF16, c, a, b0, b1, site);
}
KVTIER_DEVICE void MmaBf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                           uint32_t b1 KVTIER_SITE) {
  EmulateMma(&emu::MmaBf16, c, a, b0, b1, site);
}

KVTIER_DEVICE uint32_t TransposeMatrix(uint32_t row KVTIER_SITE) {
  return emu::Exchange(&emu::TransposeMatrix, kAllLanes, row, 0, site);
}

#endif

}  // namespace kvtier::kernels::cuda::inline KVTIER_CUDA_FLAVOUR

#endif  // KVTIER_KERNELS_CUDA_PRIMITIVES_MMA_H_
