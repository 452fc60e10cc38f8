// SPDX-License-Identifier: Apache-2.0
#include "tests/gpu/suite.h"

#include <algorithm>
#include <cstdio>
#include <ctime>

namespace kvtier::gpu {
namespace {

constexpr uint64_t kShownMax = 3;

std::string Quoted(const std::string& text) {
  std::string result = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      result += '\\';
      result += c;
    } else {
      result += c == '\n' || c == '\t' ? ' ' : c;
    }
  }
  return result + "\"";
}

std::string Number(double value) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.6g", value);
  return text;
}

std::string Now() {
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  gmtime_r(&now, &utc);
  char text[32];
  std::strftime(text, sizeof(text), "%Y-%m-%dT%H:%M:%SZ", &utc);
  return text;
}

std::string Version(int cuda_version) {
  return std::to_string(cuda_version / 1000) + "." + std::to_string(cuda_version % 1000 / 10);
}

}  // namespace

void Suite::Begin(const std::string& name) {
  std::printf("== %s\n", name.c_str());
  std::fflush(stdout);
  checks_.push_back({.name = name, .first_failure = ""});
}

bool Suite::Expect(bool is_true, const std::string& what) {
  Check& check = checks_.back();
  ++check.case_count;
  if (is_true) return true;
  if (check.failure_count++ < kShownMax) std::printf("FAILED: %s\n", what.c_str());
  if (check.first_failure.empty()) check.first_failure = what;
  return false;
}

void Suite::AddBenchmark(const std::string& name, double value, const std::string& unit,
                         const std::string& detail, std::optional<double> must) {
  const Benchmark& benchmark = benchmarks_.emplace_back(Benchmark{name, value, unit, detail, must});
  std::printf("%-40s %10.3f %s  %s", name.c_str(), value, unit.c_str(), detail.c_str());
  if (must.has_value()) {
    std::printf(", must %s: %s", Number(*must).c_str(), benchmark.IsMet() ? "met" : "MISSED");
  }
  std::printf("\n");
  std::fflush(stdout);
}

bool Suite::ok() const {
  return options_.earlier_failure.empty() &&
         std::all_of(checks_.begin(), checks_.end(),
                     [](const Check& check) { return check.failure_count == 0; });
}

uint64_t Suite::missed_must_count() const {
  return static_cast<uint64_t>(
      std::count_if(benchmarks_.begin(), benchmarks_.end(),
                    [](const Benchmark& benchmark) { return !benchmark.IsMet(); }));
}

std::string Suite::ToJson() const {
  std::string json =
      std::string("{\n  \"status\": ") + (ok() ? "\"passed\"" : "\"failed\"") +
      (options_.earlier_failure.empty() ? std::string()
                                        : ",\n  \"reason\": " + Quoted(options_.earlier_failure)) +
      ",\n  \"missed_musts\": " + std::to_string(missed_must_count()) +
      ",\n  \"card\": " + Quoted(device_.name) + ",\n  \"compute_capability\": \"" +
      std::to_string(device_.major) + "." + std::to_string(device_.minor) +
      "\",\n  \"driver\": " + Quoted(Version(device_.driver_version)) +
      ",\n  \"runtime\": " + Quoted(Version(device_.runtime_version)) +
      ",\n  \"date\": " + Quoted(Now()) +
      ",\n  \"compute_sanitizer\": " + Quoted(options_.compute_sanitizer) + ",\n  \"checks\": [";
  const char* separator = "\n";
  for (const Check& check : checks_) {
    json += separator;
    json += "    {\"name\": " + Quoted(check.name) +
            ", \"status\": " + (check.failure_count == 0 ? "\"passed\"" : "\"failed\"") +
            ", \"cases\": " + std::to_string(check.case_count) +
            ", \"failures\": " + std::to_string(check.failure_count) +
            ", \"first_failure\": " + Quoted(check.first_failure) + "}";
    separator = ",\n";
  }
  json += "\n  ],\n  \"benchmarks\": [";
  separator = "\n";
  for (const Benchmark& benchmark : benchmarks_) {
    json += separator;
    json += "    {\"name\": " + Quoted(benchmark.name) + ", \"value\": " + Number(benchmark.value) +
            ", \"unit\": " + Quoted(benchmark.unit) + ", \"detail\": " + Quoted(benchmark.detail);
    if (benchmark.must.has_value()) {
      json += ", \"must\": " + Number(*benchmark.must) +
              ", \"met\": " + (benchmark.IsMet() ? "true" : "false");
    }
    json += "}";
    separator = ",\n";
  }
  return json + "\n  ]\n}\n";
}

}  // namespace kvtier::gpu
