// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_KERNELS_CUDA_PRIMITIVES_H_
#define KVTIER_KERNELS_CUDA_PRIMITIVES_H_

// Every instruction that a kernel needs beyond plain C++, by kind. Each is one inline function with
// two bodies: PTX, and the same on the machine of emu/. How to use them: README.md.
#include "kernels/cuda/primitives_convert.h"
#include "kernels/cuda/primitives_memory.h"
#include "kernels/cuda/primitives_mma.h"
#include "kernels/cuda/primitives_warp.h"
#include "kernels/cuda/target.h"

#endif  // KVTIER_KERNELS_CUDA_PRIMITIVES_H_
