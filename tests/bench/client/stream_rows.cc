// SPDX-License-Identifier: Apache-2.0
#include <cstdio>
#include <cstring>
#include <string>

#include "client/src/channel.h"
#include "daemon/requests.h"
#include "tests/bench/client/bare_server.h"
#include "tests/bench/client/rig.h"
#include "tests/bench/client/rows.h"
#include "tests/bench/client/timing.h"

namespace kvtier::bench {
namespace {

constexpr uint32_t kBlockBytes = kChunkBytesMax;
constexpr uint32_t kDeadlineMs = 60'000;

void WriteBare(BareServer& server, size_t chunk_count) {
  grpc::ClientContext context;
  client::SetDeadline(context, kDeadlineMs);
  v1::WriteResponse response;
  v1::WriteRequest message;
  message.set_chunk(std::string(kChunkBytesMax, 'x'));
  const auto writer = server.stub().Write(&context, &response);
  for (size_t i = 0; i < chunk_count; ++i) {
    if (!writer->Write(message)) break;
  }
  writer->WritesDone();
  if (const grpc::Status status = writer->Finish(); !status.ok()) Die(status.error_message());
}

void ReadBare(BareServer& server, size_t chunk_count) {
  grpc::ClientContext context;
  client::SetDeadline(context, kDeadlineMs);
  v1::ReadRequest request;
  request.set_keys(std::string(chunk_count * Key::kBytes, 'k'));
  const auto reader = server.stub().Read(&context, request);
  v1::ReadResponse message;
  size_t bytes = 0;
  while (reader->Read(&message)) bytes += message.chunk().size();
  if (const grpc::Status status = reader->Finish(); !status.ok()) Die(status.error_message());
  if (bytes != chunk_count * kChunkBytesMax) Die("the bare server sent too little");
}

// One direction, round by round.
struct Passes {
  std::vector<double> ratios;
  std::vector<double> rates;
  std::vector<double> bare_rates;

  void Add(double bytes, double seconds, double bare_seconds) {
    ratios.push_back(bare_seconds / seconds);
    rates.push_back(bytes / seconds / 1e9);
    bare_rates.push_back(bytes / bare_seconds / 1e9);
  }
  Row ToRow(const std::string& name, bool has_limits) const {
    char note[64];
    std::snprintf(note, sizeof(note), "%.2f and %.2f GB/s", Median(rates), Median(bare_rates));
    return {.name = name + " by value, 1 MiB chunks: over a bare gRPC stream of them",
            .value = Median(ratios),
            .must = has_limits ? std::optional(0.8) : std::nullopt,
            .goal = has_limits ? std::optional(0.95) : std::nullopt,
            .note = note};
  }
};

}  // namespace

void MeasureStreams(const Settings& settings, std::vector<Row>* rows) {
  const size_t block_count = settings.stream_bytes / kBlockBytes;
  Rig rig({.kvtierd = settings.kvtierd,
           .memory_bytes = 4 * settings.stream_bytes,
           .segment_bytes = 16ULL << 20,
           .layout = RawLayout(kBlockBytes)});
  BareServer bare;
  std::vector<std::byte> payloads(settings.stream_bytes, std::byte{0x5A});
  Passes writes;
  Passes reads;
  Passes new_reads;
  std::vector<std::byte> memory(settings.stream_bytes);
  const auto bytes = static_cast<double>(settings.stream_bytes);
  for (int round = 0; round <= settings.round_count; ++round) {
    const std::vector<Key> keys =
        testing::MakeChain(rig.ns(), static_cast<uint32_t>(round), block_count);
    const double bare_write = Seconds([&] { WriteBare(bare, block_count); });
    const double write = Seconds([&] {
      for (const BlockStatus status :
           ValueOf(rig.client().Write(rig.ns(), std::nullopt, keys, payloads))) {
        if (status != BlockStatus::kOk) Die("a block was not taken");
      }
    });
    const double bare_read = Seconds([&] { ReadBare(bare, block_count); });
    const double read = Seconds([&] {
      if (ValueOf(rig.client().ReadInto(rig.ns(), keys, memory)) != block_count) Die("a miss");
    });
    const double new_read = Seconds([&] {
      if (ValueOf(rig.client().Read(rig.ns(), keys)).size() != payloads.size()) Die("a miss");
    });
    MustBeOk(rig.client().ReportBad(rig.ns(), keys));
    if (round == 0) continue;  // the first one warms up
    writes.Add(bytes, write, bare_write);
    reads.Add(bytes, read, bare_read);
    new_reads.Add(bytes, new_read, bare_read);
  }
  rows->push_back(writes.ToRow("Write", /*has_limits=*/true));
  rows->push_back(reads.ToRow("ReadInto", /*has_limits=*/true));
  rows->push_back(new_reads.ToRow("Read, a new vector each time,", /*has_limits=*/false));
}

}  // namespace kvtier::bench
