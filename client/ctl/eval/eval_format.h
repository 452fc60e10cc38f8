// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "client/ctl/eval/evaluate.h"
#include "client/ctl/format.h"

namespace kvtier::ctl::eval {

// The methods measured on one dataset.
struct DatasetReport {
  std::string name;  // a family's name, or the dump's file
  bool synthetic = false;
  bool synthetic_queries = false;
  uint64_t token_count = 0;
  uint64_t head_dim = 0;
  uint64_t kv_head_count = 0;  // in a layer
  uint64_t query_count = 0;    // of one kv head: queries times the query heads that share it
  uint64_t seed_count = 0;     // of synthetic data: draws averaged; otherwise 1
  std::vector<MethodResult> results = {};
};

// The schema is stable, as in client/ctl/format.h, and documented in docs/accuracy.md.
Json EvalJson(const std::vector<DatasetReport>& reports);
std::string EvalText(const std::vector<DatasetReport>& reports);
// Bars of the errors of scores and of output: a group for each method, a bar for each dataset.
std::string EvalPlot(const std::vector<DatasetReport>& reports);

Json ExampleJson(const ExampleResult& example);
std::string ExampleText(const ExampleResult& example);

}  // namespace kvtier::ctl::eval
