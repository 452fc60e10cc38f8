// SPDX-License-Identifier: Apache-2.0
//
// Messages of Write, as bytes in slices, through our own parser and through protobuf's: of what
// that takes, ours must find the same. The input: how the message is cut, then its bytes.
#include <array>
#include <string>
#include <vector>

#include "kvtier/v1/context_store.pb.h"
#include "proto/base/check.h"
#include "proto/rpc/chunk_message.h"
#include "tests/fuzz/fuzz_input.h"

namespace kvtier {
namespace {

grpc::ByteBuffer Cut(const std::string& bytes, std::array<size_t, 2> cuts) {
  std::vector<grpc::Slice> slices;
  size_t begin = 0;
  for (const size_t cut : {cuts[0], cuts[0] + cuts[1], bytes.size()}) {
    const size_t end = std::min(std::max(cut, begin), bytes.size());
    slices.emplace_back(bytes.data() + begin, end - begin);
    begin = end;
  }
  return {slices.data(), slices.size()};
}

void Run(fuzz::FuzzInput input) {
  const std::array<size_t, 2> cuts = {input.Byte(), input.Byte()};
  const std::string bytes = fuzz::TextOf(input.Rest());
  v1::WriteRequest expected;
  const bool is_message = expected.ParseFromString(bytes);

  grpc::ByteBuffer message = Cut(bytes, cuts);
  v1::WriteHeader header;
  const auto parsed = ParseChunkMessage(&message, &header);
  KVT_CHECK(parsed.ok() || !is_message);
  // Fields that are passed over may have longer tags than protobuf takes.
  if (!is_message) return;
  KVT_CHECK(parsed->has_header == expected.has_header());
  KVT_CHECK(header.SerializeAsString() == expected.header().SerializeAsString());
  std::string chunk;
  for (const auto part : parsed->parts) {
    chunk.append(reinterpret_cast<const char*>(part.data()), part.size());
  }
  KVT_CHECK(chunk == expected.chunk() && parsed->chunk_bytes == chunk.size());
}

}  // namespace
}  // namespace kvtier

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size_bytes) {
  kvtier::Run({data, size_bytes});
  return 0;
}
