// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_KERNELS_CUDA_HOSTILE_ARGS_H_
#define KVTIER_KERNELS_CUDA_HOSTILE_ARGS_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cuda/blocks.h"
#include "kernels/cuda/emu/device_buffer.h"
#include "kernels/cuda/gather.h"
#include "kernels/cuda/seal.h"
#include "kernels/seal.h"
#include "kernels/status.h"

// Arguments that no caller should pass, the same to the CPU and to CUDA: what the host can see is
// refused by both with the same code, one by one and in mixtures, before anything is launched.
// Arguments are those of CUDA over host memory; the CPU's are made from them.

namespace kvtier::kernels::cuda {

inline constexpr uint32_t kSeed = 20261130;
inline constexpr uint32_t kTokens = 16;
inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
inline constexpr uint64_t kHuge = std::numeric_limits<uint64_t>::max() - 15;
inline constexpr uint32_t kPageTable[] = {0, 0, 0, 4'000'000'000U};

enum class Who : uint8_t {
  kBoth,
  kDevice,  // The CPU has no such argument or limit.
};

template <typename Args>
struct Spoil {
  const char* name;
  Who who;
  std::function<void(Args*)> change;
};

template <typename Args>
struct Entry {
  std::function<Status(const Args&)> cpu;
  std::function<Status(const Args&)> plan;    // What the launch checks.
  std::function<Status(const Args&)> launch;  // The launch itself, where there is an nvcc; or none.
};

template <typename Args>
void ExpectRefused(const Entry<Args>& entry, const Args& args, bool by_cpu,
                   const std::string& names) {
  const Status status = entry.plan(args);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << names;
  EXPECT_EQ(entry.cpu(args).code(), by_cpu ? StatusCode::kInvalidArgument : StatusCode::kOk)
      << names;
  if (entry.launch == nullptr || status.ok()) return;
  EXPECT_EQ(entry.launch(args).code(), StatusCode::kInvalidArgument) << names;
}

// Each of `spoils` alone, then mixtures over arguments that one of `variants` changed, which all
// are allowed. No spoil undoes another.
template <typename Args>
void ExpectAlike(const Entry<Args>& entry, const Args& good, const std::vector<Spoil<Args>>& spoils,
                 const std::vector<std::function<void(Args*)>>& variants) {
  for (const auto& variant : variants) {
    Args args = good;
    variant(&args);
    ASSERT_TRUE(entry.cpu(args).ok()) << entry.cpu(args).message();
    ASSERT_TRUE(entry.plan(args).ok()) << entry.plan(args).message();
  }
  for (const Spoil<Args>& spoil : spoils) {
    Args args = good;
    spoil.change(&args);
    ExpectRefused(entry, args, spoil.who == Who::kBoth, spoil.name);
  }
  std::mt19937 random(kSeed);
  for (int i = 0; i < 2000; ++i) {
    Args args = good;
    variants[random() % variants.size()](&args);
    std::string names = "seed " + std::to_string(kSeed) + " mixture " + std::to_string(i) + ":";
    bool by_cpu = false;
    for (uint32_t count = 1 + random() % 4; count > 0; --count) {
      const Spoil<Args>& spoil = spoils[random() % spoils.size()];
      spoil.change(&args);
      by_cpu = by_cpu || spoil.who == Who::kBoth;
      names += std::string(" ") + spoil.name;
    }
    ExpectRefused(entry, args, by_cpu, names);
  }
}

#if defined(KVTIER_CUDA_LAUNCHES)
template <typename Args>
std::function<Status(const Args&)> LaunchOf(Status (*launch)(const Args&, Stream)) {
  return [launch](const Args& args) { return launch(args, nullptr); };
}
#define KVTIER_LAUNCH(function) LaunchOf(function)
#else
#define KVTIER_LAUNCH(function) nullptr
#endif

// The next byte; nobody reads there.
inline const void* Misaligned(const void* pointer) {
  return static_cast<const std::byte*>(pointer) + 1;
}
inline void* Misaligned(void* pointer) { return static_cast<std::byte*>(pointer) + 1; }

class CudaHostileArgs : public testing::Test {
 protected:
  DeviceRows Rows(uint64_t dims) {
    return {.data = rows_.data(),
            .layer_stride = 4096,
            .head_stride = dims,
            .token_stride = dims,
            .page_stride = 4096};
  }

  emu::DeviceBuffer<std::byte> rows_ = emu::DeviceBuffer<std::byte>(65536);
  emu::DeviceBuffer<std::byte> tile_ = emu::DeviceBuffer<std::byte>(65536);
  emu::DeviceBuffer<std::byte> workspace_ = emu::DeviceBuffer<std::byte>(1 << 20);
  emu::DeviceBuffer<float> ones_ = emu::DeviceBuffer<float>(4096, 1.0F);
  BlockEntry entry_{.block = tile_.data()};
  SealCounters seal_counters_;
  GatherCounters gather_counters_;
  SealStats stats_;
};

inline float ValueOf(const float* g) { return g == nullptr ? kNan : *g; }

}  // namespace kvtier::kernels::cuda

#endif  // KVTIER_KERNELS_CUDA_HOSTILE_ARGS_H_
