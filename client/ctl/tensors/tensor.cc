// SPDX-License-Identifier: Apache-2.0
#include "client/ctl/tensors/tensor.h"

#include <bit>
#include <cmath>
#include <cstring>

#include "absl/strings/escaping.h"
#include "kernels/nvfp4.h"
#include "proto/base/status_util.h"

namespace kvtier::ctl {
namespace {

static_assert(std::endian::native == std::endian::little);

struct TypeFacts {
  TensorType type;
  std::string_view name;
  uint32_t element_bytes;
};
constexpr TypeFacts kTypes[] = {
    {TensorType::kBf16, "BF16", 2},       {TensorType::kFp16, "F16", 2},
    {TensorType::kFp32, "F32", 4},        {TensorType::kFp64, "F64", 8},
    {TensorType::kFp8E4m3, "F8_E4M3", 1}, {TensorType::kFp8E5m2, "F8_E5M2", 1},
    {TensorType::kInt8, "I8", 1},         {TensorType::kInt16, "I16", 2},
    {TensorType::kInt32, "I32", 4},       {TensorType::kInt64, "I64", 8},
    {TensorType::kUint8, "U8", 1},        {TensorType::kUint16, "U16", 2},
    {TensorType::kUint32, "U32", 4},      {TensorType::kUint64, "U64", 8},
    {TensorType::kBool, "BOOL", 1},       {TensorType::kOther, "other", 0},
};

const TypeFacts& FactsOf(TensorType type) { return kTypes[static_cast<size_t>(type)]; }

template <typename T>
T LoadAt(std::span<const std::byte> bytes, size_t idx) {
  T value;
  std::memcpy(&value, bytes.data() + idx * sizeof(T), sizeof(T));
  return value;
}

absl::Status Fp64ToFloats(const Tensor& tensor, std::vector<float>* out) {
  for (size_t i = 0; i < out->size(); ++i) {
    const auto value = LoadAt<double>(tensor.bytes, i);
    (*out)[i] = static_cast<float>(value);
    if (std::isfinite(value) && !std::isfinite((*out)[i])) {
      return OutOfRange("%s: element %d is %g, too large for FP32", tensor.Where(), i, value);
    }
  }
  return absl::OkStatus();
}

}  // namespace

std::string_view TensorTypeName(TensorType type) { return FactsOf(type).name; }

uint32_t TensorElementBytes(TensorType type) { return FactsOf(type).element_bytes; }

std::string Tensor::Where() const {
  const std::string path = file == nullptr ? "tensor" : file->path();
  return name.empty() ? path : path + ": tensor " + ShownName(name);
}

std::string ShownName(std::string_view name) {
  constexpr size_t kShownMax = 256;
  const std::string_view cut = name.substr(0, kShownMax);
  return absl::CHexEscape(ToAbsl(cut)) + (cut.size() < name.size() ? "..." : "");
}

std::optional<uint64_t> ElementCountOf(std::span<const uint64_t> shape) {
  // A dimension of 0 makes the product 0, but must not hide an overflow of the others.
  uint64_t product = 1;
  bool is_empty = false;
  for (const uint64_t dim : shape) {
    is_empty = is_empty || dim == 0;
    if (dim != 0 && __builtin_mul_overflow(product, dim, &product)) return std::nullopt;
  }
  return is_empty ? 0 : product;
}

absl::StatusOr<kernels::ElementType> KernelTypeOf(const Tensor& tensor) {
  switch (tensor.type) {
    case TensorType::kBf16:
      return kernels::ElementType::kBf16;
    case TensorType::kFp16:
      return kernels::ElementType::kFp16;
    case TensorType::kFp32:
      return kernels::ElementType::kFp32;
    case TensorType::kFp8E4m3:
      return kernels::ElementType::kFp8E4m3;
    default:
      return Unimplemented("%s: values of type %s, not BF16, F16, F32 or F8_E4M3%s", tensor.Where(),
                           TensorTypeName(tensor.type),
                           tensor.type == TensorType::kUint16
                               ? "; --uint16-is-bf16 if that is what a .npy file holds"
                               : "");
  }
}

absl::StatusOr<std::vector<float>> ToFloats(const Tensor& tensor) {
  const uint32_t element_bytes = TensorElementBytes(tensor.type);
  std::vector<float> out(element_bytes == 0 ? 0 : tensor.bytes.size() / element_bytes);
  if (tensor.type == TensorType::kFp64) {
    KVT_RETURN_IF_ERROR(Fp64ToFloats(tensor, &out));
    return out;
  }
  KVT_ASSIGN_OR_RETURN(const kernels::ElementType type, KernelTypeOf(tensor));
  for (size_t i = 0; i < out.size(); ++i) {
    switch (type) {
      case kernels::ElementType::kBf16:
        out[i] = kernels::Bf16ToFloat(LoadAt<uint16_t>(tensor.bytes, i));
        break;
      case kernels::ElementType::kFp16:
        out[i] = kernels::Fp16ToFloat(LoadAt<uint16_t>(tensor.bytes, i));
        break;
      case kernels::ElementType::kFp32:
        out[i] = LoadAt<float>(tensor.bytes, i);
        break;
      case kernels::ElementType::kFp8E4m3:
        out[i] = kernels::DecodeE4m3Scale(LoadAt<uint8_t>(tensor.bytes, i));
        break;
    }
  }
  return out;
}

}  // namespace kvtier::ctl
