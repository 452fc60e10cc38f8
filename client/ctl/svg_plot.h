// SPDX-License-Identifier: Apache-2.0
//
// Charts as one self-contained SVG file: no script, no style sheet, no font of its own. The same
// charts give the same bytes.
#pragma once

#include <span>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace kvtier::ctl {

// Groups of bars side by side: one bar of each series in each group.
struct BarChart {
  struct Series {
    std::string name;
    std::vector<double> values = {};  // one a group; NaN, and on a log axis 0 and below: no bar
  };
  std::string title = {};
  std::string y_label = {};
  bool log_y = false;
  std::vector<std::string> groups = {};
  std::vector<Series> series = {};
};

struct LineChart {
  struct Series {
    std::string name;
    std::vector<std::pair<double, double>> points =
        {};  // joined in this order; not finite: left out
  };
  std::string title = {};
  std::string x_label = {};
  std::string y_label = {};
  bool log_x = false;
  bool log_y = false;
  std::vector<Series> series = {};
};

using Chart = std::variant<BarChart, LineChart>;

// The charts one below the other, 960 wide. Bars on a linear axis stand on 0. Any text is allowed
// in names and labels. Requires: as many values as groups in each series.
std::string SvgOf(std::span<const Chart> charts);

}  // namespace kvtier::ctl
