// SPDX-License-Identifier: Apache-2.0
// Runs the CUDA kernels on a GPU against their references:
// gpu_test [--sanitized] [--no-benchmarks] [--compute-sanitizer RESULT] [--failed REASON] JSON_FILE
// --failed: something failed before, so the results say "failed" whatever the checks say.
// Exit status 0 all passed, 1 a check or something before failed, 2 usage, 77 no GPU. A benchmark
// that misses its must does not change it.

#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstring>
#include <fstream>

#include "tests/gpu/device_memory.h"
#include "tests/gpu/suite.h"

namespace kvtier::gpu {
namespace {

constexpr int kSkipped = 77;

int Run(const char* json_path, const Options& options) {
  int device_count = 0;
  if (cudaGetDeviceCount(&device_count) != cudaSuccess || device_count == 0) {
    std::printf("SKIPPED: no GPU\n");
    return kSkipped;
  }
  cudaDeviceProp properties{};
  CheckCuda(cudaGetDeviceProperties(&properties, 0), "device properties");
  Device device{.name = properties.name,
                .major = properties.major,
                .minor = properties.minor,
                .multiprocessor_count = properties.multiProcessorCount};
  CheckCuda(cudaDriverGetVersion(&device.driver_version), "driver version");
  CheckCuda(cudaRuntimeGetVersion(&device.runtime_version), "runtime version");
  std::printf("%s, compute capability %d.%d\n", device.name.c_str(), device.major, device.minor);

  Suite suite(device, options);
  CheckPrimitives(&suite);
  CheckEncoder(&suite);
  CheckTransfers(&suite);
  CheckDecode(&suite);
  CheckMlaTransfers(&suite);
  CheckMlaDecode(&suite);
  if (options.has_benchmarks) {
    BenchmarkTransfers(&suite);
    BenchmarkDecode(&suite);
    BenchmarkMla(&suite);
  }
  std::ofstream json(json_path);
  json << suite.ToJson();
  json.close();
  if (!json) {
    std::printf("FAILED: cannot write %s\n", json_path);
    return 1;
  }
  std::printf("%s; %llu musts missed\n", suite.ok() ? "PASSED" : "FAILED",
              static_cast<unsigned long long>(suite.missed_must_count()));
  return suite.ok() ? 0 : 1;
}

}  // namespace

double CopyBytesPerSecond() {
  constexpr size_t kBytes = size_t{512} << 20;
  const DeviceArray<std::byte> from(kBytes);
  const DeviceArray<std::byte> to(kBytes);
  CheckCuda(cudaMemset(from.data(), 1, kBytes), "memset");
  const double seconds = SecondsOf(20, [&](cudaStream_t stream) {
    CheckCuda(cudaMemcpyAsync(to.data(), from.data(), kBytes, cudaMemcpyDeviceToDevice, stream),
              "copy");
  });
  return 2.0 * static_cast<double>(kBytes) / seconds;
}

}  // namespace kvtier::gpu

int main(int argc, char** argv) {
  kvtier::gpu::Options options;
  const char* json_path = nullptr;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--sanitized") == 0) {
      options.is_sanitized = true;
      options.has_benchmarks = false;
    } else if (std::strcmp(argv[i], "--no-benchmarks") == 0) {
      options.has_benchmarks = false;
    } else if (std::strcmp(argv[i], "--compute-sanitizer") == 0 && i + 1 < argc) {
      options.compute_sanitizer = argv[++i];
    } else if (std::strcmp(argv[i], "--failed") == 0 && i + 1 < argc) {
      options.earlier_failure = argv[++i];
    } else {
      json_path = argv[i];
    }
  }
  if (json_path == nullptr) {
    std::printf(
        "usage: gpu_test [--sanitized] [--no-benchmarks] [--compute-sanitizer RESULT] "
        "[--failed REASON] JSON\n");
    return 2;
  }
  return kvtier::gpu::Run(json_path, options);
}
