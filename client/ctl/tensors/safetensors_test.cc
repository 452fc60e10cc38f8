// SPDX-License-Identifier: Apache-2.0
#include "client/ctl/tensors/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

#include "client/ctl/tensors/tensor_cases.h"
#include "proto/base/status_util.h"

namespace kvtier::ctl {
namespace {

using testing::HasSubstr;

std::string File(const std::string& header, std::string_view data) {
  const uint64_t length = header.size();
  return std::string(reinterpret_cast<const char*>(&length), sizeof(length)) + header +
         std::string(data);
}

constexpr const char* kTwo = R"({"__metadata__":{"format":"pt"},)"
                             R"("b.k_scale":{"dtype":"F32","shape":[],"data_offsets":[4,8]},)"
                             R"("a":{"dtype":"BF16","shape":[1,2],"data_offsets":[0,4]}}  )";
constexpr std::string_view kTwoData("\x80\x3F\x00\xC0\x00\x00\x20\x41", 8);  // 1, -2; 10

class SafetensorsTest : public testing::Test {
 protected:
  absl::Status StatusOf(const std::string& header, std::string_view data) {
    return SafetensorsFile::Open(folder_.Write("a.safetensors", File(header, data))).status();
  }
  void ExpectRefused(const std::string& header, std::string_view data, const std::string& why) {
    const absl::Status status = StatusOf(header, data);
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << header;
    EXPECT_THAT(std::string(status.message()), HasSubstr(why));
    EXPECT_THAT(std::string(status.message()), HasSubstr("a.safetensors"));
  }

  TestFolder folder_;
};

TEST_F(SafetensorsTest, ReadsTensorsByName) {
  const auto file = SafetensorsFile::Open(folder_.Write("a.safetensors", File(kTwo, kTwoData)));
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->tensors().size(), 2U);
  EXPECT_EQ(file->metadata().at("format"), "pt");
  const auto a = file->Find("a");
  ASSERT_TRUE(a.ok());
  EXPECT_EQ(a->shape, (std::vector<uint64_t>{1, 2}));
  EXPECT_EQ(*ToFloats(*a), (std::vector<float>{1, -2}));
  EXPECT_EQ(*ToFloats(*file->Find("b.k_scale")), std::vector<float>{10});
  EXPECT_EQ(file->Find("c").status().code(), absl::StatusCode::kNotFound);
}

TEST_F(SafetensorsTest, TensorsOutliveTheirFile) {
  Tensor tensor;
  {
    const auto file = SafetensorsFile::Open(folder_.Write("a.safetensors", File(kTwo, kTwoData)));
    tensor = *file->Find("a");
  }
  EXPECT_EQ(*ToFloats(tensor), (std::vector<float>{1, -2}));
}

TEST_F(SafetensorsTest, ListsTypesItCannotRead) {
  const auto file = SafetensorsFile::Open(folder_.Write(
      "a.safetensors", File(R"({"w":{"dtype":"F4","shape":[4],"data_offsets":[0,2]},)"
                            R"("i":{"dtype":"I64","shape":[1],"data_offsets":[2,10]}})",
                            "0123456789")));
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->tensors().at("w").type, TensorType::kOther);
  for (const char* name : {"w", "i"}) {
    EXPECT_EQ(ToFloats(*file->Find(name)).status().code(), absl::StatusCode::kUnimplemented);
  }
}

TEST_F(SafetensorsTest, RefusesHostileLengths) {
  for (const uint64_t length :
       {uint64_t{9}, uint64_t{100'000'001}, uint64_t{1} << 63, ~uint64_t{0}, ~uint64_t{0} - 7}) {
    std::string bytes(reinterpret_cast<const char*>(&length), sizeof(length));
    bytes += "{}      ";
    EXPECT_EQ(SafetensorsFile::Open(folder_.Write("a.safetensors", bytes)).status().code(),
              absl::StatusCode::kDataLoss)
        << length;
  }
  EXPECT_TRUE(StatusOf("{}", "").ok());
}

TEST_F(SafetensorsTest, RefusesJsonThatIsNotTheFormat) {
  ExpectRefused("{", "", "no JSON");
  ExpectRefused("{}{}", "", "no JSON");
  ExpectRefused("\"\xFF\"", "", "no JSON");
  ExpectRefused("[]", "", "unexpected array");
  ExpectRefused("7", "", "unexpected number");
  ExpectRefused(R"({"a":null})", "", "tensor a: an unexpected null");
  ExpectRefused(R"({"a":{"dtype":"F32","shape":[[1]]}})", "", "unexpected array");
  ExpectRefused(R"({"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}})", "0123", "negative");
  ExpectRefused(R"({"a":{"dtype":"F32","shape":[1.0],"data_offsets":[0,4]}})", "0123", "fraction");
  ExpectRefused(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"x":"y"}})", "0123",
                "unexpected string");
  ExpectRefused(R"({"a":{"dtype":"F32","dtype":"F32","shape":[1]}})", "0123", "twice");
  ExpectRefused(R"({"a":{"dtype":"F32","shape":[1]}})", "0123", "not dtype, shape and");
  ExpectRefused(R"({"__metadata__":{"x":"1"},"__metadata__":{"x":"1"}})", "", "twice");
  ExpectRefused(R"({"__metadata__":{"x":"1","x":"2"}})", "", "twice");
  ExpectRefused(R"({"__metadata__":{"x":1}})", "", "unexpected number");
  std::string deep;
  for (int i = 0; i < 1'000'000; ++i) deep += R"({"a":)";
  ExpectRefused(deep, "", "unexpected object");
  ExpectRefused(R"({"a":{"shape":)" + std::string(1'000'000, '['), "", "unexpected array");
}

TEST_F(SafetensorsTest, RefusesTensorsThatAreNotTheData) {
  const auto tensor = [](const char* name, const char* shape, const char* offsets) {
    return absl::StrFormat(R"("%s":{"dtype":"F32","shape":%s,"data_offsets":%s})", name, shape,
                           offsets);
  };
  const auto of = [](const std::string& a, const std::string& b) {
    return "{" + a + "," + b + "}";
  };
  const std::string a = tensor("a", "[1]", "[0,4]");
  EXPECT_TRUE(StatusOf(of(a, tensor("b", "[1]", "[4,8]")), "01234567").ok());
  EXPECT_TRUE(StatusOf(of(a, tensor("b", "[0,9]", "[4,4]")), "0123").ok());
  ExpectRefused(of(a, tensor("b", "[1]", "[4,8]")), "0123456", "tensor b: its data_offsets");
  ExpectRefused(of(a, tensor("b", "[1]", "[8,4]")), "01234567", "tensor b: its data_offsets");
  ExpectRefused(of(a, tensor("b", "[1]", "[4]")), "01234567", "tensor b: its data_offsets");
  ExpectRefused(of(a, tensor("b", "[1]", "[4,18446744073709551615]")), "01234567", "tensor b");
  ExpectRefused(of(a, tensor("b", "[2]", "[4,8]")), "01234567", "tensor b: shape [2]");
  ExpectRefused(of(a, tensor("b", "[4611686018427387904,4]", "[4,4]")), "0123", "tensor b: shape");
  ExpectRefused(of(a, tensor("b", "[1]", "[2,6]")), "012345", "tensor b: it overlaps");
  ExpectRefused(of(a, tensor("b", "[1]", "[0,4]")), "0123", "it overlaps");
  ExpectRefused(of(a, tensor("b", "[1]", "[5,9]")), "012345678", "tensor b: a gap");
  ExpectRefused(of(a, tensor("b", "[1]", "[4,8]")), "012345678", "1 bytes after");
  ExpectRefused(of(a, tensor("a", "[1]", "[4,8]")), "01234567",
                "tensor a: its name is there twice");
}

TEST_F(SafetensorsTest, NamesReachMessagesWithoutControlCharacters) {
  const absl::Status status =
      StatusOf("{\"\\u001b[2J\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,9]}}", "0123");
  EXPECT_THAT(std::string(status.message()), HasSubstr("tensor \\x1b[2J"));
}

TEST_F(SafetensorsTest, NamesReachMessagesWithoutTheirMegabytes) {
  const std::string name(1'000'000, 'n');
  for (const std::string& text :
       {"{\"" + name + R"(":{"dtype":"F32","shape":[7],"data_offsets":[0,4]}})",
        "{\"" + name + R"(":{"dtype":"F32","shape":"x"}})",
        R"({"a":{"shape":[7],"data_offsets":[0,4],"dtype":")" + name + R"("}})"}) {
    EXPECT_LT(StatusOf(text, "0123").message().size(), 1000U);
  }
}

TEST_F(SafetensorsTest, ReadsWhatItWrote) {
  const std::string data = "0123456789ab";
  const auto bytes = std::as_bytes(std::span(data));
  const std::vector<Tensor> tensors = {
      {.name = "x", .type = TensorType::kFp8E4m3, .shape = {2, 4}, .bytes = bytes.subspan(0, 8)},
      {.name = "w", .type = TensorType::kBf16, .shape = {2}, .bytes = bytes.subspan(8)}};
  ASSERT_TRUE(WriteSafetensors(folder_.File("a"), tensors).ok());
  const auto file = SafetensorsFile::Open(folder_.File("a"));
  ASSERT_TRUE(file.ok()) << file.status();
  for (const Tensor& tensor : tensors) {
    const auto found = file->Find(tensor.name);
    ASSERT_TRUE(found.ok());
    EXPECT_EQ(found->type, tensor.type);
    EXPECT_EQ(found->shape, tensor.shape);
    EXPECT_EQ(std::memcmp(found->bytes.data(), tensor.bytes.data(), tensor.bytes.size()), 0);
  }
}

TEST_F(SafetensorsTest, DamageIsNeverReadAsData) {
  const std::string whole = File(kTwo, kTwoData);
  ExpectEveryTruncationRefused(
      folder_, whole, [](const std::string& path) { return SafetensorsFile::Open(path).ok(); });
  ReadDamaged(folder_, whole, 20'261'129, 300, [](const std::string& path) {
    const auto file = SafetensorsFile::Open(path);
    if (!file.ok()) return;
    for (const auto& [name, tensor] : file->tensors()) (void)ToFloats(tensor);
  });
}

}  // namespace
}  // namespace kvtier::ctl
