// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <vector>

#include "tests/bench/tiers/meter.h"

namespace kvtier::bench {

// The value that `share` (0.99) of the values do not exceed. Requires: not empty.
double Percentile(std::vector<double> values, double share);

// Wall seconds of one call of `act`.
template <typename Act>
double Seconds(Act&& act) {
  const double begin = WallSeconds();
  act();
  return WallSeconds() - begin;
}

// The value of a StatusOr; ends the program with its error.
template <typename StatusOr>
auto ValueOf(StatusOr&& result) {
  MustBeOk(result.status());
  return std::forward<StatusOr>(result).value();
}

}  // namespace kvtier::bench
