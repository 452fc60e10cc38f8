// SPDX-License-Identifier: Apache-2.0
#include "client/ctl/tensors/npy.h"

#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <random>

#include "client/ctl/tensors/tensor_cases.h"
#include "proto/base/status_util.h"

namespace kvtier::ctl {
namespace {

// A .npy file as NumPy lays it out, with any header text.
std::string Npy(int major, std::string header, std::string_view data) {
  header += '\n';
  std::string out = "\x93NUMPY";
  out += {static_cast<char>(major), '\0'};
  const auto length = static_cast<uint32_t>(header.size());
  out.append(reinterpret_cast<const char*>(&length), major == 1 ? 2 : 4);
  return out + header + std::string(data);
}

template <typename T>
std::string Bytes(std::initializer_list<T> values) {
  return std::string(reinterpret_cast<const char*>(values.begin()), values.size() * sizeof(T));
}

constexpr const char* kF4 = "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }";

class NpyTest : public testing::Test {
 protected:
  absl::StatusCode CodeOf(std::string_view bytes, const NpyOptions& options = {}) {
    return ReadNpy(folder_.Write("a.npy", bytes), options).status().code();
  }

  TestFolder folder_;
};

TEST_F(NpyTest, ReadsEveryVersion) {
  const std::string data = Bytes<float>({1, 2, 3, 4, 5, -6.5F});
  for (const int major : {1, 2, 3}) {
    const auto tensor = ReadNpy(folder_.Write("a.npy", Npy(major, kF4, data)));
    ASSERT_TRUE(tensor.ok()) << tensor.status();
    EXPECT_EQ(tensor->type, TensorType::kFp32);
    EXPECT_EQ(tensor->shape, (std::vector<uint64_t>{2, 3}));
    EXPECT_EQ(*ToFloats(*tensor), (std::vector<float>{1, 2, 3, 4, 5, -6.5F}));
  }
}

TEST_F(NpyTest, ReadsWhatNumPyAndMlDtypesWrite) {
  // numpy.save of a scalar, of one dimension, and of ml_dtypes.bfloat16.
  const auto scalar = ReadNpy(folder_.Write(
      "a.npy",
      Npy(1, "{'descr': '<f8', 'fortran_order': False, 'shape': (), }", Bytes<double>({0.1}))));
  ASSERT_TRUE(scalar.ok()) << scalar.status();
  EXPECT_EQ(*ToFloats(*scalar), std::vector<float>{0.1F});
  const auto bf16 = ReadNpy(
      folder_.Write("a.npy", Npy(1, "{'descr': '<V2', 'fortran_order': False, 'shape': (3,), }",
                                 Bytes<uint16_t>({0x3F80, 0xC000, 0x7F80}))));
  ASSERT_TRUE(bf16.ok()) << bf16.status();
  EXPECT_EQ(*ToFloats(*bf16), (std::vector<float>{1, -2, std::numeric_limits<float>::infinity()}));
  EXPECT_EQ(*KernelTypeOf(*bf16), kernels::ElementType::kBf16);
  const auto fp16 =
      ReadNpy(folder_.Write("a.npy", Npy(1, "{'shape':(1,),\"fortran_order\":True,'descr':'<f2'}",
                                         Bytes<uint16_t>({0x3C01}))));
  ASSERT_TRUE(fp16.ok()) << fp16.status();
  EXPECT_EQ(*ToFloats(*fp16), std::vector<float>{1.0009765625F});
}

TEST_F(NpyTest, IntegersAreFloatsOnlyWhenToldSo) {
  const std::string u2 =
      Npy(1, "{'descr': '<u2', 'fortran_order': False, 'shape': (1,), }", Bytes<uint16_t>({16256}));
  const std::string u1 = Npy(1, "{'descr': '|u1', 'fortran_order': False, 'shape': (2,), }",
                             Bytes<uint8_t>({56, 255}));
  const auto plain = ReadNpy(folder_.Write("a.npy", u2));
  ASSERT_TRUE(plain.ok());
  EXPECT_EQ(ToFloats(*plain).status().code(), absl::StatusCode::kUnimplemented);
  EXPECT_EQ(*ToFloats(*ReadNpy(folder_.File("a.npy"), {.uint16_is_bf16 = true})),
            std::vector<float>{1.0F});
  const auto fp8 = ReadNpy(folder_.Write("b.npy", u1), {.uint8_is_fp8_e4m3 = true});
  ASSERT_TRUE(fp8.ok());
  const std::vector<float> values = *ToFloats(*fp8);
  EXPECT_EQ(values[0], 1.0F);
  EXPECT_TRUE(std::isnan(values[1]));
}

TEST_F(NpyTest, RefusesWhatItCannotRead) {
  const std::string data = Bytes<float>({1, 2, 3, 4, 5, 6});
  using enum absl::StatusCode;
  EXPECT_EQ(ReadNpy(folder_.File("none.npy")).status().code(), kNotFound);
  EXPECT_EQ(ReadNpy(folder_.File("")).status().code(), kInvalidArgument);
  EXPECT_EQ(CodeOf("PK\x03\x04 not an array"), kDataLoss);
  EXPECT_EQ(CodeOf(Npy(4, kF4, data)), kUnimplemented);
  const auto with = [&](const std::string& header) { return CodeOf(Npy(1, header, data)); };
  EXPECT_EQ(with("{'descr': '>f4', 'fortran_order': False, 'shape': (2, 3)}"), kUnimplemented);
  EXPECT_EQ(with("{'descr': '<V1', 'fortran_order': False, 'shape': (24,)}"), kUnimplemented);
  EXPECT_EQ(with("{'descr': '<f4', 'fortran_order': True, 'shape': (2, 3)}"), kUnimplemented);
  EXPECT_EQ(with("{'descr': [('x', '<f4')], 'fortran_order': False, 'shape': (6,)}"), kDataLoss);
  EXPECT_EQ(with("{'descr': '<f4', 'fortran_order': False, 'shape': (2, 4)}"), kDataLoss);
  EXPECT_EQ(with("{'descr': '<f4', 'fortran_order': False, 'shape': (6)}"), kDataLoss);
  EXPECT_EQ(with("{'descr': '<f4', 'fortran_order': False, 'shape': (-6,)}"), kDataLoss);
  EXPECT_EQ(with("{'descr': '<f4', 'fortran_order': False}"), kDataLoss);
  EXPECT_EQ(with("{'descr': '<f4', 'descr': '<f4', 'shape': (6,)}"), kDataLoss);
  EXPECT_EQ(with("{'descr': '<f4', 'fortran_order': False, 'shape': (6,)} x"), kDataLoss);
  // 2^62 * 2^2 elements are 0 modulo 2^64, and 2^62 elements of 4 bytes are 0 bytes.
  EXPECT_EQ(CodeOf(Npy(1,
                       "{'descr': '<f4', 'fortran_order': False, "
                       "'shape': (4611686018427387904, 4)}",
                       "")),
            kDataLoss);
  EXPECT_EQ(CodeOf(Npy(1,
                       "{'descr': '<f4', 'fortran_order': False, "
                       "'shape': (4611686018427387904,)}",
                       "")),
            kDataLoss);
  EXPECT_EQ(CodeOf(std::string("\x93NUMPY\x02\x00\xFF\xFF\xFF\xFF{", 13)), kDataLoss);
  EXPECT_EQ(CodeOf(Npy(2, kF4 + std::string(70'000, ' '), data)), kDataLoss);
}

TEST_F(NpyTest, LargeDoublesAreNotInfinity) {
  const auto tensor = ReadNpy(
      folder_.Write("a.npy", Npy(1, "{'descr': '<f8', 'fortran_order': False, 'shape': (2,), }",
                                 Bytes<double>({1, 1e300}))));
  ASSERT_TRUE(tensor.ok());
  EXPECT_EQ(ToFloats(*tensor).status().code(), absl::StatusCode::kOutOfRange);
}

TEST_F(NpyTest, ReadsWhatItWrote) {
  std::mt19937 random(7);
  std::vector<std::byte> bytes(4 * 6);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  const std::vector<std::pair<TensorType, std::vector<uint64_t>>> cases = {
      {TensorType::kFp32, {2, 3}}, {TensorType::kBf16, {12}},      {TensorType::kFp16, {3, 2, 2}},
      {TensorType::kFp64, {3, 1}}, {TensorType::kFp8E4m3, {4, 6}}, {TensorType::kUint8, {24}}};
  for (const auto& [type, shape] : cases) {
    ASSERT_TRUE(WriteNpy(folder_.File("a.npy"), type, shape, bytes).ok());
    const auto tensor =
        ReadNpy(folder_.File("a.npy"), {.uint8_is_fp8_e4m3 = type == TensorType::kFp8E4m3});
    ASSERT_TRUE(tensor.ok()) << tensor.status();
    EXPECT_EQ(tensor->type, type);
    EXPECT_EQ(tensor->shape, shape);
    EXPECT_EQ(std::memcmp(tensor->bytes.data(), bytes.data(), bytes.size()), 0);
  }
  EXPECT_FALSE(WriteNpy(folder_.File("a.npy"), TensorType::kFp32, cases[1].second, bytes).ok());
}

TEST_F(NpyTest, DamageIsNeverReadAsData) {
  const std::string whole = Npy(1, kF4, Bytes<float>({1, 2, 3, 4, 5, 6}));
  ASSERT_EQ(CodeOf(whole), absl::StatusCode::kOk);
  ExpectEveryTruncationRefused(folder_, whole,
                               [](const std::string& path) { return ReadNpy(path).ok(); });
  EXPECT_EQ(CodeOf(whole + "x"), absl::StatusCode::kDataLoss);
  ReadDamaged(folder_, whole, 20'261'129, 300, [](const std::string& path) {
    const auto tensor = ReadNpy(path, {.uint16_is_bf16 = true, .uint8_is_fp8_e4m3 = true});
    if (tensor.ok()) (void)ToFloats(*tensor);
  });
}

}  // namespace
}  // namespace kvtier::ctl
