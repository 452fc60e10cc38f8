// SPDX-License-Identifier: Apache-2.0
#include "tests/bench/tiers/blob_store.h"

#include <rocksdb/db.h>
#include <rocksdb/options.h>
#include <rocksdb/write_batch.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <random>
#include <thread>

#include "tests/bench/tiers/meter.h"

namespace kvtier::bench {
namespace {

constexpr size_t kGroupCount = 8;
constexpr size_t kPayloadCount = 16;

void MustBeRocksDbOk(const rocksdb::Status& status) {
  if (!status.ok()) Die("RocksDB: " + status.ToString());
}

std::string KeyOf(uint64_t block) {
  // Spread over the key space, as digests are.
  const uint64_t spread = block * 0x9E3779B97F4A7C15ULL;
  std::string key(sizeof(spread), '\0');
  std::memcpy(key.data(), &spread, sizeof(spread));
  return key;
}

}  // namespace

BlobStore::BlobStore(const std::string& path, uint32_t block_bytes) : block_bytes_(block_bytes) {
  std::mt19937_64 random(block_bytes);
  for (size_t i = 0; i < kPayloadCount; ++i) {
    std::string payload(block_bytes, '\0');
    for (size_t at = 0; at + sizeof(uint64_t) <= payload.size(); at += sizeof(uint64_t)) {
      const uint64_t word = random();
      std::memcpy(payload.data() + at, &word, sizeof(word));
    }
    payloads_.push_back(std::move(payload));
  }
  rocksdb::Options options;
  options.create_if_missing = true;
  options.compression = rocksdb::kNoCompression;
  options.enable_blob_files = true;
  options.min_blob_size = 0;
  options.use_direct_reads = true;
  options.use_direct_io_for_flush_and_compaction = true;
  options.max_background_jobs = 2;
  rocksdb::DB* db = nullptr;
  MustBeRocksDbOk(rocksdb::DB::Open(options, path, &db));
  db_.reset(db);
}

BlobStore::~BlobStore() { MustBeRocksDbOk(db_->Close()); }

void BlobStore::Write(std::span<const uint64_t> blocks) {
  rocksdb::WriteOptions synced;
  synced.sync = true;
  for (size_t first = 0; first < blocks.size(); first += kGroupCount) {
    rocksdb::WriteBatch batch;
    for (const uint64_t block :
         blocks.subspan(first, std::min(kGroupCount, blocks.size() - first))) {
      MustBeRocksDbOk(batch.Put(KeyOf(block), payloads_[block % kPayloadCount]));
    }
    MustBeRocksDbOk(db_->Write(synced, &batch));
  }
}

void BlobStore::Read(std::span<const uint64_t> blocks, int thread_count) {
  std::atomic<size_t> next = 0;
  std::vector<std::jthread> threads;
  for (int i = 0; i < thread_count; ++i) {
    threads.emplace_back([&] {
      rocksdb::PinnableSlice value;
      while (true) {
        const size_t at = next.fetch_add(1);
        if (at >= blocks.size()) return;
        value.Reset();
        MustBeRocksDbOk(db_->Get(rocksdb::ReadOptions(), db_->DefaultColumnFamily(),
                                 KeyOf(blocks[at]), &value));
        if (value.size() != block_bytes_) Die("RocksDB gave a value of another length");
      }
    });
  }
}

}  // namespace kvtier::bench
