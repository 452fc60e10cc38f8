// SPDX-License-Identifier: Apache-2.0
#include "client/ctl/eval/dump.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "client/ctl/tensors/npy.h"
#include "client/ctl/tensors/safetensors.h"
#include "kernels/nvfp4.h"
#include "proto/base/status_util.h"

namespace kvtier::ctl::eval {
namespace {

// Values of one tensor and scores of one kv head: with all copies, a few times 8 bytes each. A file
// of holes may claim any number.
constexpr uint64_t kValueCountMax = uint64_t{1} << 28;

// [row][head][dim].
struct Heads {
  size_t row_count = 0;
  size_t head_count = 0;
  size_t head_dim = 0;
  std::vector<float> values = {};

  Matrix Head(size_t head) const {
    Matrix result(row_count, head_dim);
    for (size_t row = 0; row < row_count; ++row) {
      const auto begin =
          values.begin() + static_cast<int64_t>((row * head_count + head) * head_dim);
      std::copy_n(begin, head_dim, result.Row(row).begin());
    }
    return result;
  }
};

std::string ShapeText(const Tensor& tensor) {
  return absl::StrFormat("[%s]", absl::StrJoin(tensor.shape, ", "));
}

absl::Status CheckFinite(const Tensor& tensor, const Heads& heads) {
  for (size_t i = 0; i < heads.values.size(); ++i) {
    const float value = heads.values[i];
    if (std::isfinite(kernels::Bf16ToFloat(kernels::FloatToBf16(value)))) continue;
    const size_t head = i / heads.head_dim;
    return Invalid("%s: %f at [%d, %d, %d] is not finite%s", tensor.Where(), value,
                   head / heads.head_count, head % heads.head_count, i % heads.head_dim,
                   std::isfinite(value) ? " in BF16" : "");
  }
  return absl::OkStatus();
}

absl::StatusOr<Heads> ReadHeads(const Tensor& tensor, std::string_view rows) {
  const size_t rank = tensor.shape.size();
  if (rank != 2 && rank != 3) {
    return Invalid("%s: shape %s; needed is [%s, heads, head_dim] or [%s, head_dim]",
                   tensor.Where(), ShapeText(tensor), rows, rows);
  }
  if (std::count(tensor.shape.begin(), tensor.shape.end(), 0) > 0) {
    return Invalid("%s: shape %s has no element", tensor.Where(), ShapeText(tensor));
  }
  if (tensor.type == TensorType::kFp8E4m3 || tensor.type == TensorType::kFp8E5m2) {
    return Invalid("%s: %s has a scale that the file does not hold; dump BF16, FP16 or FP32",
                   tensor.Where(), TensorTypeName(tensor.type));
  }
  if (ElementCountOf(tensor.shape).value_or(kValueCountMax + 1) > kValueCountMax) {
    return Invalid("%s: shape %s has more than %d values; dump fewer tokens or heads",
                   tensor.Where(), ShapeText(tensor), kValueCountMax);
  }
  Heads heads{.row_count = tensor.shape.front(),
              .head_count = rank == 3 ? tensor.shape[1] : 1,
              .head_dim = tensor.shape.back()};
  KVT_ASSIGN_OR_RETURN(heads.values, ToFloats(tensor));
  KVT_RETURN_IF_ERROR(CheckFinite(tensor, heads));
  return heads;
}

absl::Status CheckShapes(const Dump& dump, const Heads& k, const Heads& v) {
  if (k.row_count != v.row_count || k.head_count != v.head_count || k.head_dim != v.head_dim) {
    return Invalid("K is %s and V is %s: tokens, kv heads and head_dim must be equal",
                   ShapeText(dump.k), ShapeText(dump.v));
  }
  // Caches of [kv heads, tokens, head_dim] are common, and would give plausible figures.
  if (k.row_count < k.head_count) {
    return Invalid(
        "%s: shape %s has fewer tokens than kv heads; the order is [tokens, heads, "
        "head_dim]",
        dump.k.Where(), ShapeText(dump.k));
  }
  return absl::OkStatus();
}

absl::Status CheckQueries(const Dump& dump, const Heads& k, const Heads& q, uint32_t query_count) {
  const uint64_t queries = std::min<uint64_t>(q.row_count, query_count) * q.head_count;
  if (queries / k.head_count > kValueCountMax / k.row_count) {
    return Invalid("K is %s and Q is %s: too many scores a kv head; use fewer queries",
                   ShapeText(dump.k), ShapeText(*dump.q));
  }
  if (q.head_dim == k.head_dim && q.head_count % k.head_count == 0) return absl::OkStatus();
  return Invalid("K is %s and Q is %s: head_dim must be equal, query heads a multiple of kv heads",
                 ShapeText(dump.k), ShapeText(*dump.q));
}

// The last `query_count` queries of all query heads that read `kv_head`, one head after the other.
Matrix QueriesOf(const Heads& q, size_t kv_head, size_t kv_head_count, size_t query_count) {
  const size_t group = q.head_count / kv_head_count;
  const size_t count = std::min(query_count, q.row_count);
  Matrix result(count * group, q.head_dim);
  for (size_t i = 0; i < group; ++i) {
    const Matrix one = q.Head(kv_head * group + i);
    for (size_t row = 0; row < count; ++row) {
      const std::span<const double> from = one.Row(q.row_count - count + row);
      std::copy(from.begin(), from.end(), result.Row(i * count + row).begin());
    }
  }
  return result;
}

bool HasDifferentRows(const Matrix& k) {
  for (size_t row = 1; row < k.rows(); ++row) {
    if (!std::equal(k.Row(row).begin(), k.Row(row).end(), k.Row(0).begin())) return true;
  }
  return false;
}

bool AllFinite(const Matrix& x) {
  return std::all_of(x.values().begin(), x.values().end(),
                     [](double value) { return std::isfinite(value); });
}

}  // namespace

absl::StatusOr<Dump> OpenNpyDump(const std::string& k_path, const std::string& v_path,
                                 const std::string& q_path, const NpyOptions& options) {
  Dump dump;
  KVT_ASSIGN_OR_RETURN(dump.k, ReadNpy(k_path, options));
  KVT_ASSIGN_OR_RETURN(dump.v, ReadNpy(v_path, options));
  if (!q_path.empty()) {
    KVT_ASSIGN_OR_RETURN(dump.q, ReadNpy(q_path, options));
  }
  return dump;
}

absl::StatusOr<Dump> OpenSafetensorsDump(const std::string& path, const std::string& names) {
  KVT_ASSIGN_OR_RETURN(const SafetensorsFile file, SafetensorsFile::Open(path));
  std::vector<std::string> parts = {"k", "v"};
  if (!names.empty()) {
    parts = absl::StrSplit(names, ',');
  } else if (!file.tensors().contains("k") || !file.tensors().contains("v")) {
    return NotFound(
        "%s: no tensors k and v; --names says what they are called, as in "
        "layers.3.k,layers.3.v",
        path);
  } else if (file.tensors().contains("q")) {
    parts.emplace_back("q");
  }
  if (parts.size() != 2 && parts.size() != 3) {
    return Invalid("--names \"%s\": needed are the names of K, V and maybe Q, with commas between",
                   names);
  }
  Dump dump;
  KVT_ASSIGN_OR_RETURN(dump.k, file.Find(parts[0]));
  KVT_ASSIGN_OR_RETURN(dump.v, file.Find(parts[1]));
  if (parts.size() == 3) {
    KVT_ASSIGN_OR_RETURN(dump.q, file.Find(parts[2]));
  }
  return dump;
}

absl::StatusOr<Layer> ReadDump(const Dump& dump, uint32_t query_count) {
  KVT_ASSIGN_OR_RETURN(const Heads k, ReadHeads(dump.k, "tokens"));
  KVT_ASSIGN_OR_RETURN(const Heads v, ReadHeads(dump.v, "tokens"));
  KVT_RETURN_IF_ERROR(CheckShapes(dump, k, v));
  Heads q;
  if (dump.q.has_value()) {
    KVT_ASSIGN_OR_RETURN(q, ReadHeads(*dump.q, "queries"));
    KVT_RETURN_IF_ERROR(CheckQueries(dump, k, q, query_count));
  }
  Layer layer;
  for (size_t i = 0; i < k.head_count; ++i) {
    Head head{.k = k.Head(i),
              .v = v.Head(i),
              .softmax_scale = 1.0 / std::sqrt(static_cast<double>(k.head_dim))};
    if (dump.q.has_value()) {
      head.q = QueriesOf(q, i, k.head_count, query_count);
    } else if (HasDifferentRows(head.k)) {
      head.q = MakeQueries(head.k, query_count, i);
      if (!AllFinite(head.q)) {
        return Invalid("%s: the keys of kv head %d are too small for synthetic queries",
                       dump.k.Where(), i);
      }
    } else {
      return Invalid("%s: the keys of kv head %d are all the same", dump.k.Where(), i);
    }
    layer.heads.push_back(std::move(head));
  }
  return layer;
}

}  // namespace kvtier::ctl::eval
