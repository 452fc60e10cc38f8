// SPDX-License-Identifier: Apache-2.0
#include "client/ctl/eval/eval_format.h"

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "absl/strings/str_format.h"
#include "client/ctl/svg_plot.h"
#include "client/ctl/table.h"

namespace kvtier::ctl::eval {
namespace {

// JSON has no infinity; nlohmann writes null, which says the same here.
Json ErrorsJson(const Errors& errors) {
  return {{"bytes_per_value", errors.bytes_per_value},
          {"k_error", errors.k},
          {"v_error", errors.v},
          {"score_error", errors.scores},
          {"output_error", errors.output},
          {"k_only_output_error", errors.k_only_output},
          {"v_only_output_error", errors.v_only_output},
          {"kernel_error", errors.kernel.has_value() ? Json(*errors.kernel) : Json(nullptr)}};
}

std::string ErrorText(double error) { return absl::StrFormat("%.4f", error); }

std::string Heading(const DatasetReport& report) {
  std::string text = absl::StrFormat("%s: %d tokens, head_dim %d, %d queries", report.name,
                                     report.token_count, report.head_dim, report.query_count);
  if (report.synthetic) return text + absl::StrFormat(", mean of %d seeds\n", report.seed_count);
  return text + absl::StrFormat("%s a kv head, mean of %d kv heads\n",
                                report.synthetic_queries ? " (synthetic)" : "",
                                report.kv_head_count);
}

std::string TableOf(const DatasetReport& report) {
  TextTable table({"METHOD", "B/VALUE>", "K>", "V>", "SCORES>", "OUTPUT>", "K ONLY>", "V ONLY>",
                   "KERNEL>", "WHAT"});
  for (const MethodResult& result : report.results) {
    const std::string name(result.method.name);
    if (!result.skipped.empty()) {
      table.Add({name, "-", "-", "-", "-", "-", "-", "-", "-", result.skipped});
      continue;
    }
    const Errors& errors = result.errors;
    table.Add({name, absl::StrFormat("%.4f", errors.bytes_per_value), ErrorText(errors.k),
               ErrorText(errors.v), ErrorText(errors.scores), ErrorText(errors.output),
               ErrorText(errors.k_only_output), ErrorText(errors.v_only_output),
               errors.kernel.has_value() ? absl::StrFormat("%.1e", *errors.kernel) : "-",
               std::string(result.method.summary)});
  }
  return table.Print();
}

BarChart ChartOf(const std::vector<DatasetReport>& reports, const std::string& what,
                 double Errors::* error) {
  BarChart chart{.title = what, .y_label = "relative error (log)", .log_y = true};
  for (const DatasetReport& report : reports) {
    BarChart::Series series{.name = report.name};
    for (const MethodResult& result : report.results) {
      if (&report == &reports.front()) chart.groups.emplace_back(result.method.name);
      series.values.push_back(result.skipped.empty() ? result.errors.*error
                                                     : std::numeric_limits<double>::quiet_NaN());
    }
    chart.series.push_back(std::move(series));
  }
  return chart;
}

Json RowsJson(const Matrix& matrix) {
  Json rows = Json::array();
  for (size_t i = 0; i < matrix.rows(); ++i) {
    Json row = Json::array();
    for (const double value : matrix.Row(i)) row.push_back(value);
    rows.push_back(row);
  }
  return rows;
}

Json SideJson(const ExampleSide& side) {
  return {{"scores", side.scores}, {"max_error", side.max_error}, {"k_error", side.k_error}};
}

std::vector<std::string> SideCells(const std::string& name, const std::vector<double>& scores) {
  std::vector<std::string> cells = {name};
  for (const double score : scores) cells.push_back(absl::StrFormat("%.3f", score));
  return cells;
}

std::vector<std::string> SideRow(const std::string& name, const ExampleSide& side) {
  std::vector<std::string> cells = SideCells(name, side.scores);
  cells.push_back(absl::StrFormat("%.3f", side.max_error));
  cells.push_back(absl::StrFormat("%.3f %%", 100 * side.k_error));
  return cells;
}

}  // namespace

Json EvalJson(const std::vector<DatasetReport>& reports) {
  Json datasets = Json::array();
  for (const DatasetReport& report : reports) {
    Json methods = Json::array();
    for (const MethodResult& result : report.results) {
      Json method = {{"method", std::string(result.method.name)}};
      if (result.skipped.empty()) {
        method.update(ErrorsJson(result.errors));
      } else {
        method["skipped"] = result.skipped;
      }
      methods.push_back(method);
    }
    datasets.push_back({{"dataset", report.name},
                        {"synthetic", report.synthetic},
                        {"synthetic_queries", report.synthetic_queries},
                        {"token_count", report.token_count},
                        {"head_dim", report.head_dim},
                        {"kv_head_count", report.kv_head_count},
                        {"query_count", report.query_count},
                        {"seed_count", report.seed_count},
                        {"methods", methods}});
  }
  return {{"datasets", datasets}};
}

std::string EvalText(const std::vector<DatasetReport>& reports) {
  std::string text;
  for (const DatasetReport& report : reports) {
    if (!text.empty()) text += "\n";
    text += Heading(report) + TableOf(report);
  }
  return text;
}

std::string EvalPlot(const std::vector<DatasetReport>& reports) {
  const Chart charts[] = {ChartOf(reports, "Attention scores", &Errors::scores),
                          ChartOf(reports, "Attention output, K and V quantized", &Errors::output)};
  return SvgOf(charts);
}

Json ExampleJson(const ExampleResult& example) {
  return {{"k", RowsJson(example.k)},
          {"q", RowsJson(example.q)},
          {"exact_scores", example.exact_scores},
          {"per_token", SideJson(example.per_token)},
          {"per_channel", SideJson(example.per_channel)}};
}

std::string ExampleText(const ExampleResult& example) {
  std::string text =
      "K of 4 tokens, channel 3 an outlier, and one query; 2 bits, min and max exact\n";
  for (size_t t = 0; t < example.k.rows(); ++t) {
    text += absl::StrFormat("  k[%d]", t);
    for (const double value : example.k.Row(t)) text += absl::StrFormat(" %5.1f", value);
    text += "\n";
  }
  text += "  q   ";
  for (const double value : example.q.Row(0)) text += absl::StrFormat(" %5.1f", value);
  TextTable table({"SCORES", "0>", "1>", "2>", "3>", "MAX ERROR>", "K ERROR>"});
  std::vector<std::string> exact = SideCells("exact", example.exact_scores);
  exact.insert(exact.end(), {"", ""});
  table.Add(exact);
  table.Add(SideRow("K per token", example.per_token));
  table.Add(SideRow("K per channel", example.per_channel));
  return text + "\n\n" + table.Print();
}

}  // namespace kvtier::ctl::eval
