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

// As protobuf's own parser has them. CodedInputStream also takes longer ones, and drops the bits
// that have no room.
constexpr int kTagBytesMax = 5;
constexpr int kSizeBytesMax = 5;
constexpr uint64_t kSizeMax = INT32_MAX - 16;
constexpr int kGroupDepthMax = 100;

// 0 at the end.
bool ReadTag(CodedInputStream& input, uint32_t* tag) {
  const int before = input.CurrentPosition();
  *tag = input.ReadTag();
  return input.CurrentPosition() - before <= kTagBytesMax;
}

bool ReadSize(CodedInputStream& input, int* bytes) {
  const int before = input.CurrentPosition();
  uint64_t read = 0;
  if (!input.ReadVarint64(&read) || read > kSizeMax) return false;
  *bytes = static_cast<int>(read);
  return input.CurrentPosition() - before <= kSizeBytesMax;
}

// A field that this version does not know. WireFormatLite::SkipField takes what protobuf's parser
// does not.
bool SkipField(CodedInputStream& input, uint32_t tag, int depth_left) {
  if (WireFormat::GetTagFieldNumber(tag) == 0) return false;
  switch (WireFormat::GetTagWireType(tag)) {
    case WireFormat::WIRETYPE_VARINT: {
      uint64_t value = 0;
      return input.ReadVarint64(&value);
    }
    case WireFormat::WIRETYPE_FIXED64:
      return input.Skip(8);
    case WireFormat::WIRETYPE_FIXED32:
      return input.Skip(4);
    case WireFormat::WIRETYPE_LENGTH_DELIMITED: {
      int bytes = 0;
      return ReadSize(input, &bytes) && input.Skip(bytes);
    }
    case WireFormat::WIRETYPE_START_GROUP: {
      const uint32_t end =
          WireFormat::MakeTag(WireFormat::GetTagFieldNumber(tag), WireFormat::WIRETYPE_END_GROUP);
      for (uint32_t inner = 0; depth_left > 0;) {
        if (!ReadTag(input, &inner) || inner == 0) return false;
        if (inner == end) return true;
        if (!SkipField(input, inner, depth_left - 1)) return false;
      }
      return false;
    }
    default:
      return false;
  }
}

bool ParseHeader(CodedInputStream& input, google::protobuf::MessageLite* header) {
  int bytes = 0;
  if (!ReadSize(input, &bytes)) return false;
  const CodedInputStream::Limit limit = input.PushLimit(bytes);
  if (!header->MergePartialFromCodedStream(&input) || !input.ConsumedEntireMessage()) return false;
  // A message that ends early leaves some of its limit.
  if (input.BytesUntilLimit() != 0) return false;
  input.PopLimit(limit);
  return true;
}

bool ParseChunk(CodedInputStream& input, ChunkMessage* message) {
  int bytes = 0;
  if (!ReadSize(input, &bytes)) return false;
  message->parts.clear();
  message->chunk_bytes = static_cast<uint64_t>(bytes);
  for (size_t rest = message->chunk_bytes; rest > 0;) {
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
  while (true) {
    uint32_t tag = 0;
    if (!ReadTag(input, &tag)) return false;
    if (tag == 0) return input.ConsumedEntireMessage();
    bool parsed = false;
    if (tag == kHeaderTag) {
      message->has_header = true;
      parsed = ParseHeader(input, header);
    } else if (tag == kChunkTag) {
      parsed = ParseChunk(input, message);
    } else {
      parsed = SkipField(input, tag, kGroupDepthMax);
    }
    if (!parsed) return false;
  }
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
