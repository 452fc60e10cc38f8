// SPDX-License-Identifier: Apache-2.0
#include "tiers/conformance_test.h"
#include "tiers/nvme/nvme_tier.h"

namespace kvtier {
namespace {

TierCase NvmeCase(const std::string& name, NvmeIoEngine io_engine, uint64_t attempt_bytes_max) {
  return {.name = name,
          .create = [=](const std::string& folder) -> std::unique_ptr<Tier> {
            auto tier = NvmeTier::Create({.dir = folder,
                                          .capacity_bytes = 32 << 20,
                                          .segment_bytes = 4 << 20,
                                          .io_engine = io_engine,
                                          .attempt_bytes_max = attempt_bytes_max});
            if (!tier.ok()) {
              ADD_FAILURE() << tier.status();
              return nullptr;
            }
            return std::move(tier).value();
          },
          .checks_identity = true,
          .is_mapped = false};
}

// Pages at a time: every transfer of more than a header is short and has to be continued.
INSTANTIATE_TEST_SUITE_P(
    Nvme, TierConformanceTest,
    testing::Values(NvmeCase("IoUring", NvmeIoEngine::kIoUring, 0),
                    NvmeCase("Pread", NvmeIoEngine::kPread, 0),
                    NvmeCase("IoUringShortTransfers", NvmeIoEngine::kIoUring, 64 << 10),
                    NvmeCase("PreadShortTransfers", NvmeIoEngine::kPread, 64 << 10)),
    CaseName);

}  // namespace
}  // namespace kvtier
