// SPDX-License-Identifier: Apache-2.0
#include <bit>
#include <cmath>
#include <cstdint>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "kernels/cuda/emu/device_buffer.h"
#include "kernels/cuda/emu/launch.h"
#include "tests/gpu/device_memory.h"
#include "tests/gpu/primitive_cases.h"
#include "tests/gpu/suite.h"

// Each primitive on the device and on the emulated machine, on the same random words.

namespace kvtier::gpu {
namespace {

using kernels::cuda::kCaseInWords;
using kernels::cuda::kCaseOutWords;
using kernels::cuda::PrimitiveCase;

enum class Inputs { kAnyBits, kFloats, kSmallHalves, kSmallBf16 };
enum class Outputs { kBits, kFloats, kNearFloats, kSums };
enum class Needs { kNothing, kE4m3, kBulk, kE2m1 };

struct CaseInfo {
  PrimitiveCase which;
  const char* name;
  Inputs inputs;
  Outputs outputs;
  Needs needs = Needs::kNothing;
};

constexpr CaseInfo kCases[] = {
    {PrimitiveCase::kPermuteBytes, "prmt", Inputs::kAnyBits, Outputs::kBits},
    {PrimitiveCase::kFloatSteps, "FP32 steps", Inputs::kAnyBits, Outputs::kFloats},
    {PrimitiveCase::kMinMax, "min, max, 1/x", Inputs::kAnyBits, Outputs::kFloats},
    {PrimitiveCase::kNearFunctions, "ex2, lg2, rcp", Inputs::kFloats, Outputs::kNearFloats},
    {PrimitiveCase::kHalfPairs, "f16x2", Inputs::kAnyBits, Outputs::kBits},
    {PrimitiveCase::kCompares, "set.f16x2", Inputs::kAnyBits, Outputs::kBits},
    {PrimitiveCase::kBf16Pairs, "bf16x2", Inputs::kAnyBits, Outputs::kBits},
    {PrimitiveCase::kPackPairs, "cvt to pairs", Inputs::kAnyBits, Outputs::kBits},
    {PrimitiveCase::kUnpackPairs, "cvt from pairs", Inputs::kAnyBits, Outputs::kFloats},
    {PrimitiveCase::kDirectedHalves, "cvt.rp, cvt.rm", Inputs::kFloats, Outputs::kBits},
    {PrimitiveCase::kE4m3, "cvt e4m3", Inputs::kFloats, Outputs::kBits, Needs::kE4m3},
    {PrimitiveCase::kE2m1Decode, "cvt from e2m1", Inputs::kAnyBits, Outputs::kBits, Needs::kE2m1},
    {PrimitiveCase::kE2m1Encode, "cvt to e2m1", Inputs::kFloats, Outputs::kBits, Needs::kE2m1},
    {PrimitiveCase::kShuffles, "shuffles", Inputs::kAnyBits, Outputs::kBits},
    {PrimitiveCase::kVotes, "votes", Inputs::kAnyBits, Outputs::kBits},
    {PrimitiveCase::kTranspose, "movmatrix", Inputs::kAnyBits, Outputs::kBits},
    {PrimitiveCase::kMmaF16, "mma f16", Inputs::kSmallHalves, Outputs::kSums},
    {PrimitiveCase::kMmaBf16, "mma bf16", Inputs::kSmallBf16, Outputs::kSums},
    {PrimitiveCase::kSharedMemory, "shared memory", Inputs::kAnyBits, Outputs::kBits},
    {PrimitiveCase::kGlobalMemory, "global memory", Inputs::kAnyBits, Outputs::kBits},
    {PrimitiveCase::kAsyncCopies, "cp.async", Inputs::kAnyBits, Outputs::kBits},
    {PrimitiveCase::kBulkCopies, "cp.async.bulk", Inputs::kAnyBits, Outputs::kBits, Needs::kBulk},
    {PrimitiveCase::kFormatWords, "DequantizeWord", Inputs::kAnyBits, Outputs::kBits},
    {PrimitiveCase::kFormatScales, "scale conversions", Inputs::kFloats, Outputs::kBits},
};
static_assert(std::size(kCases) == static_cast<size_t>(PrimitiveCase::kCount));

bool Has(const Device& device, Needs needs) {
  switch (needs) {
    case Needs::kNothing:
      return true;
    case Needs::kE4m3:
      return device.major > 8 || device.minor == 9;
    case Needs::kBulk:
      return device.major >= 9;
    case Needs::kE2m1:
      return device.major >= 10;
  }
  return false;
}

uint32_t RandomWord(Inputs inputs, uint32_t word_idx, std::mt19937* random) {
  const auto bits = static_cast<uint32_t>((*random)());
  const auto small = [&] {
    return std::ldexp(static_cast<float>((*random)() % 4001) - 2000.0F, -10);
  };
  if (inputs == Inputs::kAnyBits) return bits;
  if (inputs == Inputs::kFloats) {
    // All exponents that FP16 and FP8 see, and ties.
    if (bits % 4 == 0) return std::bit_cast<uint32_t>(std::nearbyint(small() * 8.0F) / 8.0F);
    return (bits & 0x807FFFFFU) | (87U + bits / 8 % 80U) << 23;
  }
  if (word_idx >= 6) return std::bit_cast<uint32_t>(small());  // The accumulator.
  using kernels::cuda::PackBf162;
  using kernels::cuda::PackHalf2;
  return inputs == Inputs::kSmallHalves ? PackHalf2(small(), small()) : PackBf162(small(), small());
}

bool IsClose(Outputs outputs, uint32_t device_bits, uint32_t host_bits) {
  if (device_bits == host_bits) return true;
  if (outputs == Outputs::kBits) return false;
  const auto a = static_cast<double>(std::bit_cast<float>(device_bits));
  const auto b = static_cast<double>(std::bit_cast<float>(host_bits));
  if (std::isnan(a) && std::isnan(b)) return true;
  if (outputs == Outputs::kFloats) return false;
  if (outputs == Outputs::kNearFloats) {
    return std::fabs(a - b) <= std::fabs(b) * 0x1p-20 + 0x1p-20 || a == b;
  }
  return std::fabs(a - b) <= 1e-4;  // Sums of 16 products of at most 4.
}

template <typename Arch>
void RunHost(PrimitiveCase which, std::span<const uint32_t> in, std::span<uint32_t> out,
             uint32_t block_count, Suite* suite) {
  kernels::cuda::emu::Memory memory;
  memory.AddInput(in);
  memory.AddOutput(out);
  const kernels::cuda::emu::Report report = kernels::cuda::emu::Launch(
      {.grid = {block_count}, .block = {32}, .shared_bytes = kernels::cuda::kCaseSharedBytes},
      memory, &kernels::cuda::PrimitiveBody<Arch>, which,
      kernels::cuda::Global<const uint32_t>{in.data()},
      kernels::cuda::Global<uint32_t>{out.data()});
  suite->Expect(report.ok(), report.ToString());
}

void CheckCase(const CaseInfo& info, uint32_t block_count, Suite* suite) {
  std::mt19937 random(20261129);
  kernels::cuda::emu::DeviceBuffer<uint32_t> in(uint64_t{block_count} * 32 * kCaseInWords);
  for (size_t i = 0; i < in.size(); ++i) {
    in[i] = RandomWord(info.inputs, static_cast<uint32_t>(i % kCaseInWords), &random);
  }
  kernels::cuda::emu::DeviceBuffer<uint32_t> expected(uint64_t{block_count} * 32 * kCaseOutWords);
  const Device& device = suite->device();
  if (Has(device, Needs::kE2m1)) {
    RunHost<kernels::cuda::Sm100>(info.which, in, expected, block_count, suite);
  } else if (Has(device, Needs::kBulk)) {
    RunHost<kernels::cuda::Sm90>(info.which, in, expected, block_count, suite);
  } else if (Has(device, Needs::kE4m3)) {
    RunHost<kernels::cuda::Sm89>(info.which, in, expected, block_count, suite);
  } else {
    RunHost<kernels::cuda::Sm80>(info.which, in, expected, block_count, suite);
  }
  const DeviceArray<uint32_t> device_in{std::span<const uint32_t>(in)};
  const DeviceArray<uint32_t> device_out(expected.size());
  LaunchPrimitive(info.which, device_in.data(), device_out.data(), block_count);
  CheckCuda(cudaDeviceSynchronize(), info.name);
  const std::vector<uint32_t> got = device_out.Download();
  for (size_t i = 0; i < got.size(); ++i) {
    if (IsClose(info.outputs, got[i], expected[i])) continue;
    const size_t row = i / kCaseOutWords;
    suite->Expect(false, std::string(info.name) + " word " + std::to_string(i % kCaseOutWords) +
                             ": device " + std::to_string(got[i]) + " host " +
                             std::to_string(expected[i]) + " inputs " +
                             std::to_string(in[row * kCaseInWords]) + " " +
                             std::to_string(in[row * kCaseInWords + 1]) + " " +
                             std::to_string(in[row * kCaseInWords + 2]));
  }
  suite->AddCases(got.size());
}

}  // namespace

void CheckPrimitives(Suite* suite) {
  for (const CaseInfo& info : kCases) {
    if (!Has(suite->device(), info.needs)) continue;
    suite->Begin(std::string("primitive: ") + info.name);
    CheckCase(info, suite->options().is_sanitized ? 2 : 256, suite);
  }
}

}  // namespace kvtier::gpu
