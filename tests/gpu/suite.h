// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_TESTS_GPU_SUITE_H_
#define KVTIER_TESTS_GPU_SUITE_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

// The smallest test framework that does: no dependency, one JSON at the end.

namespace kvtier::gpu {

struct Device {
  std::string name;
  int major = 0;  // Compute capability.
  int minor = 0;
  int multiprocessor_count = 0;
  int driver_version = 0;
  int runtime_version = 0;
};

struct Options {
  bool is_sanitized = false;  // Under compute-sanitizer: few and small cases, no benchmarks.
  bool has_benchmarks = true;
  std::string compute_sanitizer = "not run";  // What it said, for the JSON.
  // What failed before this run, in a run of its own; not empty: this one cannot pass.
  std::string earlier_failure = "";
};

// Collects what checks and benchmarks say. Single-thread.
class Suite {
 public:
  Suite(const Device& device, const Options& options) : device_(device), options_(options) {}

  const Device& device() const { return device_; }
  const Options& options() const { return options_; }

  // Begins a check; what follows belongs to it.
  void Begin(const std::string& name);
  // One case of the check; prints the first failures.
  bool Expect(bool is_true, const std::string& what);
  void AddCases(uint64_t count) { checks_.back().case_count += count; }

  // `must`: the least value that docs/kernels-cuda.md asks for, if it names one. Missing it is
  // reported, and is no failure: what is wrong and what is slow are told apart.
  void AddBenchmark(const std::string& name, double value, const std::string& unit,
                    const std::string& detail, std::optional<double> must = std::nullopt);

  bool ok() const;
  uint64_t missed_must_count() const;
  std::string ToJson() const;

 private:
  struct Check {
    std::string name;
    uint64_t case_count = 0;
    uint64_t failure_count = 0;
    std::string first_failure;
  };
  struct Benchmark {
    std::string name;
    double value = 0;
    std::string unit;
    std::string detail;
    std::optional<double> must;

    bool IsMet() const { return !must.has_value() || value >= *must; }
  };

  Device device_;
  Options options_;
  std::vector<Check> checks_;
  std::vector<Benchmark> benchmarks_;
};

// What main.cc runs, each in a file of its own.
void CheckPrimitives(Suite* suite);
void CheckEncoder(Suite* suite);
void CheckTransfers(Suite* suite);
void CheckDecode(Suite* suite);
void CheckMlaTransfers(Suite* suite);
void CheckMlaDecode(Suite* suite);
void BenchmarkTransfers(Suite* suite);
void BenchmarkDecode(Suite* suite);
void BenchmarkMla(Suite* suite);

}  // namespace kvtier::gpu

#endif  // KVTIER_TESTS_GPU_SUITE_H_
