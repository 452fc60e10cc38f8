// SPDX-License-Identifier: Apache-2.0
#include "client/ctl/eval/dump.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "client/ctl/eval/attention.h"
#include "client/ctl/tensors/npy.h"
#include "client/ctl/tensors/safetensors.h"
#include "client/ctl/tensors/tensor_cases.h"
#include "proto/base/status_util.h"

namespace kvtier::ctl::eval {
namespace {

// A tensor whose element i is 0.25 * i, or `values`.
struct Array {
  std::vector<uint64_t> shape;
  std::vector<float> values;

  explicit Array(std::vector<uint64_t> dims) : shape(std::move(dims)) {
    values.resize(*ElementCountOf(shape));
    for (size_t i = 0; i < values.size(); ++i) values[i] = 0.25F * static_cast<float>(i);
  }
};

class DumpTest : public testing::Test {
 protected:
  std::string Npy(const std::string& name, const Array& array) {
    const std::string path = folder_.File(name);
    EXPECT_TRUE(
        WriteNpy(path, TensorType::kFp32, array.shape, std::as_bytes(std::span(array.values)))
            .ok());
    return path;
  }

  absl::StatusOr<Layer> Read(const Array& k, const Array& v) {
    KVT_ASSIGN_OR_RETURN(const Dump dump, OpenNpyDump(Npy("k.npy", k), Npy("v.npy", v), ""));
    return ReadDump(dump, 4);
  }
  absl::StatusOr<Layer> Read(const Array& k, const Array& v, const Array& q) {
    KVT_ASSIGN_OR_RETURN(const Dump dump,
                         OpenNpyDump(Npy("k.npy", k), Npy("v.npy", v), Npy("q.npy", q)));
    return ReadDump(dump, 4);
  }

  void ExpectInvalid(const absl::Status& status, const std::string& part) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_NE(status.ToString().find(part), std::string::npos) << status;
  }

  TestFolder folder_;
};

TEST_F(DumpTest, SplitsHeadsAndGroupsQueries) {
  // 3 tokens, 2 kv heads, 4 dims; 2 queries of 4 query heads: heads 0, 1 read kv head 0.
  const auto layer = Read(Array({3, 2, 4}), Array({3, 2, 4}), Array({2, 4, 4}));
  ASSERT_TRUE(layer.ok()) << layer.status();
  ASSERT_EQ(layer->heads.size(), 2U);
  const Head& head = layer->heads[1];
  EXPECT_EQ(head.k.rows(), 3U);
  EXPECT_EQ(head.k.Row(2)[3], 0.25 * ((2 * 2 + 1) * 4 + 3));
  EXPECT_EQ(head.v.Row(0)[0], 0.25 * 4);
  ASSERT_EQ(head.q.rows(), 4U);
  EXPECT_EQ(head.q.Row(1)[0], 0.25 * ((1 * 4 + 2) * 4));  // query 1 of query head 2
  EXPECT_EQ(head.q.Row(2)[0], 0.25 * (3 * 4));            // query 0 of query head 3
  EXPECT_EQ(head.softmax_scale, 0.5);
}

TEST_F(DumpTest, TakesTheLastQueries) {
  const auto layer = Read(Array({3, 1, 4}), Array({3, 1, 4}), Array({9, 2, 4}));  // of 9 the last 4
  ASSERT_TRUE(layer.ok()) << layer.status();
  const Matrix& q = layer->heads[0].q;
  ASSERT_EQ(q.rows(), 8U);
  EXPECT_EQ(q.Row(0)[0], 0.25 * (5 * 2 * 4));
  EXPECT_EQ(q.Row(7)[3], 0.25 * (9 * 2 * 4 - 1));
}

TEST_F(DumpTest, TwoDimensionsAreOneHead) {
  const auto layer = Read(Array({5, 8}), Array({5, 8}), Array({2, 3, 8}));
  ASSERT_TRUE(layer.ok()) << layer.status();
  ASSERT_EQ(layer->heads.size(), 1U);
  EXPECT_EQ(layer->heads[0].k.Row(4)[7], 0.25 * 39);
  EXPECT_EQ(layer->heads[0].q.rows(), 6U);
}

TEST_F(DumpTest, MakesQueriesWhereThereAreNone) {
  const auto layer = Read(Array({64, 1, 8}), Array({64, 1, 8}));
  ASSERT_TRUE(layer.ok()) << layer.status();
  const Head& head = layer->heads[0];
  EXPECT_EQ(head.q.rows(), 4U);
  EXPECT_GT(RelativeScoreError(Matrix(4, 64), Scores(head.q, head.k, head.softmax_scale)), 0.99);
  ExpectInvalid(Read(Array({1, 1, 8}), Array({1, 1, 8})).status(), "all the same");
}

TEST_F(DumpTest, RefusesKeysThatQueriesCannotBeScaledTo) {
  Array k({4, 1, 8});
  for (float& value : k.values) value *= 1e-43F;
  ExpectInvalid(Read(k, Array({4, 1, 8})).status(), "too small");
}

TEST_F(DumpTest, RefusesMoreThanMemoryHolds) {
  const std::string path = Npy("k.npy", Array({2, 1, 8}));
  absl::StatusOr<Dump> dump = OpenNpyDump(path, path, path);
  ASSERT_TRUE(dump.ok());
  Dump huge = *dump;
  huge.k.shape = {uint64_t{1} << 30, 1, 8};
  ExpectInvalid(ReadDump(huge, 4).status(), "more than");
}

TEST_F(DumpTest, ReadsSafetensorsByName) {
  const Array k({3, 1, 4});
  const Array v({3, 1, 4});
  const std::string path = folder_.File("layer.safetensors");
  const auto tensor = [](const char* name, const Array& array) {
    return Tensor{.name = name,
                  .type = TensorType::kFp32,
                  .shape = array.shape,
                  .bytes = std::as_bytes(std::span(array.values))};
  };
  const std::vector<Tensor> tensors = {tensor("k", k), tensor("v", v), tensor("q", k),
                                       tensor("model.k", v)};
  ASSERT_TRUE(WriteSafetensors(path, tensors).ok());
  const auto by_default = OpenSafetensorsDump(path, "");
  ASSERT_TRUE(by_default.ok()) << by_default.status();
  EXPECT_EQ(by_default->k.name, "k");
  EXPECT_TRUE(by_default->q.has_value());
  const auto named = OpenSafetensorsDump(path, "model.k,v");
  ASSERT_TRUE(named.ok()) << named.status();
  EXPECT_EQ(named->k.name, "model.k");
  EXPECT_FALSE(named->q.has_value());
  EXPECT_TRUE(ReadDump(*named, 4).ok());
  EXPECT_EQ(OpenSafetensorsDump(path, "k,w").status().code(), absl::StatusCode::kNotFound);
  ASSERT_TRUE(WriteSafetensors(path, std::span(tensors).last(2)).ok());
  const absl::Status unnamed = OpenSafetensorsDump(path, "").status();
  EXPECT_EQ(unnamed.code(), absl::StatusCode::kNotFound);
  EXPECT_NE(unnamed.ToString().find("--names"), std::string::npos) << unnamed;
  ExpectInvalid(OpenSafetensorsDump(path, "k").status(), "--names");
}

TEST_F(DumpTest, ReadsUint16AsBf16IfTold) {
  const std::vector<uint16_t> bits = {0x3F80, 0x4000, 0x4040, 0x4080};  // 1, 2, 3, 4
  const std::string path = folder_.File("bits.npy");
  ASSERT_TRUE(WriteNpy(path, TensorType::kUint16, std::vector<uint64_t>{2, 2},
                       std::as_bytes(std::span(bits)))
                  .ok());
  const auto told = OpenNpyDump(path, path, "", {.uint16_is_bf16 = true});
  ASSERT_TRUE(told.ok()) << told.status();
  const auto layer = ReadDump(*told, 4);
  ASSERT_TRUE(layer.ok()) << layer.status();
  EXPECT_EQ(layer->heads[0].k.Row(1)[0], 3.0);
  const auto untold = OpenNpyDump(path, path, "");
  ASSERT_TRUE(untold.ok()) << untold.status();
  const absl::Status refused = ReadDump(*untold, 4).status();
  EXPECT_NE(refused.ToString().find("--uint16-is-bf16"), std::string::npos) << refused;
}

TEST_F(DumpTest, RefusesShapesThatDoNotFit) {
  ExpectInvalid(Read(Array({3, 2, 4}), Array({4, 2, 4})).status(), "V is [4, 2, 4]");
  ExpectInvalid(Read(Array({3, 2, 4}), Array({3, 8})).status(), "V is [3, 8]");
  ExpectInvalid(Read(Array({3, 2, 4}), Array({3, 2, 4}), Array({1, 3, 4})).status(), "Q is [1, 3");
  ExpectInvalid(Read(Array({3, 2, 4}), Array({3, 2, 4}), Array({1, 2, 8})).status(), "Q is [1, 2");
  ExpectInvalid(Read(Array({3, 2, 2, 4}), Array({3, 2, 2, 4})).status(), "shape [3, 2, 2, 4]");
  ExpectInvalid(Read(Array({0, 2, 4}), Array({0, 2, 4})).status(), "no element");
  // Two kv heads of 3 tokens, heads first.
  ExpectInvalid(Read(Array({2, 3, 4}), Array({2, 3, 4})).status(), "fewer tokens than kv heads");
}

TEST_F(DumpTest, RefusesWhatIsNotFinite) {
  Array v({3, 2, 4});
  v.values[13] = std::numeric_limits<float>::quiet_NaN();
  ExpectInvalid(Read(Array({3, 2, 4}), v).status(), "at [1, 1, 1] is not finite");
  v.values[13] = std::numeric_limits<float>::infinity();
  ExpectInvalid(Read(Array({3, 2, 4}), v).status(), "v.npy");
  v.values[13] = std::numeric_limits<float>::max();
  ExpectInvalid(Read(Array({3, 2, 4}), v).status(), "not finite in BF16");
}

TEST_F(DumpTest, RefusesFp8AndOtherTypes) {
  const std::vector<uint64_t> shape = {2, 4};
  const std::vector<std::byte> bytes(8);
  const std::string path = folder_.File("k.npy");
  ASSERT_TRUE(WriteNpy(path, TensorType::kUint8, shape, bytes).ok());
  const auto integers = OpenNpyDump(path, path, "");
  ASSERT_TRUE(integers.ok()) << integers.status();
  EXPECT_EQ(ReadDump(*integers, 4).status().code(), absl::StatusCode::kUnimplemented);
  const Tensor fp8{
      .name = "k", .type = TensorType::kFp8E4m3, .shape = shape, .bytes = std::span(bytes)};
  const std::string named = folder_.File("k.safetensors");
  ASSERT_TRUE(WriteSafetensors(named, std::span(&fp8, 1)).ok());
  const auto scaled = OpenSafetensorsDump(named, "k,k");
  ASSERT_TRUE(scaled.ok()) << scaled.status();
  ExpectInvalid(ReadDump(*scaled, 4).status(), "scale");
}

}  // namespace
}  // namespace kvtier::ctl::eval
