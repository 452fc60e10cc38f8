// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "tiers/cuda/driver.h"

namespace kvtier {

// Loads the CUDA driver's library, which the NVIDIA driver installs, and starts it; nothing of CUDA
// is linked. Blocks: starting a driver takes up to seconds. The library stays loaded for good,
// since drivers do not survive being unloaded. Errors: FAILED_PRECONDITION with what to do: no
// library, one that is too old or a stub, no device.
absl::StatusOr<std::unique_ptr<CudaDriver>> OpenCudaDriver(
    const std::string& library = "libcuda.so.1");

}  // namespace kvtier
