// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace kvtier::ctl {

// Rows of text in aligned columns. Columns whose header ends in ">" are right-aligned (the mark is
// not printed).
class TextTable {
 public:
  explicit TextTable(std::vector<std::string> headers);
  // As many cells as there are headers.
  void Add(std::vector<std::string> cells);
  // Two spaces between columns, none at line ends, each line ended.
  std::string Print() const;

 private:
  std::vector<std::vector<std::string>> rows_;  // the first one holds the headers
  std::vector<bool> right_;
};

// 1536 -> "1.5 KiB"; below 1024, "17 B".
std::string HumanBytes(uint64_t bytes);
// 90061000 -> "1d 1h", two units at most; "0s" below one second.
std::string HumanDuration(uint64_t duration_ms);
// 0.0345 -> "3.45 %".
std::string HumanShare(double share);
// 1234567 -> "1,234,567".
std::string HumanCount(uint64_t count);

}  // namespace kvtier::ctl
