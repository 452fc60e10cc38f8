// SPDX-License-Identifier: Apache-2.0
//
// Sequences of calls and events against the model of the store core (store_core_model.h): the input
// is the decisions. A failure of the model ends the process.
#include <gtest/gtest.h>

#include "daemon/core/store_core_model.h"
#include "tests/fuzz/fuzz_input.h"

namespace {

constexpr int kStepsMax = 200;

bool MakeFailuresFatal() {
  GTEST_FLAG_SET(break_on_failure, true);
  return true;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size_bytes) {
  using kvtier::core::StoreCoreModel;
  static const bool is_ready = MakeFailuresFatal();
  (void)is_ready;
  kvtier::fuzz::FuzzInput input(data, size_bytes);
  StoreCoreModel::Options options{.eviction = input.Below(2) == 0
                                                  ? kvtier::policy::EvictionKind::kHazard
                                                  : kvtier::policy::EvictionKind::kLru,
                                  .hbm_slots = 1 + input.Below(10),
                                  .host_slots = 1 + input.Below(8),
                                  .nvme_slots = input.Below(16)};
  options.has_tenants = options.hbm_slots >= 2 && input.Below(2) == 1;
  StoreCoreModel model(options, [&input](size_t bound) {
    // Beyond the end nothing fails any more.
    return input.empty() ? bound - 1 : input.Below(bound);
  });
  for (int step = 0; step < kStepsMax && !input.empty(); ++step) model.Step();
  model.Finish();
  return 0;
}
