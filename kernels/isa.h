// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_KERNELS_ISA_H_
#define KVTIER_KERNELS_ISA_H_

#include <array>
#include <cstdint>

namespace kvtier::kernels {

// The implementations of the operations. kScalar is the reference and runs everywhere.
enum class Isa : uint8_t {
  kScalar = 0,
  kAvx2 = 1,  // AVX2, FMA, F16C: x86-64-v3.
  kAvx512 =
      2,  // AVX-512 F, BW, DQ, VL, VBMI, VBMI2, VNNI and BF16: Zen 4, Sapphire Rapids and later.
  kNeon = 3,  // Baseline ARMv8-A, little endian: every 64-bit ARM machine.
};

inline constexpr std::array kAllIsas = {Isa::kScalar, Isa::kAvx2, Isa::kAvx512, Isa::kNeon};

// True if this build has the implementation and this processor (and kernel) can run it.
// Thread-safe, does not block.
bool IsaIsAvailable(Isa isa);

// The best available implementation: the default of every operation. The environment variable
// KVTIER_KERNELS_ISA (scalar, avx2, avx512, neon) replaces it if it names an available one; it is
// read once. Thread-safe.
Isa BestIsa();

// "scalar", "avx2", "avx512", "neon"; "unknown" for a value outside the enum.
const char* IsaName(Isa isa);

}  // namespace kvtier::kernels

#endif  // KVTIER_KERNELS_ISA_H_
