// SPDX-License-Identifier: Apache-2.0
// The part of the CUDA runtime that the suite uses, over host memory, and the launches as runs of
// the emulated machine: the suite's own logic is tested where there is no GPU.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <span>
#include <vector>

#include "kernels/cuda/decode_kernel.h"
#include "kernels/cuda/decode_plan.h"
#include "kernels/cuda/emu/launch.h"
#include "kernels/cuda/gather_kernel.h"
#include "kernels/cuda/mixed_transfer_kernel.h"
#include "kernels/cuda/mla_decode_kernel.h"
#include "kernels/cuda/mla_decode_plan.h"
#include "kernels/cuda/mla_transfer_kernel.h"
#include "kernels/cuda/mla_transfer_plan.h"
#include "kernels/cuda/seal_kernel.h"
#include "kernels/cuda/transfer_params.h"
#include "tests/gpu/primitive_cases.h"

namespace {

// Allocations, and the launches of the capture in progress: the suite is single-threaded.
struct Runtime {
  std::map<std::byte*, size_t> allocations;
  bool is_capturing = false;
  std::vector<std::function<void()>> captured;
};

Runtime& TheRuntime() {
  static Runtime runtime;
  return runtime;
}

kvtier::kernels::cuda::emu::Memory DeviceMemory() {
  kvtier::kernels::cuda::emu::Memory memory;
  for (const auto& [begin, bytes] : TheRuntime().allocations) {
    memory.AddInOut(std::span(begin, bytes));
  }
  return memory;
}

void LaunchOrCapture(std::function<void()> launch) {
  if (TheRuntime().is_capturing) {
    TheRuntime().captured.push_back(std::move(launch));
  } else {
    launch();
  }
}

template <typename Body, typename Params>
void Run(const kvtier::kernels::cuda::emu::LaunchConfig& config, Body body, const Params& params) {
  LaunchOrCapture([config, body, params] {
    const auto report = kvtier::kernels::cuda::emu::Launch(config, DeviceMemory(), body, params);
    if (report.ok()) return;
    std::printf("FAILED: %s\n", report.ToString().c_str());
    std::exit(1);
  });
}

kvtier::kernels::cuda::emu::LaunchConfig ConfigOf(const kvtier::kernels::cuda::LaunchShape& shape) {
  return {.grid = {shape.grid_x, shape.grid_y, shape.grid_z},
          .block = {shape.block_x, shape.block_y},
          .shared_bytes = shape.shared_bytes};
}

constexpr kvtier::kernels::cuda::DeviceLimits kEmulatedLimits{
    .multiprocessor_count = 2, .shared_bytes_per_block = 232448, .copies_bulk = true};

}  // namespace

namespace kvtier::kernels::cuda {

Status SealBlocks(const SealBlocksArgs& args, Stream) {
  SealPlan plan;
  if (const Status status = PlanSeal(args, &plan); !status.ok()) return status;
  using Body = void (*)(const SealParams&);
  constexpr Body kBodies[] = {
      &SealBody<Sm90, ElementType::kBf16>, &SealBody<Sm90, ElementType::kFp16>,
      &SealBody<Sm90, ElementType::kFp32>, &SealBody<Sm90, ElementType::kFp8E4m3>};
  constexpr Body kMixedBodies[] = {
      &MixedSealBody<Sm90, ElementType::kBf16>, &MixedSealBody<Sm90, ElementType::kFp16>,
      &MixedSealBody<Sm90, ElementType::kFp32>, &MixedSealBody<Sm90, ElementType::kFp8E4m3>};
  const auto type = static_cast<size_t>(args.k.type);
  Run(ConfigOf(plan.shape),
      args.blocks.format == LayerFormat{} ? kBodies[type] : kMixedBodies[type], plan.params);
  return Status();
}

Status GatherBlocks(const GatherBlocksArgs& args, Stream) {
  GatherPlan plan;
  if (const Status status = PlanGather(args, &plan); !status.ok()) return status;
  using Body = void (*)(const GatherParams&);
  constexpr Body kBodies[] = {
      &GatherBody<Sm90, ElementType::kBf16>, &GatherBody<Sm90, ElementType::kFp16>,
      &GatherBody<Sm90, ElementType::kFp32>, &GatherBody<Sm90, ElementType::kFp8E4m3>};
  constexpr Body kMixedBodies[] = {
      &MixedGatherBody<Sm90, ElementType::kBf16>, &MixedGatherBody<Sm90, ElementType::kFp16>,
      &MixedGatherBody<Sm90, ElementType::kFp32>, &MixedGatherBody<Sm90, ElementType::kFp8E4m3>};
  const auto type = static_cast<size_t>(args.k.type);
  Run(ConfigOf(plan.shape),
      args.blocks.format == LayerFormat{} ? kBodies[type] : kMixedBodies[type], plan.params);
  return Status();
}

Status DecodeBatch(const DecodeBatchArgs& args, Stream) {
  DecodePlan plan;
  if (const Status status = PlanDecode(args, kEmulatedLimits, &plan); !status.ok()) return status;
  using Body = void (*)(const DecodeParams&);
  const Body body = ChooseDecode(plan, []<uint32_t kHeadDim, uint32_t kTilesN, uint32_t kParts>(
                                           DecodeShape<kHeadDim, kTilesN, kParts>) {
    return Body{&DecodeBody<Sm90, kHeadDim, kTilesN, kParts>};
  });
  Run({.grid = {plan.grid_size},
       .block = {32 * plan.warp_count},
       .shared_bytes = plan.shared_bytes},
      body, plan.params);
  return Status();
}

Status SealMlaBlocks(const SealMlaBlocksArgs& args, Stream) {
  SealPlan plan;
  if (const Status status = PlanSealMla(args, &plan); !status.ok()) return status;
  using Body = void (*)(const SealParams&);
  constexpr Body kBodies[] = {
      &MlaSealBody<Sm90, ElementType::kBf16>, &MlaSealBody<Sm90, ElementType::kFp16>,
      &MlaSealBody<Sm90, ElementType::kFp32>, &MlaSealBody<Sm90, ElementType::kFp8E4m3>};
  Run(ConfigOf(plan.shape), kBodies[static_cast<size_t>(args.blocks.latent.type)], plan.params);
  return Status();
}

Status GatherMlaBlocks(const GatherMlaBlocksArgs& args, Stream) {
  GatherPlan plan;
  if (const Status status = PlanGatherMla(args, &plan); !status.ok()) return status;
  using Body = void (*)(const GatherParams&);
  constexpr Body kBodies[] = {
      &MlaGatherBody<Sm90, ElementType::kBf16>, &MlaGatherBody<Sm90, ElementType::kFp16>,
      &MlaGatherBody<Sm90, ElementType::kFp32>, &MlaGatherBody<Sm90, ElementType::kFp8E4m3>};
  Run(ConfigOf(plan.shape), kBodies[static_cast<size_t>(args.blocks.latent.type)], plan.params);
  return Status();
}

Status DecodeMlaBatch(const DecodeMlaBatchArgs& args, Stream) {
  MlaDecodePlan plan;
  const Status status = PlanDecodeMla(args, kEmulatedLimits, &plan);
  if (!status.ok()) return status;
  Run({.grid = {plan.grid_size}, .block = {32 * kMlaWarps}, .shared_bytes = plan.shared_bytes},
      &MlaDecodeBody<Sm90>, plan.params);
  return Status();
}

}  // namespace kvtier::kernels::cuda

namespace kvtier::gpu {

void LaunchPrimitive(kernels::cuda::PrimitiveCase which, const uint32_t* in, uint32_t* out,
                     uint32_t block_count) {
  const auto report = kernels::cuda::emu::Launch(
      {.grid = {block_count}, .block = {32}, .shared_bytes = kernels::cuda::kCaseSharedBytes},
      DeviceMemory(), &kernels::cuda::PrimitiveBody<kernels::cuda::Sm90>, which,
      kernels::cuda::Global<const uint32_t>{in}, kernels::cuda::Global<uint32_t>{out});
  if (report.ok()) return;
  std::printf("FAILED: %s\n", report.ToString().c_str());
  std::exit(1);
}

}  // namespace kvtier::gpu

extern "C" {

cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  *pointer = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  TheRuntime().allocations[static_cast<std::byte*>(*pointer)] = bytes;
  return cudaSuccess;
}
cudaError_t cudaFree(void* pointer) {
  TheRuntime().allocations.erase(static_cast<std::byte*>(pointer));
  std::free(pointer);
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* target, const void* source, size_t bytes, cudaMemcpyKind) {
  std::memcpy(target, source, bytes);
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  *stream = nullptr;
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode) {
  TheRuntime().is_capturing = true;
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t* graph) {
  TheRuntime().is_capturing = false;
  *graph = nullptr;
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t, unsigned long long) {
  *executable = nullptr;
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t, cudaStream_t) {
  for (const auto& launch : TheRuntime().captured) launch();
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) {
  TheRuntime().captured.clear();
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t) { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t) { return "no error"; }

}  // extern "C"
