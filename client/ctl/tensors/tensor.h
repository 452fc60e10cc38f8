// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "client/ctl/tensors/mapped_file.h"
#include "kernels/element.h"

namespace kvtier::ctl {

// A file with a tensor of more dimensions is refused.
inline constexpr size_t kTensorRankMax = 64;

enum class TensorType : uint8_t {
  kBf16,
  kFp16,
  kFp32,
  kFp64,
  kFp8E4m3,  // The "fn" flavour: 0x7F and 0xFF are NaN, no infinity.
  kFp8E5m2,
  kInt8,
  kInt16,
  kInt32,
  kInt64,
  kUint8,
  kUint16,
  kUint32,
  kUint64,
  kBool,
  kOther,  // A type that is listed, but whose elements cannot be read here.
};

// The name that safetensors gives a type: "BF16", "F8_E4M3"; "other" for kOther.
std::string_view TensorTypeName(TensorType type);
// Bytes of one element; 0 for kOther.
uint32_t TensorElementBytes(TensorType type);

// A tensor in a file. A plain value; copies share the mapping of their file, which ends with the
// last of them: hence the shared_ptr.
struct Tensor {
  std::string name;  // Empty in a .npy file.
  TensorType type = TensorType::kOther;
  std::vector<uint64_t> shape = {};  // Row-major, the last index runs fastest; {} is one element.
  std::span<const std::byte> bytes = {};  // Little endian, without any alignment.
  std::shared_ptr<const MappedFile> file = nullptr;

  // "FILE" or "FILE: tensor NAME", for messages.
  std::string Where() const;
};

// A name from a file for a message: control characters must not reach a terminal, nor a hundred
// megabytes of anything.
std::string ShownName(std::string_view name);

// The product of `shape`, or nothing if it does not fit into 64 bits.
std::optional<uint64_t> ElementCountOf(std::span<const uint64_t> shape);

// The type under which kernels read the tensor where it lies (kernels::ConstRows).
// Errors: UNIMPLEMENTED for a type that kernels do not read.
absl::StatusOr<kernels::ElementType> KernelTypeOf(const Tensor& tensor);

// All elements in FP32. BF16, FP16, FP32 and FP8 E4M3 (without any scale) are exact; FP64 is
// rounded to nearest. Errors: UNIMPLEMENTED for another type; OUT_OF_RANGE for a finite FP64 value
// beyond FP32.
absl::StatusOr<std::vector<float>> ToFloats(const Tensor& tensor);

}  // namespace kvtier::ctl
