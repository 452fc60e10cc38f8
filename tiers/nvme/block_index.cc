// SPDX-License-Identifier: Apache-2.0
#include "tiers/nvme/block_index.h"

#include <rocksdb/db.h>
#include <rocksdb/env.h>
#include <rocksdb/filter_policy.h>
#include <rocksdb/options.h>
#include <rocksdb/table.h>
#include <rocksdb/write_batch.h>
#include <spdlog/spdlog.h>

#include <array>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "proto/base/check.h"
#include "proto/base/status_util.h"
#include "tiers/nvme/index_log.h"

namespace kvtier::nvme {
namespace {

constexpr size_t kBlocks = 1;
constexpr size_t kMeta = 2;
// Of RocksDB's files that hold a name or an id.
constexpr uint64_t kSmallFileBytesMax = 4096;
constexpr char kFormatVersionKey[] = "format_version";
constexpr char kProbeKey[] = "probe";
constexpr char kSegmentBytesKey[] = "segment_bytes";
constexpr char kSpentDayKey[] = "written_day";
constexpr char kSpentBytesKey[] = "written_bytes";

rocksdb::Slice ValueOf(const RawIndexValue& raw) {
  return {reinterpret_cast<const char*>(&raw), sizeof(raw)};
}

rocksdb::Slice NumberOf(const uint64_t& number) {
  return {reinterpret_cast<const char*>(&number), sizeof(number)};
}

// What RocksDB has to tell goes to the daemon's log, and to no file of its own: Debian's RocksDB
// ends the process when it writes to its LOG again after a full disk has refused a line.
class Messages final : public rocksdb::Logger {
 public:
  Messages() : Logger(rocksdb::WARN_LEVEL) {}

  using rocksdb::Logger::Logv;
  void Logv(const char* format, va_list arguments) override {
    std::array<char, 512> text;
    std::vsnprintf(text.data(), text.size(), format, arguments);
    spdlog::debug("nvme: the index: {}", text.data());
  }
  // All options, at every start.
  void LogHeader(const char*, va_list) override {}
};

// DATA_LOSS: RocksDB could not use what is there in place of its files, or would wait for it.
absl::Status CheckFolder(const std::string& path) {
  namespace fs = std::filesystem;
  std::error_code error;
  const fs::file_status folder = fs::symlink_status(path, error);
  if (!fs::exists(folder)) return absl::OkStatus();
  if (!fs::is_directory(folder)) return DataLoss("%s is no folder", path);
  bool is_empty = true;
  bool has_current = false;
  fs::path identity;
  fs::directory_iterator it(path, error);
  for (; !error && it != fs::directory_iterator(); it.increment(error)) {
    const std::string name = it->path().filename().string();
    if (name == "lost+found") continue;
    if (!fs::is_regular_file(it->symlink_status(error))) {
      return DataLoss("%s is no regular file", it->path().string());
    }
    is_empty = false;
    has_current = has_current || name == "CURRENT";
    const uint64_t file_bytes = it->file_size(error);
    if (name == "CURRENT" && file_bytes > kSmallFileBytesMax) {
      return DataLoss("%s has %d bytes", it->path().string(), file_bytes);
    }
    if (name == "IDENTITY" && file_bytes > kSmallFileBytesMax) identity = it->path();
  }
  if (error) return ErrnoStatus(error.value(), "list " + path);
  // RocksDB would read it whole and write what is in it into each of its files; it makes another.
  if (!identity.empty()) fs::remove(identity, error);
  // RocksDB would start over beside the files of the old database.
  if (!is_empty && !has_current) return DataLoss("%s: CURRENT is missing", path);
  return absl::OkStatus();
}

rocksdb::WriteOptions Synced() {
  rocksdb::WriteOptions options;
  options.sync = true;
  return options;
}

}  // namespace

absl::Status StatusOfRocksDb(const rocksdb::Status& status, std::string_view what) {
  if (status.ok()) return absl::OkStatus();
  const std::string text = status.ToString();
  // A file that the database names and that is gone is damage, too.
  const bool is_damaged = status.IsCorruption() || status.IsInvalidArgument() ||
                          (status.IsIOError() && status.IsPathNotFound());
  if (is_damaged) return DataLoss("%s: %s", what, text);
  return Unavailable("%s: %s", what, text);
}

BlockIndex::BlockIndex() = default;

BlockIndex::~BlockIndex() {
  if (db_ == nullptr) return;
  for (rocksdb::ColumnFamilyHandle* handle : handles_) db_->DestroyColumnFamilyHandle(handle);
  // Every write was synced: nothing is lost when closing fails.
  db_->Close().PermitUncheckedError();
}

absl::StatusOr<std::unique_ptr<BlockIndex>> BlockIndex::Open(const Options& options) {
  std::unique_ptr<BlockIndex> index(new BlockIndex());
  KVT_RETURN_IF_ERROR(index->OpenDatabase(options));
  KVT_RETURN_IF_ERROR(index->CheckFormat());
  return index;
}

absl::Status BlockIndex::OpenDatabase(const Options& options) {
  KVT_RETURN_IF_ERROR(CheckFolder(options.path));
  rocksdb::Options db_options;
  if (options.env != nullptr) db_options.env = options.env;
  db_options.create_if_missing = true;
  db_options.create_missing_column_families = true;
  db_options.compression = rocksdb::kNoCompression;  // hashes do not compress
  // Small memtables: little to replay after a crash, and little disk for the log.
  db_options.write_buffer_size = options.write_buffer_bytes;
  db_options.max_total_wal_size = 2 * options.write_buffer_bytes;
  db_options.target_file_size_base = 2 * options.write_buffer_bytes;
  db_options.max_bytes_for_level_base = 8 * options.write_buffer_bytes;
  db_options.max_background_jobs = 2;
  // Preallocated space would count against the tier's physical cap.
  db_options.allow_fallocate = false;
  // A last write that a crash cut short is normal; a log that is damaged before its end is not, and
  // must not silently lose what follows: opening fails, and the index is made anew from the
  // records.
  CutTornManifest(options.path);
  const LogState logs = StateOfLogs(options.path);
  if (logs == LogState::kDamaged) return DataLoss("%s: a log is damaged", options.path);
  db_options.wal_recovery_mode = logs == LogState::kTorn
                                     ? rocksdb::WALRecoveryMode::kPointInTimeRecovery
                                     : rocksdb::WALRecoveryMode::kAbsoluteConsistency;
  db_options.max_manifest_file_size = 1 << 20;
  db_options.info_log = std::make_shared<Messages>();
  rocksdb::BlockBasedTableOptions table;
  table.filter_policy.reset(rocksdb::NewBloomFilterPolicy(10));
  db_options.table_factory.reset(rocksdb::NewBlockBasedTableFactory(table));
  const rocksdb::ColumnFamilyOptions family(db_options);
  const std::vector<rocksdb::ColumnFamilyDescriptor> families = {
      {rocksdb::kDefaultColumnFamilyName, family}, {"blocks", family}, {"meta", family}};
  rocksdb::DB* db = nullptr;
  const rocksdb::Status opened =
      rocksdb::DB::Open(db_options, options.path, families, &handles_, &db);
  KVT_RETURN_IF_ERROR(StatusOfRocksDb(opened, "open the index"));
  db_.reset(db);
  return absl::OkStatus();
}

absl::Status BlockIndex::CheckFormat() {
  KVT_ASSIGN_OR_RETURN(const std::optional<uint64_t> version, GetMeta(kFormatVersionKey));
  if (!version) {
    is_incomplete_ = true;
    return absl::OkStatus();
  }
  if (*version > kFormatVersion) {
    return FailedPrecondition(
        "the index has format version %d, this build reads up to %d: use a "
        "newer kvtierd, or another directory",
        *version, kFormatVersion);
  }
  KVT_ASSIGN_OR_RETURN(const std::optional<uint64_t> segment_bytes, GetMeta(kSegmentBytesKey));
  segment_bytes_ = segment_bytes.value_or(0);
  return absl::OkStatus();
}

absl::Status BlockIndex::MarkComplete(uint64_t segment_bytes, uint64_t format_version) {
  rocksdb::WriteBatch batch;
  rocksdb::Status put = batch.Put(handles_[kMeta], kSegmentBytesKey, NumberOf(segment_bytes));
  if (put.ok()) put = batch.Put(handles_[kMeta], kFormatVersionKey, NumberOf(format_version));
  if (put.ok()) put = db_->Write(Synced(), &batch);
  KVT_RETURN_IF_ERROR(StatusOfRocksDb(put, "write the format to the index"));
  segment_bytes_ = segment_bytes;
  is_incomplete_ = false;
  return absl::OkStatus();
}

absl::StatusOr<std::optional<uint64_t>> BlockIndex::GetMeta(const std::string& key) {
  std::string value;
  const rocksdb::Status got = db_->Get(rocksdb::ReadOptions(), handles_[kMeta], key, &value);
  if (got.IsNotFound()) return std::optional<uint64_t>();
  KVT_RETURN_IF_ERROR(StatusOfRocksDb(got, "read " + key + " from the index"));
  uint64_t number = 0;
  if (value.size() != sizeof(number)) return DataLoss("the index's %s has a bad length", key);
  std::memcpy(&number, value.data(), sizeof(number));
  return std::optional<uint64_t>(number);
}

absl::Status BlockIndex::ForEach(const std::function<void(const IndexEntry&)>& visit,
                                 uint64_t& bad_count) {
  rocksdb::ReadOptions options;
  options.fill_cache = false;
  std::unique_ptr<rocksdb::Iterator> it(db_->NewIterator(options, handles_[kBlocks]));
  for (it->SeekToFirst(); it->Valid(); it->Next()) {
    if (const auto entry = DecodeIndexEntry(it->key().ToStringView(), it->value().ToStringView())) {
      visit(*entry);
    } else {
      ++bad_count;
    }
  }
  return StatusOfRocksDb(it->status(), "walk the index");
}

absl::Status BlockIndex::Apply(std::span<const IndexEntry> puts,
                               std::span<const IndexRemoval> removals,
                               const WriteBudget::Spent* spent) {
  rocksdb::WriteBatch batch;
  absl::flat_hash_set<std::string> put_keys;
  for (const IndexEntry& entry : puts) {
    std::string key = EncodeIndexKey(entry.meta.namespace_hash, entry.meta.key);
    const RawIndexValue raw = EncodeIndexValue(entry);
    KVT_RETURN_IF_ERROR(
        StatusOfRocksDb(batch.Put(handles_[kBlocks], key, ValueOf(raw)), "put an index entry"));
    put_keys.insert(std::move(key));
  }
  for (const IndexRemoval& removal : removals) {
    const std::string key = EncodeIndexKey(removal.namespace_hash, removal.key);
    // The block was written again since: its entry is another replica's now.
    if (put_keys.contains(key)) continue;
    std::string value;
    const rocksdb::Status got = db_->Get(rocksdb::ReadOptions(), handles_[kBlocks], key, &value);
    if (got.IsNotFound()) continue;
    KVT_RETURN_IF_ERROR(StatusOfRocksDb(got, "read an index entry"));
    const std::optional<RawIndexValue> raw = DecodeIndexValue(value);
    if (raw && raw->generation != removal.generation) continue;
    KVT_RETURN_IF_ERROR(
        StatusOfRocksDb(batch.Delete(handles_[kBlocks], key), "delete an index entry"));
  }
  if (batch.Count() == 0) return absl::OkStatus();
  if (spent != nullptr) {
    rocksdb::Status put = batch.Put(handles_[kMeta], kSpentDayKey, NumberOf(spent->day));
    if (put.ok()) put = batch.Put(handles_[kMeta], kSpentBytesKey, NumberOf(spent->bytes));
    KVT_RETURN_IF_ERROR(StatusOfRocksDb(put, "put what was written today"));
  }
  return StatusOfRocksDb(db_->Write(Synced(), &batch), "write to the index");
}

absl::StatusOr<WriteBudget::Spent> BlockIndex::LoadSpent() {
  KVT_ASSIGN_OR_RETURN(const std::optional<uint64_t> day, GetMeta(kSpentDayKey));
  KVT_ASSIGN_OR_RETURN(const std::optional<uint64_t> bytes, GetMeta(kSpentBytesKey));
  return WriteBudget::Spent{.day = day.value_or(0), .bytes = bytes.value_or(0)};
}

absl::Status BlockIndex::Probe() {
  KVT_RETURN_IF_ERROR(StatusOfRocksDb(db_->Resume(), "resume the index"));
  const uint64_t zero = 0;
  return StatusOfRocksDb(db_->Put(Synced(), handles_[kMeta], kProbeKey, NumberOf(zero)),
                         "write to the index");
}

}  // namespace kvtier::nvme
