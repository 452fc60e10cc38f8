// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_TESTS_GPU_PRIMITIVE_CASES_H_
#define KVTIER_TESTS_GPU_PRIMITIVE_CASES_H_

#include <cstdint>

#include "kernels/cuda/nvfp4_device.h"
#include "kernels/cuda/primitives.h"
#include "kernels/cuda/target.h"

// Every primitive as a function of 10 words of each lane to 4: the same source on the device and on
// the machine of kernels/cuda/emu.

namespace kvtier::kernels::cuda {

inline constexpr uint32_t kCaseInWords = 10;
inline constexpr uint32_t kCaseOutWords = 4;
inline constexpr uint32_t kCaseSharedBytes = 1024;

enum class PrimitiveCase : uint32_t {
  kPermuteBytes,
  kFloatSteps,
  kMinMax,
  kNearFunctions,
  kHalfPairs,
  kCompares,
  kBf16Pairs,
  kPackPairs,
  kUnpackPairs,
  kDirectedHalves,
  kE4m3,
  kE2m1Decode,
  kE2m1Encode,
  kShuffles,
  kVotes,
  kTranspose,
  kMmaF16,
  kMmaBf16,
  kSharedMemory,
  kGlobalMemory,
  kAsyncCopies,
  kBulkCopies,
  kFormatWords,
  kFormatScales,
  kCount,
};

}  // namespace kvtier::kernels::cuda

namespace kvtier::kernels::cuda::inline KVTIER_CUDA_FLAVOUR {

using CaseIn = uint32_t[kCaseInWords];
using CaseOut = uint32_t[kCaseOutWords];

KVTIER_DEVICE void RunArithmetic(PrimitiveCase which, const CaseIn& in, CaseOut& out) {
  const float a = FloatOf(in[0]);
  const float b = FloatOf(in[1]);
  const float c = FloatOf(in[2]);
  if (which == PrimitiveCase::kPermuteBytes) {
    out[0] = PermuteBytes(in[0], in[1], in[2] & 0xFFFFU);
  } else if (which == PrimitiveCase::kFloatSteps) {
    out[0] = BitsOf(MulRn(a, b));
    out[1] = BitsOf(AddRn(a, b));
    out[2] = BitsOf(SubRn(a, b));
    out[3] = BitsOf(FmaRn(a, b, c));
  } else if (which == PrimitiveCase::kMinMax) {
    out[0] = BitsOf(MinFloat(a, b));
    out[1] = BitsOf(MaxFloat(a, b));
    out[2] = BitsOf(ReciprocalRn(a));
  } else if (which == PrimitiveCase::kNearFunctions) {
    out[0] = BitsOf(Exp2(a));
    out[1] = BitsOf(Log2(MaxFloat(b, -b)));
    out[2] = BitsOf(ReciprocalNear(c));
  } else if (which == PrimitiveCase::kHalfPairs) {
    out[0] = MulHalf2(in[0], in[1]);
    out[1] = FmaHalf2(in[0], in[1], in[2]);
    out[2] = MaxNanHalf2(in[0], in[1]);
  } else if (which == PrimitiveCase::kCompares) {
    out[0] = GreaterOrNanMask(in[0], in[1]);
    out[1] = GreaterEqualOrNanMask(in[0], in[1]);
    out[2] = GreaterOrNanMask(in[0], in[0]);
    out[3] = GreaterEqualOrNanMask(in[0], in[0]);
  } else if (which == PrimitiveCase::kBf16Pairs) {
    out[0] = FmaBf162(in[0], in[1], in[2]);
    out[1] = MulBf162(in[0], in[1]);
    out[2] = MaxNanBf162(in[0], in[1]);
  } else if (which == PrimitiveCase::kPackPairs) {
    out[0] = PackHalf2(a, b);
    out[1] = PackBf162(a, b);
  } else if (which == PrimitiveCase::kUnpackPairs) {
    out[0] = BitsOf(FirstHalf(in[0]));
    out[1] = BitsOf(SecondHalf(in[0]));
    out[2] = BitsOf(FirstBf16(in[0]));
    out[3] = BitsOf(SecondBf16(in[0]));
  } else if (which == PrimitiveCase::kDirectedHalves) {
    out[0] = HalfAbove(MaxFloat(a, -a));
    out[1] = HalfBelow(MaxFloat(a, -a));
  }
}

template <typename Arch>
KVTIER_DEVICE void RunFormat(PrimitiveCase which, const CaseIn& in, CaseOut& out) {
  if (which == PrimitiveCase::kFormatWords) {
    DequantizeWord<Arch>(in[0], out);
  } else if (which == PrimitiveCase::kFormatScales) {
    const float a = FloatOf(in[1]);
    out[0] = ScalesToHalf2<Arch>(in[0] & 0x7E7EU);
    out[1] = PackFp8<Arch>(a, FloatOf(in[2]));
    out[2] = UnpackFp8<Arch>(in[0] & 0xFFFFU);
    out[3] = EncodeScale<Arch>(MinFloat(MaxFloat(a, -a), 448.0F));
  } else if (which == PrimitiveCase::kE4m3) {
    if constexpr (Arch::kConvertsE4m3) {
      out[0] = E4m3ToHalf2(in[0] & 0xFFFFU);
      out[1] = PackE4m3(FloatOf(in[1]), FloatOf(in[2]));
    }
  } else if (which == PrimitiveCase::kE2m1Decode) {
    if constexpr (Arch::kConvertsE2m1) E2m1ToHalf2(in[0], out);
  } else if (which == PrimitiveCase::kE2m1Encode) {
    if constexpr (Arch::kConvertsE2m1) {
      float x[8];
      KVTIER_UNROLL
      for (uint32_t i = 0; i < 8; ++i) x[i] = FloatOf(in[i]);
      out[0] = PackE2m1(x);
    }
  }
}

KVTIER_DEVICE void RunCollective(PrimitiveCase which, const CaseIn& in, CaseOut& out) {
  if (which == PrimitiveCase::kShuffles) {
    out[0] = ShuffleXor(in[0], 5);
    out[1] = ShuffleFrom(in[1], 7);
    out[2] = ShuffleDown(in[2], 3);
    out[3] = Ballot((in[3] & 1U) != 0);
  } else if (which == PrimitiveCase::kVotes) {
    out[0] = AnyLane((in[0] & 31U) == 0) ? 1 : 0;
    out[1] = AllLanes((in[1] & 31U) != 0) ? 1 : 0;
    out[2] = LaneId();
  } else if (which == PrimitiveCase::kTranspose) {
    out[0] = TransposeMatrix(in[0]);
  } else {
    float c[4] = {FloatOf(in[6]), FloatOf(in[7]), FloatOf(in[8]), FloatOf(in[9])};
    const uint32_t a[4] = {in[0], in[1], in[2], in[3]};
    if (which == PrimitiveCase::kMmaF16) {
      MmaF16(c, a, in[4], in[5]);
    } else {
      MmaBf16(c, a, in[4], in[5]);
    }
    KVTIER_UNROLL
    for (uint32_t i = 0; i < 4; ++i) out[i] = BitsOf(c[i]);
  }
}

// `source` is 16 * 32 bytes of global memory.
template <typename Arch>
KVTIER_DEVICE void RunMemory(PrimitiveCase which, Global<const uint32_t> source, const CaseIn& in,
                             CaseOut& out) {
  const SharedAddress shared = SharedBegin();
  const uint32_t lane = LaneId();
  const uint32_t other = (lane + 1) % 32;
  if (which == PrimitiveCase::kSharedMemory) {
    StoreShared<Words4>(shared + 16 * lane, {in[0], in[1], in[2], in[3]});
    SyncWarp();
    out[0] = LoadShared<Words2>(shared + 16 * other).y;
    out[1] = LoadShared<uint16_t>(shared + 16 * other + 6);
    out[2] = LoadShared<uint8_t>(shared + 16 * other + 9);
    SyncWarp();
    StoreShared<Words2>(shared + 8 * lane, {in[4], in[5]});
    StoreShared<uint16_t>(shared + 256 + 2 * lane, static_cast<uint16_t>(in[6]));
    StoreShared<uint8_t>(shared + 320 + lane, static_cast<uint8_t>(in[7]));
    StoreShared<float>(shared + 384 + 4 * lane, FloatOf(in[8]));
    SyncThreads();
    out[3] = LoadShared<uint32_t>(shared + 8 * other) ^
             LoadShared<uint16_t>(shared + 256 + 2 * other) ^
             LoadShared<uint8_t>(shared + 320 + other) ^
             BitsOf(LoadShared<float>(shared + 384 + 4 * other));
  } else if (which == PrimitiveCase::kGlobalMemory) {
    out[0] = LoadConstant<Words4>(source.At<const Words4>(16 * lane)).z;
    out[1] = LoadGlobal<Words2>(source.At<const Words2>(8 * lane)).y;
    out[2] = LoadConstant<uint8_t>(source.At<const uint8_t>(lane)) +
             LoadGlobal<uint16_t>(source.At<const uint16_t>(2 * lane));
    out[3] =
        static_cast<uint32_t>(LoadConstant<uint64_t>(source.At<const uint64_t>(8 * lane)) >> 32) ^
        LoadGlobal<uint32_t>(source.At<const uint32_t>(4 * other));
  } else if (which == PrimitiveCase::kAsyncCopies) {
    CopyAsync16(shared + 16 * lane, source.At<const Words4>(16 * lane));
    CommitCopies();
    WaitCopies<0>();
    SyncWarp();
    out[0] = LoadShared<uint32_t>(shared + 16 * other + 4);
  } else if (which == PrimitiveCase::kBulkCopies) {
    if constexpr (Arch::kCopiesBulk) {
      const SharedAddress barrier = shared + 512;
      if (lane == 0) {
        MbarrierInit(barrier, 2);
        FenceProxyAsync();
      }
      SyncWarp();
      if (lane == 0) {
        MbarrierArriveExpect(barrier, 512);
        CopyBulk(shared, source.At<const std::byte>(0), 512, barrier);
      }
      if (lane == 1) MbarrierArrive(barrier);
      MbarrierWait(barrier, 0);
      out[0] = LoadShared<uint32_t>(shared + 16 * other + 8);
    }
  }
}

// One warp a block. in: [block][lane][kCaseInWords], out: [block][lane][kCaseOutWords].
template <typename Arch>
KVTIER_DEVICE void PrimitiveBody(PrimitiveCase which, Global<const uint32_t> in_words,
                                 Global<uint32_t> out_words) {
  const uint32_t row = BlockX() * 32 + LaneId();
  CaseIn in;
  CaseOut out = {0, 0, 0, 0};
  KVTIER_UNROLL
  for (uint32_t i = 0; i < kCaseInWords; ++i) {
    in[i] = LoadConstant<uint32_t>(in_words + (row * kCaseInWords + i));
  }
  if (which <= PrimitiveCase::kDirectedHalves) {
    RunArithmetic(which, in, out);
  } else if (which <= PrimitiveCase::kE2m1Encode || which >= PrimitiveCase::kFormatWords) {
    RunFormat<Arch>(which, in, out);
  } else if (which <= PrimitiveCase::kMmaBf16) {
    RunCollective(which, in, out);
  } else {
    RunMemory<Arch>(which, in_words, in, out);
  }
  KVTIER_UNROLL
  for (uint32_t i = 0; i < kCaseOutWords; ++i) {
    StoreGlobal<uint32_t>(out_words + (row * kCaseOutWords + i), out[i]);
  }
}

}  // namespace kvtier::kernels::cuda::inline KVTIER_CUDA_FLAVOUR

namespace kvtier::gpu {

// Launches PrimitiveBody<CurrentArch> on the device; pointers are to its memory.
void LaunchPrimitive(kernels::cuda::PrimitiveCase which, const uint32_t* in, uint32_t* out,
                     uint32_t block_count);

}  // namespace kvtier::gpu

#endif  // KVTIER_TESTS_GPU_PRIMITIVE_CASES_H_
