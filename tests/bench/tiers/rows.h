// SPDX-License-Identifier: Apache-2.0
//
// The parts of the table; each measures and appends its rows.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tests/bench/tiers/report.h"

namespace kvtier::bench {

struct Settings {
  // A folder of this run's own, on the file system to be measured.
  std::string dir;
  // Bytes read or written by one timed pass.
  uint64_t pass_bytes = 256ULL << 20;
  // Bytes that the random reads choose from.
  uint64_t data_bytes = 512ULL << 20;
  int round_count = 7;
  // Of the parts about indexes.
  uint64_t indexed_block_count = 1'000'000;
  uint64_t churn_segment_count = 64;
  // "auto", "io_uring" or "pread".
  std::string io_engine = "auto";
};

// Reads and durable writes of one block size against the raw disk, and their CPU time; with
// `has_limits`, the rows that have a must.
void MeasureSpeed(const Settings& settings, uint32_t block_bytes, bool has_limits,
                  std::vector<Row>* rows);
// The same payloads through RocksDB's blob files.
void MeasureBlobStore(const Settings& settings, uint32_t block_bytes, std::vector<Row>* rows);
// Copies between hbm on the cpu device and host.
void MeasureMemory(const Settings& settings, uint32_t block_bytes, std::vector<Row>* rows);
// The time of a read that somebody waits for while much is read ahead.
void MeasureOrder(const Settings& settings, std::vector<Row>* rows);
// Bytes written to the device for each byte of payload while segments are emptied.
void MeasureChurn(const Settings& settings, std::vector<Row>* rows);
// Time of finding the blocks of a chain where the store keeps them.
void MeasureLookup(const Settings& settings, std::vector<Row>* rows);
// Time from nothing to serving, and the memory of the indexes.
void MeasureStart(const Settings& settings, std::vector<Row>* rows);

}  // namespace kvtier::bench
