// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <utility>

#include "tests/bench/tiers/meter.h"

namespace kvtier::bench {

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
