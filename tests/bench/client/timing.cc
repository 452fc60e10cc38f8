// SPDX-License-Identifier: Apache-2.0
#include "tests/bench/client/timing.h"

#include <algorithm>
#include <cmath>

namespace kvtier::bench {

double Percentile(std::vector<double> values, double share) {
  const auto rank = static_cast<size_t>(std::ceil(share * static_cast<double>(values.size())));
  const auto at = values.begin() + static_cast<std::ptrdiff_t>(std::max<size_t>(rank, 1) - 1);
  std::nth_element(values.begin(), at, values.end());
  return *at;
}

}  // namespace kvtier::bench
