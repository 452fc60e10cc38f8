// SPDX-License-Identifier: Apache-2.0
#include "client/ctl/table.h"

#include <algorithm>
#include <array>
#include <utility>

#include "absl/strings/str_format.h"
#include "proto/base/check.h"

namespace kvtier::ctl {

TextTable::TextTable(std::vector<std::string> headers) {
  for (std::string& header : headers) {
    right_.push_back(header.ends_with('>'));
    if (right_.back()) header.pop_back();
  }
  rows_.push_back(std::move(headers));
}

void TextTable::Add(std::vector<std::string> cells) {
  KVT_CHECK(cells.size() == right_.size());
  rows_.push_back(std::move(cells));
}

std::string TextTable::Print() const {
  std::vector<size_t> widths(right_.size(), 0);
  for (const auto& row : rows_) {
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string text;
  for (const auto& row : rows_) {
    std::string line;
    for (size_t i = 0; i < row.size(); ++i) {
      const std::string padding(widths[i] - row[i].size(), ' ');
      if (i > 0) line += "  ";
      if (right_[i]) line += padding;
      line += row[i];
      if (!right_[i]) line += padding;
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + "\n";
  }
  return text;
}

std::string HumanBytes(uint64_t bytes) {
  constexpr std::array<const char*, 5> kUnits = {"KiB", "MiB", "GiB", "TiB", "PiB"};
  if (bytes < 1024) return absl::StrFormat("%d B", bytes);
  double value = static_cast<double>(bytes) / 1024;
  size_t unit = 0;
  while (value >= 1024 && unit + 1 < kUnits.size()) {
    value /= 1024;
    ++unit;
  }
  return absl::StrFormat("%.*f %s", value < 100 ? 1 : 0, value, kUnits[unit]);
}

std::string HumanDuration(uint64_t duration_ms) {
  const uint64_t seconds = duration_ms / 1000;
  constexpr std::array<std::pair<uint64_t, char>, 4> kUnits = {
      {{86'400, 'd'}, {3'600, 'h'}, {60, 'm'}, {1, 's'}}};
  for (size_t i = 0; i + 1 < kUnits.size(); ++i) {
    if (seconds < kUnits[i].first) continue;
    return absl::StrFormat("%d%c %d%c", seconds / kUnits[i].first, kUnits[i].second,
                           seconds % kUnits[i].first / kUnits[i + 1].first, kUnits[i + 1].second);
  }
  return absl::StrFormat("%ds", seconds);
}

std::string HumanShare(double share) { return absl::StrFormat("%.2f %%", 100 * share); }

std::string HumanCount(uint64_t count) {
  std::string text = absl::StrFormat("%d", count);
  for (size_t at = text.size(); at > 3; at -= 3) text.insert(at - 3, 1, ',');
  return text;
}

}  // namespace kvtier::ctl
