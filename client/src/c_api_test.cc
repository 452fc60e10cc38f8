// SPDX-License-Identifier: Apache-2.0
//
// The C functions against the fake daemon. The shared library is tested from another language:
// tests/integration/c_api_test.py.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <vector>

#include "client/src/client_fixture.h"
#include "kvtier/kvtier.h"

namespace kvtier::client {
namespace {

class CApiTest : public ClientFixture {
 protected:
  void SetUp() override {
    ClientFixture::SetUp();
    const std::string run_dir = run_dir_;
    const kvtier_options options = {.struct_bytes = sizeof(options),
                                    .run_dir = run_dir.c_str(),
                                    .client_name = "c",
                                    .control_timeout_ms = 0,
                                    .transfer_timeout_ms = 0,
                                    .reconnect_timeout_ms = 0};
    ASSERT_EQ(kvtier_connect(&options, &client_, &error_), KVTIER_OK) << error_.message;
    kvtier_layout layout{};
    layout.struct_bytes = sizeof(layout);
    layout.model = "fake";
    layout.layer_count = 1;
    layout.kv_head_count = 1;
    layout.head_dim = 64;
    layout.codec = KVTIER_CODEC_RAW;
    layout.raw_block_bytes = FakeDaemon::kBlockBytes;
    ASSERT_EQ(kvtier_register_layout(client_, &layout, nullptr, nullptr, &ns_, &error_), KVTIER_OK)
        << error_.message;
    ASSERT_EQ(ns_.block_bytes, FakeDaemon::kBlockBytes);
    for (uint32_t i = 0; i < keys_.size(); ++i) {
      ASSERT_EQ(
          kvtier_hash_block(&ns_, i == 0 ? nullptr : &keys_[i - 1], &i, 1, nullptr, 0, &keys_[i]),
          KVTIER_OK);
    }
  }
  void TearDown() override {
    kvtier_close(client_);
    ClientFixture::TearDown();
  }

  kvtier_client* client_ = nullptr;
  kvtier_error error_{};
  kvtier_namespace ns_{};
  std::array<kvtier_key, 3> keys_{};
};

TEST_F(CApiTest, KeysAreThoseOfTheCppLibrary) {
  Namespace ns;
  std::memcpy(ns.hash.bytes.data(), ns_.hash, sizeof(ns_.hash));
  const uint32_t zero = 0;
  const uint32_t one = 1;
  const Key first = HashBlock(ns.hash, std::nullopt, std::span(&zero, 1));
  const Key second = HashBlock(ns.hash, first, std::span(&one, 1));
  EXPECT_EQ(std::memcmp(first.bytes.data(), keys_[0].bytes, Key::kBytes), 0);
  EXPECT_EQ(std::memcmp(second.bytes.data(), keys_[1].bytes, Key::kBytes), 0);
}

TEST_F(CApiTest, PutsAndGetsInPlace) {
  kvtier_fill* fill = nullptr;
  ASSERT_EQ(
      kvtier_reserve(client_, &ns_, nullptr, keys_.data(), 2, KVTIER_TIER_HBM, &fill, &error_),
      KVTIER_OK)
      << error_.message;
  kvtier_block block;
  for (size_t i = 0; i < 2; ++i) {
    ASSERT_EQ(kvtier_fill_block(fill, i, &block), KVTIER_OK);
    ASSERT_EQ(block.status, KVTIER_BLOCK_OK);
    std::memset(block.bytes, static_cast<int>(i) + 5, ns_.block_bytes);
  }
  EXPECT_EQ(kvtier_fill_block(fill, 2, &block), KVTIER_OUT_OF_RANGE);
  std::array<uint8_t, 2> statuses{};
  ASSERT_EQ(kvtier_commit(client_, &ns_, fill, statuses.data(), &error_), KVTIER_OK);
  EXPECT_EQ(statuses, (std::array<uint8_t, 2>{KVTIER_BLOCK_OK, KVTIER_BLOCK_OK}));
  kvtier_fill_free(fill);

  std::array<uint8_t, 3> residency{};
  size_t found = 0;
  ASSERT_EQ(kvtier_lookup(client_, &ns_, keys_.data(), 3, residency.data(), &found, &error_),
            KVTIER_OK);
  EXPECT_EQ(found, 2U);
  EXPECT_EQ(residency[1], KVTIER_ON_HBM);

  kvtier_lease* lease = nullptr;
  ASSERT_EQ(kvtier_acquire(client_, &ns_, keys_.data(), 3, &lease, &error_), KVTIER_OK);
  EXPECT_EQ(kvtier_lease_ok_prefix(lease), 2U);
  ASSERT_EQ(kvtier_lease_block(lease, 1, &block), KVTIER_OK);
  EXPECT_EQ(static_cast<const uint8_t*>(block.bytes)[ns_.block_bytes - 1], 6);
  EXPECT_EQ(kvtier_lease_verify(client_, &ns_, lease, 1, &error_), KVTIER_OK);
  EXPECT_EQ(kvtier_lease_verify(client_, &ns_, lease, 3, &error_), KVTIER_OUT_OF_RANGE);
  ASSERT_EQ(kvtier_lease_block(lease, 2, &block), KVTIER_OK);
  EXPECT_EQ(block.status, KVTIER_BLOCK_MISS);
  EXPECT_EQ(block.bytes, nullptr);
  kvtier_lease_release(lease);
  EXPECT_EQ(kvtier_report_bad(client_, &ns_, keys_.data(), 1, &error_), KVTIER_OK);
}

TEST_F(CApiTest, WritesAndReadsByValue) {
  std::vector<uint8_t> payloads(size_t{2} * ns_.block_bytes);
  for (size_t i = 0; i < payloads.size(); ++i) payloads[i] = static_cast<uint8_t>(i * 7 >> 2);
  std::array<uint8_t, 2> statuses{};
  ASSERT_EQ(kvtier_write(client_, &ns_, nullptr, keys_.data(), 2, payloads.data(), payloads.size(),
                         statuses.data(), &error_),
            KVTIER_OK)
      << error_.message;
  std::vector<uint8_t> memory(size_t{3} * ns_.block_bytes);
  size_t count = 0;
  ASSERT_EQ(kvtier_read_into(client_, &ns_, keys_.data(), 3, memory.data(), memory.size(), &count,
                             &error_),
            KVTIER_OK);
  EXPECT_EQ(count, 2U);
  EXPECT_TRUE(std::equal(payloads.begin(), payloads.end(), memory.begin()));
  EXPECT_EQ(kvtier_read_into(client_, &ns_, keys_.data(), 3, memory.data(), 1, &count, &error_),
            KVTIER_INVALID_ARGUMENT);
}

TEST_F(CApiTest, CarriesContextsAndTickets) {
  uint32_t count = 9;
  EXPECT_EQ(kvtier_create_context(client_, &ns_, "chat", &count, &error_), KVTIER_OK);
  EXPECT_EQ(count, 0U);
  EXPECT_EQ(kvtier_append_context(client_, &ns_, "chat", 5, keys_.data(), 2, &count, &error_),
            KVTIER_OK);
  EXPECT_EQ(count, 7U);
  uint64_t freed = 0;
  EXPECT_EQ(kvtier_pause_context(client_, &ns_, "chat", 1234, &freed, nullptr, &error_), KVTIER_OK);
  EXPECT_EQ(freed, 1234U);
  kvtier_ticket ticket{};
  EXPECT_EQ(kvtier_resume_context(client_, &ns_, "chat", 55, &ticket, &error_), KVTIER_OK);
  EXPECT_EQ(ticket.eta_ms, 55U);
  EXPECT_EQ(kvtier_fork_context(client_, &ns_, "chat", "fork", 3, &count, &error_), KVTIER_OK);
  EXPECT_EQ(count, 3U);
  uint64_t dropped = 0;
  EXPECT_EQ(kvtier_close_context(client_, &ns_, "fork", 1, &dropped, &error_), KVTIER_OK);
  EXPECT_EQ(dropped, 11U);
  EXPECT_EQ(kvtier_prefetch(client_, &ns_, keys_.data(), 2, &ticket, &error_), KVTIER_OK);
  EXPECT_EQ(ticket.block_count, 2U);
  EXPECT_EQ(ticket.covered_block_count, 3U);
  EXPECT_EQ(ticket.ready_block_count, 4U);
  EXPECT_EQ(ticket.pending_bytes, 5U);
  EXPECT_EQ(ticket.done, 0);
  EXPECT_EQ(kvtier_poll_ticket(client_, ticket.ticket_id, nullptr), KVTIER_TICKET_ASK)
      << "this daemon has no board";
  EXPECT_EQ(kvtier_poll_ticket(client_, 0, nullptr), KVTIER_TICKET_ASK);
  EXPECT_EQ(kvtier_get_ticket(client_, 1, &ticket, &error_), KVTIER_OK);
  EXPECT_EQ(ticket.done, 1);
  EXPECT_EQ(kvtier_get_ticket(client_, 2, &ticket, &error_), KVTIER_NOT_FOUND);
  EXPECT_EQ(std::string(error_.reason), reason::kTicketUnknown);
}

TEST_F(CApiTest, ErrorsAreExplained) {
  EXPECT_EQ(kvtier_lookup(client_, &ns_, nullptr, 1, nullptr, nullptr, &error_),
            KVTIER_INVALID_ARGUMENT);
  EXPECT_NE(std::string(error_.message), "");
  // Without a place for it, the code alone.
  EXPECT_EQ(kvtier_acquire(client_, nullptr, nullptr, 0, nullptr, nullptr),
            KVTIER_INVALID_ARGUMENT);
  kvtier_namespace foreign = ns_;
  foreign.hash[0] ^= 1;
  std::array<uint8_t, 1> residency{};
  size_t found = 9;
  EXPECT_EQ(kvtier_lookup(client_, &foreign, keys_.data(), 1, residency.data(), &found, &error_),
            KVTIER_INVALID_ARGUMENT);
  EXPECT_EQ(found, 9U) << "written after an error";
  kvtier_fill* fill = nullptr;
  EXPECT_EQ(kvtier_reserve(client_, &ns_, nullptr, keys_.data(), 1, 3, &fill, &error_),
            KVTIER_INVALID_ARGUMENT);
  EXPECT_EQ(fill, nullptr);
}

TEST_F(CApiTest, StructuresOfOtherVersionsAreUnderstood) {
  // An older caller knows the first fields only; what lies behind them is not read.
  struct {
    size_t struct_bytes;
    const char* run_dir;
    std::array<uint8_t, 64> other;
  } older = {.struct_bytes = 16, .run_dir = run_dir_.c_str(), .other = {}};
  older.other.fill(0xFF);
  kvtier_client* client = nullptr;
  EXPECT_EQ(kvtier_connect(reinterpret_cast<const kvtier_options*>(&older), &client, &error_),
            KVTIER_OK)
      << error_.message;
  kvtier_close(client);
  client = nullptr;
  older.struct_bytes = 0;
  EXPECT_EQ(kvtier_connect(reinterpret_cast<const kvtier_options*>(&older), &client, &error_),
            KVTIER_INVALID_ARGUMENT);
  EXPECT_EQ(client, nullptr);
  EXPECT_EQ(kvtier_abi_major(), KVTIER_ABI_MAJOR);
}

}  // namespace
}  // namespace kvtier::client
