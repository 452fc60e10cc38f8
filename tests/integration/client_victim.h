// SPDX-License-Identifier: Apache-2.0
//
// What client_victim and the test that kills it know of each other.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvtier::testing {

// The chain that others share with it.
inline constexpr uint32_t kSharedSeed = 1;
inline constexpr size_t kVictimChainBlocks = 4;
// It puts the chains of SEED and of the numbers that follow, so many.
inline constexpr uint32_t kVictimChains = 8;
inline constexpr const char* kVictimSteps[] = {"reserve", "seal",     "commit", "acquire",
                                               "decode",  "prefetch", "resume"};

}  // namespace kvtier::testing
