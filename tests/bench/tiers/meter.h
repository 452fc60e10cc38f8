// SPDX-License-Identifier: Apache-2.0
//
// What this process has used so far; differences of two calls measure what lies between them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace kvtier::bench {

double WallSeconds();
// User and system time of all threads.
double CpuSeconds();
// Bytes this process has caused to be written to storage, from /proc/self/io: O_DIRECT and page
// cache alike, without the journal of the file system.
uint64_t WrittenBytes();
// Bytes allocated with malloc and not freed, in all arenas, and those of HugeChunks.
uint64_t HeapBytes();

// Requires: not empty.
double Median(std::vector<double> values);
// The value that `share` (0.99) of the values do not exceed. Requires: not empty.
double Percentile(std::vector<double> values, double share);

// "AMD EPYC 9005, 2 cores, ext4" for what runs this and what `dir` lies on.
std::string MachineName(const std::string& dir);

// Aborts with the error; a benchmark has nothing better to do with one.
template <typename StatusLike>
void MustBeOk(const StatusLike& status);
[[noreturn]] void Die(const std::string& message);

template <typename StatusLike>
void MustBeOk(const StatusLike& status) {
  if (!status.ok()) Die(status.ToString());
}

}  // namespace kvtier::bench
