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
                         const std::string& detail) {
  std::printf("%-40s %10.3f %s  %s\n", name.c_str(), value, unit.c_str(), detail.c_str());
  std::fflush(stdout);
  benchmarks_.push_back({name, value, unit, detail});
}

bool Suite::ok() const {
  return std::all_of(checks_.begin(), checks_.end(),
                     [](const Check& check) { return check.failure_count == 0; });
}

std::string Suite::ToJson() const {
  std::string json = std::string("{\n  \"status\": ") + (ok() ? "\"passed\"" : "\"failed\"") +
                     ",\n  \"card\": " + Quoted(device_.name) + ",\n  \"compute_capability\": \"" +
                     std::to_string(device_.major) + "." + std::to_string(device_.minor) +
                     "\",\n  \"driver\": " + Quoted(Version(device_.driver_version)) +
                     ",\n  \"runtime\": " + Quoted(Version(device_.runtime_version)) +
                     ",\n  \"date\": " + Quoted(Now()) +
                     ",\n  \"compute_sanitizer\": " + Quoted(options_.compute_sanitizer) +
                     ",\n  \"checks\": [";
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
    char value[32];
    std::snprintf(value, sizeof(value), "%.6g", benchmark.value);
    json += separator;
    json += "    {\"name\": " + Quoted(benchmark.name) + ", \"value\": " + value +
            ", \"unit\": " + Quoted(benchmark.unit) + ", \"detail\": " + Quoted(benchmark.detail) +
            "}";
    separator = ",\n";
  }
  return json + "\n  ]\n}\n";
}

}  // namespace kvtier::gpu
