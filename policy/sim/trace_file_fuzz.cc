// SPDX-License-Identifier: Apache-2.0
//
// Workloads as files. The first byte picks text or xz data; the rest is the file. A trace that is
// accepted keeps the rules that replays rely on.
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "policy/sim/trace.h"
#include "policy/sim/trace_file.h"
#include "proto/base/check.h"
#include "tests/fuzz/fuzz_input.h"

namespace kvtier::sim {
namespace {

void CheckTrace(const Trace& trace) {
  uint64_t last_ms = 0;
  KVT_CHECK(trace.block_tokens > 0);
  for (const TraceRequest& request : trace.requests) {
    KVT_CHECK(request.arrival_ms >= last_ms && request.context_idx < trace.contexts.size());
    last_ms = request.arrival_ms;
    BlockRef parent = kNoBlock;
    for (size_t i = 0; i < request.chain.size(); ++i) {
      const BlockRef block = request.chain[i];
      KVT_CHECK(block < trace.blocks.size());
      KVT_CHECK(trace.blocks[block].parent == parent && trace.blocks[block].depth == i);
      (void)trace.TokensOfBlock(request, i);
      parent = block;
    }
  }
}

void CheckSchedule(const Trace& trace) {
  uint64_t last_ms = 0;
  size_t request_count = 0;
  for (const TraceEvent& event : ScheduleOf(trace, {})) {
    KVT_CHECK(event.at_ms >= last_ms && event.context_idx < trace.contexts.size());
    last_ms = event.at_ms;
    if (event.kind == TraceEventKind::kRequest) ++request_count;
  }
  KVT_CHECK(request_count == trace.requests.size());
}

}  // namespace
}  // namespace kvtier::sim

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size_bytes) {
  namespace sim = kvtier::sim;
  kvtier::fuzz::FuzzInput input(data, size_bytes);
  const bool is_packed = input.Byte() % 8 == 7;
  const std::string bytes = kvtier::fuzz::TextOf(input.Rest());
  if (is_packed) {
    static const std::string path = std::filesystem::temp_directory_path() /
                                    ("kvtier-fuzz-" + std::to_string(getpid()) + ".xz");
    std::ofstream(path, std::ios::binary) << bytes;
    const auto trace = sim::ReadTraceFile(path);
    unlink(path.c_str());
    if (trace.ok()) sim::CheckTrace(*trace);
    return 0;
  }
  const auto trace = sim::ParseTrace(bytes, "input");
  if (!trace.ok()) return 0;
  sim::CheckTrace(*trace);
  sim::CheckSchedule(*trace);
  return 0;
}
