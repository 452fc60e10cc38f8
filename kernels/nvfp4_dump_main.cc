// SPDX-License-Identifier: Apache-2.0
// Filter around the number format, for oracles written in other languages. Binary in, binary out,
// little-endian, until end of input:
//
//   nvfp4_dump e2m1                 float32 -> 1 byte: the code
//   nvfp4_dump e4m3                 float32 -> 1 byte: the scale byte
//   nvfp4_dump e2m1-values          1 byte -> float32
//   nvfp4_dump e4m3-values          1 byte -> float32
//   nvfp4_dump quantize G [4over6]  16 x float32 -> 8 code bytes, 1 scale byte, 1 flag byte
//                                   (bit 0 nonfinite, bit 1 saturated)
//   nvfp4_dump dequantize G         8 code bytes, 1 scale byte -> 16 x float32
//
// G is the global scale. Exit status: 0; 1 for input that ends inside an item, a scale byte above
// 0x7E or an output that cannot be written; 2 for wrong usage.

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string_view>

#include "kernels/nvfp4.h"

namespace {

using kvtier::kernels::kVectorCodeBytes;
using kvtier::kernels::kVectorDims;

int Fail(const char* message, int status) {
  std::fprintf(stderr, "nvfp4_dump: %s\n", message);
  return status;
}

// Applies convert(in, out) to every item of standard input; convert returns false to stop.
template <size_t kInBytes, size_t kOutBytes, typename Convert>
int Filter(const Convert& convert) {
  unsigned char in[kInBytes];
  unsigned char out[kOutBytes];
  while (true) {
    const size_t in_bytes = std::fread(in, 1, kInBytes, stdin);
    if (in_bytes == 0 && std::feof(stdin) != 0) break;
    if (in_bytes != kInBytes) return Fail("input ends inside an item", 1);
    if (!convert(in, out)) return Fail("a scale byte is above 0x7E", 1);
    if (std::fwrite(out, 1, kOutBytes, stdout) != kOutBytes) return Fail("cannot write", 1);
  }
  return std::fflush(stdout) == 0 ? 0 : Fail("cannot write", 1);
}

template <typename Encode>
int FilterEncode(const Encode& encode) {
  return Filter<sizeof(float), 1>([&](const unsigned char* in, unsigned char* out) {
    float value = 0;
    std::memcpy(&value, in, sizeof(value));
    *out = encode(value);
    return true;
  });
}

template <typename Decode>
int FilterDecode(const Decode& decode) {
  return Filter<1, sizeof(float)>([&](const unsigned char* in, unsigned char* out) {
    const float value = decode(*in);
    std::memcpy(out, &value, sizeof(value));
    return true;
  });
}

int FilterQuantize(float g, kvtier::kernels::ScaleSearch search) {
  constexpr size_t kInBytes = kVectorDims * sizeof(float);
  return Filter<kInBytes, kVectorCodeBytes + 2>([&](const unsigned char* in, unsigned char* out) {
    float x[kVectorDims];
    std::memcpy(x, in, sizeof(x));
    const auto flags = kvtier::kernels::Quantize16(x, g, out, out + kVectorCodeBytes, search);
    out[kVectorCodeBytes + 1] =
        static_cast<unsigned char>((flags.nonfinite ? 1 : 0) | (flags.saturated ? 2 : 0));
    return true;
  });
}

int FilterDequantize(float g) {
  constexpr size_t kOutBytes = kVectorDims * sizeof(float);
  return Filter<kVectorCodeBytes + 1, kOutBytes>([&](const unsigned char* in, unsigned char* out) {
    if (!kvtier::kernels::IsValidScaleByte(in[kVectorCodeBytes])) return false;
    float x[kVectorDims];
    kvtier::kernels::Dequantize16(in, in[kVectorCodeBytes], g, x);
    std::memcpy(out, x, sizeof(x));
    return true;
  });
}

}  // namespace

int main(int argc, char** argv) {
  const std::string_view mode = argc > 1 ? argv[1] : "";
  if (argc == 2) {
    if (mode == "e2m1") return FilterEncode(kvtier::kernels::EncodeE2m1);
    if (mode == "e4m3") return FilterEncode(kvtier::kernels::EncodeE4m3Scale);
    if (mode == "e2m1-values") return FilterDecode(kvtier::kernels::DecodeE2m1);
    if (mode == "e4m3-values") return FilterDecode(kvtier::kernels::DecodeE4m3Scale);
  }
  if (argc >= 3) {
    char* end = nullptr;
    const float g = std::strtof(argv[2], &end);
    if (*end != '\0' || !kvtier::kernels::IsValidGlobalScale(g)) {
      return Fail("G must be a power of two in [2^-100, 2^100]", 2);
    }
    if (mode == "dequantize" && argc == 3) return FilterDequantize(g);
    if (mode == "quantize" && argc == 3) {
      return FilterQuantize(g, kvtier::kernels::ScaleSearch::kAmax6);
    }
    if (mode == "quantize" && argc == 4 && std::string_view(argv[3]) == "4over6") {
      return FilterQuantize(g, kvtier::kernels::ScaleSearch::kFourOverSix);
    }
  }
  return Fail("usage: see the head of nvfp4_dump_main.cc", 2);
}
