// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "client/include/kvtier/client.h"
#include "client/src/fake_daemon.h"
#include "proto/base/reasons.h"

namespace kvtier::client {

// A fake daemon in a directory of its own, and the client's usual steps.
class ClientFixture : public testing::Test {
 protected:
  void SetUp() override {
    char path[] = "/tmp/kvtier-client-XXXXXX";
    ASSERT_NE(mkdtemp(path), nullptr);
    run_dir_ = path;
    daemon_ = std::make_unique<FakeDaemon>(run_dir_, 1);
  }
  void TearDown() override {
    daemon_.reset();
    std::filesystem::remove_all(run_dir_);
  }

  ClientOptions Options() const { return {.run_dir = run_dir_, .client_name = "test"}; }

  std::unique_ptr<Client> Connect() { return Connect(Options()); }
  static std::unique_ptr<Client> Connect(const ClientOptions& options) {
    auto client = Client::Connect(options);
    EXPECT_TRUE(client.ok()) << client.status();
    return client.ok() ? std::move(*client) : nullptr;
  }

  static Namespace Register(Client& client) {
    const auto ns = client.RegisterLayout(FakeDaemon::TestLayout());
    EXPECT_TRUE(ns.ok()) << ns.status();
    return ns.ok() ? *ns : Namespace();
  }

  static std::vector<Key> KeysFrom(const Namespace& ns, uint32_t first, size_t count) {
    std::vector<Key> keys;
    for (uint32_t i = 0; i < count; ++i) {
      const uint32_t token = first + i;
      keys.push_back(HashBlock(ns.hash, std::nullopt, std::span(&token, 1)));
    }
    return keys;
  }

  // Stores blocks whose bytes are `first`, `first` + 1, ...
  static void Store(Client& client, const Namespace& ns, std::span<const Key> keys,
                    uint8_t first = 1) {
    auto fill = client.Reserve(ns, std::nullopt, keys);
    ASSERT_TRUE(fill.ok()) << fill.status();
    for (size_t i = 0; i < keys.size(); ++i) {
      ASSERT_EQ(fill->blocks[i].bytes.size(), FakeDaemon::kBlockBytes);
      std::ranges::fill(fill->blocks[i].bytes, std::byte(first + i));
    }
    const auto statuses = client.Commit(ns, *fill);
    ASSERT_TRUE(statuses.ok()) << statuses.status();
    ASSERT_EQ(*statuses, std::vector<BlockStatus>(keys.size(), BlockStatus::kOk));
  }

  static bool AllBytesAre(std::span<const std::byte> bytes, uint8_t value) {
    return !bytes.empty() &&
           std::ranges::all_of(bytes, [value](std::byte b) { return b == std::byte(value); });
  }

  std::string run_dir_;
  std::unique_ptr<FakeDaemon> daemon_;
};

}  // namespace kvtier::client
