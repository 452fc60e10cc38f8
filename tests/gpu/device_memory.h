// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_TESTS_GPU_DEVICE_MEMORY_H_
#define KVTIER_TESTS_GPU_DEVICE_MEMORY_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <span>
#include <vector>

namespace kvtier::gpu {

// The suite cannot go on after an error of the driver: it says where and ends.
inline void CheckCuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::printf("FAILED: %s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}

// Device memory of `count` elements. Owns it.
template <typename T>
class DeviceArray {
 public:
  explicit DeviceArray(size_t count) : count_(count) {
    CheckCuda(cudaMalloc(reinterpret_cast<void**>(&data_), count * sizeof(T) + 1), "cudaMalloc");
  }
  explicit DeviceArray(std::span<const T> values) : DeviceArray(values.size()) { Upload(values); }
  explicit DeviceArray(const std::vector<T>& values) : DeviceArray(std::span<const T>(values)) {}
  ~DeviceArray() { cudaFree(static_cast<void*>(data_)); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;

  T* data() const { return data_; }
  size_t size() const { return count_; }

  void Upload(std::span<const T> values) {
    CheckCuda(cudaMemcpy(static_cast<void*>(data_), static_cast<const void*>(values.data()),
                         values.size_bytes(), cudaMemcpyHostToDevice),
              "copy to the device");
  }
  std::vector<T> Download() const {
    std::vector<T> values(count_);
    CheckCuda(cudaMemcpy(static_cast<void*>(values.data()), static_cast<const void*>(data_),
                         count_ * sizeof(T), cudaMemcpyDeviceToHost),
              "copy from the device");
    return values;
  }

 private:
  T* data_ = nullptr;
  size_t count_;
};

// Seconds of one call of `work(stream)` that only enqueues: the mean over `repeats` after some to
// warm up.
template <typename Work>
double SecondsOf(int repeats, const Work& work) {
  cudaStream_t stream = nullptr;
  cudaEvent_t begin = nullptr;
  cudaEvent_t end = nullptr;
  CheckCuda(cudaStreamCreate(&stream), "stream");
  CheckCuda(cudaEventCreate(&begin), "event");
  CheckCuda(cudaEventCreate(&end), "event");
  for (int i = 0; i < 3; ++i) work(stream);
  CheckCuda(cudaEventRecord(begin, stream), "event");
  for (int i = 0; i < repeats; ++i) work(stream);
  CheckCuda(cudaEventRecord(end, stream), "event");
  CheckCuda(cudaEventSynchronize(end), "benchmark");
  float milliseconds = 0;
  CheckCuda(cudaEventElapsedTime(&milliseconds, begin, end), "event");
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  cudaStreamDestroy(stream);
  return static_cast<double>(milliseconds) * 1e-3 / repeats;
}

// Bytes read and written per second by a copy of 512 MiB within the device: what rates are
// compared with.
double CopyBytesPerSecond();

}  // namespace kvtier::gpu

#endif  // KVTIER_TESTS_GPU_DEVICE_MEMORY_H_
