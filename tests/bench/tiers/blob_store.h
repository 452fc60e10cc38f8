// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace rocksdb {
class DB;
}  // namespace rocksdb

namespace kvtier::bench {

// The baseline: payloads in RocksDB's blob files, with O_DIRECT, checksums and a synced log, as one
// would use it without own segment files. Owns its folder's contents. Thread-compatible.
class BlobStore {
 public:
  BlobStore(const std::string& path, uint32_t block_bytes);
  ~BlobStore();

  // All durable when it returns: groups of 8 with one sync each.
  void Write(std::span<const uint64_t> blocks);
  void Read(std::span<const uint64_t> blocks, int thread_count);

 private:
  const uint32_t block_bytes_;
  std::vector<std::string> payloads_;
  std::unique_ptr<rocksdb::DB> db_;
};

}  // namespace kvtier::bench
