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
  // The daemon to measure.
  std::string kvtierd;
  int round_count = 11;
  // Calls of each kind in a round.
  int calls_per_round = 200;
  // Blocks of the chain that is looked up and acquired: 128 K tokens, 64 a block.
  uint32_t chain_block_count = 2048;
  // Payload bytes of one Write or Read.
  uint64_t stream_bytes = 64ULL << 20;
  // Blocks of a prefill chunk that is put at once.
  uint32_t put_block_count = 8;
  uint32_t session_count = 64;
  // Lookups of a round, with and without the others at work.
  int paced_calls_per_round = 400;
};

// Lookup and Acquire over an empty call on the same socket, and the bytes that they copied.
void MeasureCalls(const Settings& settings, std::vector<Row>* rows);
// Seal, reserve and commit over the seal kernel alone.
void MeasurePut(const Settings& settings, std::vector<Row>* rows);
// Write and Read over a stream of the same messages to a server that does nothing.
void MeasureStreams(const Settings& settings, std::vector<Row>* rows);
// Polling a completion queue, and what a call through it costs.
void MeasureQueue(const Settings& settings, std::vector<Row>* rows);
// Lookup with many sessions at work over Lookup alone.
void MeasureSessions(const Settings& settings, std::vector<Row>* rows);

}  // namespace kvtier::bench
