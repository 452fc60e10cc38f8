// SPDX-License-Identifier: Apache-2.0
#include "proto/rpc/chunk_message.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <iostream>
#include <random>
#include <string>

#include "kvtier/v1/context_store.pb.h"

namespace kvtier {
namespace {

uint64_t Seed() {
  const char* given = std::getenv("KVTIER_TEST_SEED");
  const uint64_t seed =
      given != nullptr ? std::strtoull(given, nullptr, 10) : std::random_device{}();
  std::cout << "KVTIER_TEST_SEED=" << seed << "\n";
  return seed;
}

std::string Joined(const ChunkMessage& message) {
  std::string chunk;
  for (const auto part : message.parts) {
    chunk.append(reinterpret_cast<const char*>(part.data()), part.size());
  }
  return chunk;
}

std::string BytesOf(const grpc::ByteBuffer& buffer) {
  std::vector<grpc::Slice> slices;
  EXPECT_TRUE(buffer.Dump(&slices).ok());
  std::string bytes;
  for (const grpc::Slice& slice : slices) {
    bytes.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  }
  return bytes;
}

// In slices, as a transport may cut them.
grpc::ByteBuffer Cut(const std::string& bytes, std::mt19937_64& random) {
  std::vector<grpc::Slice> slices;
  for (size_t at = 0; at < bytes.size();) {
    const size_t size = std::min<size_t>(bytes.size() - at, random() % 40);
    slices.emplace_back(bytes.data() + at, size);
    at += size;
  }
  return {slices.data(), slices.size()};
}

v1::WriteRequest RandomMessage(std::mt19937_64& random) {
  v1::WriteRequest message;
  if (random() % 2 == 0) {
    message.mutable_header()->set_session_id(random());
    message.mutable_header()->set_keys(std::string(random() % 200, 'k'));
  }
  std::string chunk(random() % 500, '\0');
  for (char& byte : chunk) byte = static_cast<char>(random());
  message.set_chunk(chunk);
  return message;
}

TEST(ChunkMessageTest, ReadsAndWritesWhatProtobufDoes) {
  std::mt19937_64 random(Seed());
  for (int round = 0; round < 2000; ++round) {
    const v1::WriteRequest message = RandomMessage(random);
    grpc::ByteBuffer buffer = Cut(message.SerializeAsString(), random);
    v1::WriteHeader header;
    const auto parsed = ParseChunkMessage(&buffer, &header);
    ASSERT_TRUE(parsed.ok()) << parsed.status();
    EXPECT_EQ(parsed->has_header, message.has_header());
    EXPECT_EQ(header.SerializeAsString(), message.header().SerializeAsString());
    EXPECT_EQ(parsed->chunk_bytes, message.chunk().size());
    EXPECT_EQ(Joined(*parsed), message.chunk());

    const grpc::ByteBuffer made = MakeChunkMessage(
        message.has_header() ? &message.header() : nullptr, grpc::Slice(message.chunk()));
    v1::WriteRequest back;
    ASSERT_TRUE(back.ParseFromString(BytesOf(made)));
    EXPECT_EQ(back.has_header(), message.has_header());
    EXPECT_EQ(back.header().SerializeAsString(), message.header().SerializeAsString());
    EXPECT_EQ(back.chunk(), message.chunk());
  }
}

// Whatever protobuf refuses is refused, whatever it takes is understood in the same way.
TEST(ChunkMessageTest, TakesDamagedMessagesAsProtobufDoes) {
  std::mt19937_64 random(Seed());
  int taken = 0;
  for (int round = 0; round < 20'000; ++round) {
    std::string bytes = RandomMessage(random).SerializeAsString();
    if (random() % 2 == 0) bytes += RandomMessage(random).SerializeAsString();
    for (uint64_t i = random() % 3; i > 0 && !bytes.empty(); --i) {
      bytes[random() % std::min<size_t>(bytes.size(), 24)] = static_cast<char>(random());
    }
    if (random() % 4 == 0) bytes.resize(random() % (bytes.size() + 1));
    grpc::ByteBuffer buffer = Cut(bytes, random);
    v1::WriteHeader header;
    const auto parsed = ParseChunkMessage(&buffer, &header);
    v1::WriteRequest message;
    ASSERT_EQ(parsed.ok(), message.ParseFromString(bytes));
    if (!parsed.ok()) continue;
    ++taken;
    EXPECT_EQ(parsed->has_header, message.has_header());
    EXPECT_EQ(header.SerializeAsString(), message.header().SerializeAsString());
    EXPECT_EQ(Joined(*parsed), message.chunk());
  }
  EXPECT_GT(taken, 1000);
}

TEST(ChunkMessageTest, AnEmptyMessageIsOne) {
  grpc::ByteBuffer buffer = SerializeMessage(v1::WriteRequest());
  v1::WriteHeader header;
  const auto parsed = ParseChunkMessage(&buffer, &header);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_FALSE(parsed->has_header);
  EXPECT_EQ(parsed->chunk_bytes, 0U);
}

TEST(ChunkMessageTest, ABufferIsSentFromWhereItWasFilled) {
  ChunkBuffer buffer(100'000);
  std::ranges::fill(buffer.bytes, std::byte{7});
  const void* const memory = buffer.bytes.data();
  const grpc::ByteBuffer made = MakeChunkMessage(nullptr, std::move(buffer.slice));
  std::vector<grpc::Slice> slices;
  ASSERT_TRUE(made.Dump(&slices).ok());
  EXPECT_EQ(slices.back().begin(), memory);
}

}  // namespace
}  // namespace kvtier
