// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "client/ctl/eval/dataset.h"
#include "client/ctl/tensors/npy.h"
#include "client/ctl/tensors/tensor.h"

namespace kvtier::ctl::eval {

// K and V of one layer as an engine had them: [token][kv head][dim], or [token][dim] for one kv
// head; queries [query][query head][dim] (or [query][dim]), query head h reads kv head
// h / (query heads / kv heads). K after RoPE, as it is cached.
struct Dump {
  Tensor k;
  Tensor v;
  std::optional<Tensor> q;
};

// Each from a .npy file; `q_path` may be empty. Errors: those of ReadNpy.
absl::StatusOr<Dump> OpenNpyDump(const std::string& k_path, const std::string& v_path,
                                 const std::string& q_path, const NpyOptions& options = {});
// `names` are the tensors K, V and, if there are queries, Q, with commas between. Empty: "k", "v"
// and, if the file has it, "q". Errors: INVALID_ARGUMENT if `names` is not two or three names;
// NOT_FOUND if a tensor is not there; those of SafetensorsFile.
absl::StatusOr<Dump> OpenSafetensorsDump(const std::string& path, const std::string& names);

// Copies the dump into memory, in FP64: of each query head the last `query_count` queries, which
// see all or nearly all of the tokens. Without queries as many synthetic ones per kv head stand in
// (MakeQueries, seeded with the kv head). Errors, each naming the tensor: INVALID_ARGUMENT for
// shapes that do not fit together, fewer tokens than kv heads, no element, FP8 (its scale is not in
// the file), a value that is not finite in BF16, or, without queries, keys that are all the same;
// those of ToFloats.
absl::StatusOr<Layer> ReadDump(const Dump& dump, uint32_t query_count);

}  // namespace kvtier::ctl::eval
