// SPDX-License-Identifier: Apache-2.0
//
// The messages of the calls Write and Read, which carry a chunk of payloads, as bytes of gRPC.
// Protobuf would copy a chunk into a string on its way in and out of a message; these functions
// leave it where it is. On the wire they are what context_store.proto says: field 1 `header`, a
// message, and field 2 `chunk`, bytes; others are passed over.
#pragma once

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/proto_buffer_reader.h>
#include <grpcpp/support/slice.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/statusor.h"

namespace kvtier {

// What ParseChunkMessage found. Points into the message.
struct ChunkMessage {
  bool has_header = false;
  // The parts of the chunk, in order.
  std::vector<std::span<const std::byte>> parts;
  uint64_t chunk_bytes = 0;

  // Owns what the parts point into, together with the message.
  std::unique_ptr<grpc::ProtoBufferReader> reader;
};

// Merges the header into `header`. `message` lives as long as the result is used. As in protobuf,
// the last chunk counts. Errors: INVALID_ARGUMENT (not such a message).
absl::StatusOr<ChunkMessage> ParseChunkMessage(grpc::ByteBuffer* message,
                                               google::protobuf::MessageLite* header);

// `header` may be null. Pure, and no copy of the chunk is made.
grpc::ByteBuffer MakeChunkMessage(const google::protobuf::MessageLite* header, grpc::Slice chunk);

// Memory of `bytes` to be filled and sent; the slice owns it.
struct ChunkBuffer {
  explicit ChunkBuffer(size_t bytes);

  grpc::Slice slice;
  std::span<std::byte> bytes;
};

// A whole message. Errors: INVALID_ARGUMENT (not such a message).
absl::Status ParseMessage(grpc::ByteBuffer* bytes, google::protobuf::MessageLite* message);
grpc::ByteBuffer SerializeMessage(const google::protobuf::MessageLite& message);

}  // namespace kvtier
