// SPDX-License-Identifier: Apache-2.0
#include "tests/bench/tiers/report.h"

#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>

namespace kvtier::bench {
namespace {

bool Reaches(const Row& row, double limit) {
  return row.higher_is_better ? row.value >= limit : row.value <= limit;
}

std::string LimitText(const Row& row, const std::optional<double>& limit) {
  if (!limit) return "-";
  char text[40];
  std::snprintf(text, sizeof(text), "%s %g", row.higher_is_better ? ">=" : "<=", *limit);
  return text;
}

std::string ValueText(const Row& row) {
  char text[48];
  std::snprintf(text, sizeof(text), row.unit == "B" ? "%.0f%s%s" : "%.3f%s%s", row.value,
                row.unit.empty() || row.unit == "x" ? "" : " ", row.unit.c_str());
  return text;
}

}  // namespace

std::string Verdict(const Row& row) {
  if (!row.must) return "";
  if (row.goal && Reaches(row, *row.goal)) return "goal";
  return Reaches(row, *row.must) ? "must" : "MISSED";
}

void PrintTable(const std::vector<Row>& rows) {
  std::printf("| what | must | goal | measured | | figures |\n|---|---|---|---|---|---|\n");
  for (const Row& row : rows) {
    std::printf("| %s | %s | %s | %s | %s | %s |\n", row.name.c_str(),
                LimitText(row, row.must).c_str(), LimitText(row, row.goal).c_str(),
                ValueText(row).c_str(), Verdict(row).c_str(), row.note.c_str());
  }
}

void PrintJson(const std::vector<Row>& rows, const RunInfo& info) {
  nlohmann::ordered_json out;
  out["machine"] = info.machine;
  out["date"] = info.date;
  out["command"] = info.command;
  for (const Row& row : rows) {
    nlohmann::ordered_json item;
    item["name"] = row.name;
    item["value"] = row.value;
    item["unit"] = row.unit;
    if (row.must) item["must"] = *row.must;
    if (row.goal) item["goal"] = *row.goal;
    item["verdict"] = Verdict(row);
    item["is_ratio"] = row.is_ratio;
    item["note"] = row.note;
    out["rows"].push_back(std::move(item));
  }
  std::printf("%s\n", out.dump(2).c_str());
}

int CountRegressions(const std::vector<Row>& rows, const std::string& recorded_path,
                     double tolerance) {
  std::ifstream file(recorded_path);
  const auto recorded = nlohmann::json::parse(file, nullptr, /*allow_exceptions=*/false);
  if (!recorded.is_object() || !recorded.contains("rows") || !recorded["rows"].is_array()) {
    return -1;
  }
  int count = 0;
  for (const Row& row : rows) {
    if (!row.is_ratio) continue;
    for (const auto& item : recorded["rows"]) {
      if (!item.is_object() || item.value("name", std::string()) != row.name) continue;
      const double before = item.value("value", 0.0);
      const bool is_worse = row.higher_is_better ? row.value < before * (1 - tolerance)
                                                 : row.value > before * (1 + tolerance);
      if (!is_worse) continue;
      ++count;
      std::fprintf(stderr, "regression: %s: %.3f, recorded %.3f\n", row.name.c_str(), row.value,
                   before);
    }
  }
  return count;
}

}  // namespace kvtier::bench
