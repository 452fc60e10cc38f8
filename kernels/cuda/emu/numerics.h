// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_KERNELS_CUDA_EMU_NUMERICS_H_
#define KVTIER_KERNELS_CUDA_EMU_NUMERICS_H_

#include <cstdint>

// Arithmetic of the GPU on 16-bit and smaller floats, for the emulated primitives: same results,
// subnormals kept, canonical NaNs. Pure, thread-safe. Relies on -ffp-contract=off.

namespace kvtier::kernels::cuda::emu {

uint32_t PermuteBytes(uint32_t a, uint32_t b, uint32_t selector);

// Rounded from FP64, flushed to zero as ex2.approx.ftz does.
float Exp2(float x);
float Log2(float x);

// 1 / x, wrong by one unit in the last place for half of all x; subnormals flushed.
float ReciprocalNear(float x);

// One element, in the low bits.
uint32_t ToHalf(float x);
float FromHalf(uint32_t bits);
uint32_t HalfAbove(float x);
uint32_t HalfBelow(float x);
uint32_t ToBf16(float x);
uint32_t ToE4m3(float x);
float FromE4m3(uint32_t byte);
uint32_t ToE2m1(float x);
float FromE2m1(uint32_t code);  // Of the low four bits.

// Pairs.
uint32_t MulHalf2(uint32_t a, uint32_t b);
uint32_t FmaHalf2(uint32_t a, uint32_t b, uint32_t c);
uint32_t MaxNanHalf2(uint32_t a, uint32_t b);
uint32_t GreaterOrNanMask(uint32_t a, uint32_t b);
uint32_t GreaterEqualOrNanMask(uint32_t a, uint32_t b);
uint32_t FmaBf162(uint32_t a, uint32_t b, uint32_t c);
uint32_t MaxNanBf162(uint32_t a, uint32_t b);

}  // namespace kvtier::kernels::cuda::emu

#endif  // KVTIER_KERNELS_CUDA_EMU_NUMERICS_H_
