// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_KERNELS_CUDA_EMU_WARP_FUNCTIONS_H_
#define KVTIER_KERNELS_CUDA_EMU_WARP_FUNCTIONS_H_

#include <cstdint>

#include "kernels/cuda/emu/hooks.h"

// What warp collectives compute, as functions of what all lanes brought (hooks.h, Collective).

namespace kvtier::kernels::cuda::emu {

// in: value, argument. out: value. A shuffle from a lane outside the mask gives 0xDEADBEEF: the
// hardware's result is undefined.
void ShuffleXor(WarpExchange& exchange);
void ShuffleFrom(WarpExchange& exchange);
void ShuffleDown(WarpExchange& exchange);  // Beyond the warp: the lane's own value.
void Ballot(WarpExchange& exchange);

// in: row g = lane / 4, columns 2t and 2t + 1 (t = lane % 4) of an 8x8 matrix of 16-bit elements.
// out: the same of its transpose.
void TransposeMatrix(WarpExchange& exchange);

// mma.m16n8k16, row-major A, column-major B, FP32 C. in: 4 words of A, 2 of B, 4 of C; out: D.
void MmaF16(WarpExchange& exchange);
void MmaBf16(WarpExchange& exchange);

uint32_t Exchange(WarpFunction function, uint32_t mask, uint32_t value, uint32_t argument,
                  const Site& site);

}  // namespace kvtier::kernels::cuda::emu

#endif  // KVTIER_KERNELS_CUDA_EMU_WARP_FUNCTIONS_H_
