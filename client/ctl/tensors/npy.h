// SPDX-License-Identifier: Apache-2.0
//
// Arrays that numpy.save wrote: NEP 1, versions 1.0, 2.0 and 3.0, little endian, C order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/ctl/tensors/tensor.h"

namespace kvtier::ctl {

// NumPy has neither BF16 nor FP8. Arrays of ml_dtypes' bfloat16 are written as '<V2' (or '|V2') and
// read as BF16 without being told; these say what else integers hold.
struct NpyOptions {
  bool uint16_is_bf16 = false;
  // Also for '<V1', which ml_dtypes writes for float8_e4m3fn and for other types of one byte.
  bool uint8_is_fp8_e4m3 = false;
};

// Maps the array in `path`. Blocks on the disk, also later, as pages are touched. Thread-safe.
// Errors: those of MappedFile::Open; DATA_LOSS if the file is not a whole .npy file or its size is
// not that of its array; UNIMPLEMENTED for big endian, Fortran order, structured and other types.
absl::StatusOr<Tensor> ReadNpy(const std::string& path, const NpyOptions& options = {});

// Writes an array in version 1.0. BF16 becomes '<V2', FP8 '<V1', as ml_dtypes do.
// Errors: INVALID_ARGUMENT if `bytes` is not the size of `shape`; those of the file system.
absl::Status WriteNpy(const std::string& path, TensorType type, std::span<const uint64_t> shape,
                      std::span<const std::byte> bytes);

}  // namespace kvtier::ctl
