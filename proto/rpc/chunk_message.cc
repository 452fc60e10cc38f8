// SPDX-License-Identifier: Apache-2.0
#include "proto/rpc/chunk_message.h"

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/message_lite.h>
#include <google/protobuf/wire_format_lite.h>

#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include "proto/base/status_util.h"

namespace kvtier {
namespace {

using google::protobuf::io::CodedInputStream;
using google::protobuf::io::CodedOutputStream;
using WireFormat = google::protobuf::internal::WireFormatLite;

constexpr uint32_t kHeaderTag = WireFormat::MakeTag(1, WireFormat::WIRETYPE_LENGTH_DELIMITED);
constexpr uint32_t kChunkTag = WireFormat::MakeTag(2, WireFormat::WIRETYPE_LENGTH_DELIMITED);
// Of a tag and a length.
constexpr size_t kPrefixBytesMax = 16;

bool ParseHeader(CodedInputStream& input, google::protobuf::MessageLite* header) {
  uint32_t bytes = 0;
  if (!input.ReadVarint32(&bytes)) return false;
  const CodedInputStream::Limit limit = input.PushLimit(static_cast<int>(bytes));
  if (!header->MergePartialFromCodedStream(&input) || !input.ConsumedEntireMessage()) return false;
  // A message that ends early leaves some of its limit.
  if (input.BytesUntilLimit() != 0) return false;
  input.PopLimit(limit);
  return true;
}

bool ParseChunk(CodedInputStream& input, ChunkMessage* message) {
  uint32_t bytes = 0;
  if (!input.ReadVarint32(&bytes)) return false;
  message->parts.clear();
  message->chunk_bytes = bytes;
  for (size_t rest = bytes; rest > 0;) {
    const void* data = nullptr;
    int size = 0;
    if (!input.GetDirectBufferPointer(&data, &size) || size <= 0) return false;
    const size_t part = std::min(rest, static_cast<size_t>(size));
    message->parts.emplace_back(static_cast<const std::byte*>(data), part);
    if (!input.Skip(static_cast<int>(part))) return false;
    rest -= part;
  }
  return true;
}

bool ParseFields(CodedInputStream& input, google::protobuf::MessageLite* header,
                 ChunkMessage* message) {
  while (const uint32_t tag = input.ReadTag()) {
    bool parsed = false;
    if (tag == kHeaderTag) {
      message->has_header = true;
      parsed = ParseHeader(input, header);
    } else if (tag == kChunkTag) {
      parsed = ParseChunk(input, message);
    } else {
      parsed = WireFormat::SkipField(&input, tag);
    }
    if (!parsed) return false;
  }
  return input.ConsumedEntireMessage();
}

void AppendPrefix(uint32_t tag, size_t bytes, std::string* to) {
  std::array<uint8_t, kPrefixBytesMax> prefix;
  uint8_t* end = CodedOutputStream::WriteTagToArray(tag, prefix.data());
  end = CodedOutputStream::WriteVarint64ToArray(bytes, end);
  to->append(prefix.data(), end);
}

}  // namespace

absl::StatusOr<ChunkMessage> ParseChunkMessage(grpc::ByteBuffer* message,
                                               google::protobuf::MessageLite* header) {
  ChunkMessage parsed;
  parsed.reader = std::make_unique<grpc::ProtoBufferReader>(message);
  CodedInputStream input(parsed.reader.get());
  if (!parsed.reader->status().ok() || !ParseFields(input, header, &parsed)) {
    return Invalid("the message is malformed");
  }
  return parsed;
}

grpc::ByteBuffer MakeChunkMessage(const google::protobuf::MessageLite* header, grpc::Slice chunk) {
  std::string before;
  if (header != nullptr) {
    const std::string bytes = header->SerializeAsString();
    AppendPrefix(kHeaderTag, bytes.size(), &before);
    before += bytes;
  }
  AppendPrefix(kChunkTag, chunk.size(), &before);
  const std::array<grpc::Slice, 2> slices = {grpc::Slice(before), std::move(chunk)};
  return {slices.data(), slices.size()};
}

ChunkBuffer::ChunkBuffer(size_t size) : slice(size) {
  // Nobody else knows the slice yet.
  bytes = {reinterpret_cast<std::byte*>(const_cast<uint8_t*>(slice.begin())), size};
}

absl::Status ParseMessage(grpc::ByteBuffer* bytes, google::protobuf::MessageLite* message) {
  grpc::ProtoBufferReader reader(bytes);
  if (reader.status().ok() && message->ParseFromZeroCopyStream(&reader)) return absl::OkStatus();
  return Invalid("the message is malformed");
}

grpc::ByteBuffer SerializeMessage(const google::protobuf::MessageLite& message) {
  const grpc::Slice slice(message.SerializeAsString());
  return {&slice, 1};
}

}  // namespace kvtier
