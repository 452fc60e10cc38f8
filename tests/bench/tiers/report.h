// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace kvtier::bench {

// One line of the table. Plain value.
struct Row {
  std::string name = {};
  double value = 0;
  // "", "x", "s/GB", "s", "ns", "B".
  std::string unit = {};
  // Missing: shown only.
  std::optional<double> must = {};
  std::optional<double> goal = {};
  bool higher_is_better = true;
  // A quotient of two things measured in turn, which --check compares; absolute times depend on
  // the machine.
  bool is_ratio = true;
  // The figures behind it.
  std::string note = {};
};

// "goal", "must", "MISSED", or "" without a must.
std::string Verdict(const Row& row);

void PrintTable(const std::vector<Row>& rows);

struct RunInfo {
  std::string machine;
  std::string date;
  std::string command;
};
void PrintJson(const std::vector<Row>& rows, const RunInfo& info);

// Compares the ratios with those of a file that --json wrote: one line on stderr for each that is
// worse by more than `tolerance` (0.2: a fifth) of the recorded one. Rows that only one side has
// are skipped. Returns how many were worse; -1: the file cannot be read.
int CountRegressions(const std::vector<Row>& rows, const std::string& recorded_path,
                     double tolerance);

}  // namespace kvtier::bench
