// SPDX-License-Identifier: Apache-2.0
//
// Damage at every place: each byte of the last records of a segment, each length that the file may
// be cut to, each kind of file of the index. The answer is a miss or an index made anew, never
// other bytes, never a crash.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "tiers/nvme/nvme_test_util.h"
#include "tiers/nvme/record.h"
#include "tiers/nvme/segment_scan.h"

namespace kvtier {
namespace {

namespace fs = std::filesystem;

using nvme::kPageBytes;

constexpr uint64_t kSegmentBytes = 64 << 10;

// Every how many bytes a place is tried.
#ifdef KVTIER_FEWER_PLACES
constexpr uint64_t kStep = 23;
#else
constexpr uint64_t kStep = 1;
#endif

class InMemory {
 protected:
  InMemory() { KeepTestFilesInMemory(); }
};

class NvmeDamageTest : private InMemory, public NvmeTierTest {
 protected:
  NvmeDamageTest() {
    options_.segment_bytes = kSegmentBytes;
    options_.capacity_bytes = 20 * kSegmentBytes;
  }
};

class NvmeDamagedSegmentTest : public NvmeDamageTest {
 protected:
  struct Place {
    uint64_t seed = 0;
    uint64_t start_bytes = 0;
    uint64_t payload_end_bytes = 0;
    uint64_t end_bytes = 0;
  };

  void SetUp() override {
    Open();
    // The ends of payloads: inside a page, at its end, right behind its start.
    for (const uint32_t payload_bytes : {5000u, 4096u, 1u}) {
      const uint64_t seed = next_seed_;
      ASSERT_EQ(Put(payload_bytes), absl::OkStatus());
      const uint64_t start_bytes = FindRecord(held_.at(seed).block.meta, path_);
      places_.push_back({.seed = seed,
                         .start_bytes = start_bytes,
                         .payload_end_bytes = start_bytes + kPageBytes + payload_bytes,
                         .end_bytes = start_bytes + nvme::RecordBytes(payload_bytes)});
    }
    fd_ = open(path_.c_str(), O_RDWR | O_CLOEXEC);
    ASSERT_GE(fd_, 0);
    bytes_ = ReadFile(path_);
  }
  void TearDown() override {
    if (fd_ >= 0) close(fd_);
  }

  absl::Status Read(const Place& place) {
    const Held& held = held_.at(place.seed);
    return ReadAndCompare(*tier_, held.replica, held.block);
  }
  // Keys that a rebuild would find.
  std::set<Key> Scan(uint64_t file_bytes) {
    const auto header =
        nvme::ParseSegmentHeader(std::as_bytes(std::span(bytes_)).first(kPageBytes));
    EXPECT_TRUE(header.ok()) << header.status();
    std::set<Key> keys;
    const absl::Status status = nvme::ScanSegment(
        fd_, file_bytes, *header,
        [&](const nvme::RecordHeader& record, uint64_t) { keys.insert(record.meta.key); });
    EXPECT_TRUE(status.ok()) << status;
    return keys;
  }
  std::set<Key> KeysBut(const Place* without) {
    std::set<Key> keys;
    for (const Place& place : places_) {
      if (&place != without) keys.insert(held_.at(place.seed).block.meta.key);
    }
    return keys;
  }
  void Patch(uint64_t at, char byte) {
    ASSERT_EQ(pwrite(fd_, &byte, 1, static_cast<off_t>(at)), 1);
  }

  std::string path_;
  int fd_ = -1;
  std::string bytes_;
  std::vector<Place> places_;
};

TEST_F(NvmeDamagedSegmentTest, EveryFlippedByteIsAMissOfItsBlockOnly) {
  for (const Place& place : places_) {
    for (uint64_t at = place.start_bytes; at < place.end_bytes; at += kStep) {
      // Behind the payload nothing is looked at.
      const bool is_hit = at >= place.payload_end_bytes;
      ASSERT_NO_FATAL_FAILURE(Patch(at, static_cast<char>(bytes_[at] ^ (1 << at % 8))));
      ASSERT_EQ(Read(place).code(), is_hit ? absl::StatusCode::kOk : absl::StatusCode::kDataLoss)
          << at;
      ASSERT_EQ(Scan(bytes_.size()), KeysBut(is_hit ? nullptr : &place)) << at;
      ASSERT_NO_FATAL_FAILURE(Patch(at, bytes_[at]));
    }
  }
  ExpectAllReadable();
  EXPECT_FALSE(tier_->Health().degraded);
}

TEST_F(NvmeDamagedSegmentTest, EveryCutIsAMissOfWhatWasCutOff) {
  for (uint64_t length = bytes_.size(); length > kPageBytes; length -= kStep) {
    if (length % kPageBytes == 1) length -= std::min(kStep - 1, length - kPageBytes - 1);
    if (length > places_.back().end_bytes + 2) length = places_.back().end_bytes + 2;
    ASSERT_EQ(ftruncate(fd_, static_cast<off_t>(length)), 0);
    std::set<Key> scanned;
    for (const Place& place : places_) {
      // A read wants whole pages, a scan the payload.
      ASSERT_EQ(Read(place).code(),
                place.end_bytes <= length ? absl::StatusCode::kOk : absl::StatusCode::kDataLoss)
          << length;
      if (place.payload_end_bytes <= length) {
        scanned.insert(held_.at(place.seed).block.meta.key);
      }
    }
    ASSERT_EQ(Scan(length), scanned) << length;
    if (length <= kPageBytes + kStep) break;
  }
}

TEST_F(NvmeDamagedSegmentTest, AStartAfterAnyCutServesTheRest) {
  std::mt19937_64 random(TestSeed());
  const auto all = held_.size();
  for (int round = 0; round < 30; ++round) {
    Close();
    const uint64_t length = random() % (places_.back().end_bytes + 1);
    ASSERT_EQ(ftruncate(fd_, static_cast<off_t>(length)), 0);
    auto tier = NvmeTier::Create(options_);
    ASSERT_TRUE(tier.ok()) << tier.status();
    size_t found_count = 0;
    ASSERT_TRUE((*tier)
                    ->Recover([&](const BlockMeta& meta, ReplicaId replica) {
                      const auto is_it = [&](const auto& held) {
                        return held.second.block.meta == meta;
                      };
                      const auto at = std::find_if(held_.begin(), held_.end(), is_it);
                      ASSERT_NE(at, held_.end());
                      at->second.replica = replica;
                      ++found_count;
                    })
                    .ok());
    const auto whole_count = std::count_if(places_.begin(), places_.end(), [&](const Place& place) {
      return place.end_bytes <= length;
    });
    EXPECT_EQ(found_count, static_cast<size_t>(whole_count)) << length << " of " << all;
    tier->reset();
    // As it was, with its index.
    fs::remove_all(options_.dir + "/index");
    ASSERT_EQ(pwrite(fd_, bytes_.data(), bytes_.size(), 0), static_cast<ssize_t>(bytes_.size()));
  }
}

// An index with a table, a log and everything else that RocksDB keeps.
class NvmeDamagedIndexFileTest : public NvmeDamageTest {
 protected:
  void SetUp() override {
    Open();
    PutMany(8, 9000);
    FreeHeld(3);
    Open();
    PutMany(6, 5000);
    FreeHeld(5);
    Close();
    whole_ = options_.dir + "-whole";
    fs::copy(options_.dir, whole_, fs::copy_options::recursive);
    for (const auto& entry : fs::directory_iterator(whole_ + "/index")) {
      names_.push_back(entry.path().filename().string());
    }
    std::sort(names_.begin(), names_.end());
  }

  // Opens the directory with this file of the index replaced (or removed).
  void Check(const std::string& name, const std::string* bytes) {
    fs::remove_all(options_.dir);
    fs::copy(whole_, options_.dir, fs::copy_options::recursive);
    const std::string path = options_.dir + "/index/" + name;
    if (bytes != nullptr) {
      WriteFile(path, *bytes);
    } else {
      fs::remove(path);
    }
    auto tier = NvmeTier::Create(options_);
    ASSERT_TRUE(tier.ok()) << tier.status();
    std::map<Key, std::pair<BlockMeta, ReplicaId>> found;
    const absl::Status recovered = (*tier)->Recover(
        [&](const BlockMeta& meta, ReplicaId replica) { found[meta.key] = {meta, replica}; });
    ASSERT_TRUE(recovered.ok()) << recovered;
    size_t hit_count = 0;
    for (const auto& [seed, held] : held_) {
      const auto at = found.find(held.block.meta.key);
      if (at == found.end()) continue;
      const absl::Status read = ReadAndCompare(**tier, at->second.second, held.block);
      ASSERT_TRUE(read.ok() || absl::IsDataLoss(read)) << read;
      if (read.ok()) ++hit_count;
    }
    rebuilt_count_ += (*tier)->Stats().is_rebuilt ? 1 : 0;
    lost_count_ += held_.size() - hit_count;
    // The log and the manifest may end anywhere: what a cut took away at the end of a write was
    // never there, as far as they know. Everything else is found out, or does not matter.
    const bool may_be_short = name.ends_with(".log") || name.starts_with("MANIFEST");
    ASSERT_TRUE(may_be_short || hit_count == held_.size())
        << held_.size() - hit_count << " blocks are gone";
    ASSERT_TRUE((*tier)->Reserve(100, 1).ok());
  }

  // Every place of a small file, some of a large one.
  std::vector<uint64_t> PlacesOf(uint64_t file_bytes, uint64_t count_max) {
    std::vector<uint64_t> places;
    const uint64_t count = std::min(file_bytes, count_max / kStep + 1);
    for (uint64_t i = 0; i < count; ++i) {
      places.push_back(count == file_bytes ? i : random_() % file_bytes);
    }
    return places;
  }

  std::string whole_;
  std::vector<std::string> names_;
  std::mt19937_64 random_{TestSeed()};
  int rebuilt_count_ = 0;
  size_t lost_count_ = 0;
};

// RocksDB would wait for a pipe for ever, and has no way out of a folder.
TEST_F(NvmeDamagedIndexFileTest, IsMadeAnewWhenSomethingElseIsInTheFilesPlace) {
  for (const std::string& name : names_) {
    for (const fs::file_type type :
         {fs::file_type::fifo, fs::file_type::directory, fs::file_type::symlink}) {
      fs::remove_all(options_.dir);
      fs::copy(whole_, options_.dir, fs::copy_options::recursive);
      const std::string path = options_.dir + "/index/" + name;
      fs::remove(path);
      if (type == fs::file_type::fifo) {
        ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
      }
      if (type == fs::file_type::directory) fs::create_directory(path);
      if (type == fs::file_type::symlink) fs::create_symlink(name, path);
      auto tier = NvmeTier::Create(options_);
      ASSERT_TRUE(tier.ok()) << name << ": " << tier.status();
      EXPECT_TRUE((*tier)->Stats().is_rebuilt) << name;
    }
  }
}

TEST_F(NvmeDamagedIndexFileTest, IsAMissOrMadeAnewWhateverHappensToAFile) {
  std::set<std::string> kinds;
  for (const std::string& name : names_) {
    const std::string bytes = ReadFile(whole_ + "/index/" + name);
    SCOPED_TRACE(name);
    kinds.insert(name.substr(name.find_first_not_of("0123456789")).substr(0, 4));
    rebuilt_count_ = 0;
    lost_count_ = 0;
    ASSERT_NO_FATAL_FAILURE(Check(name, nullptr)) << "removed";
    const std::string zeros(bytes.size(), '\0');
    ASSERT_NO_FATAL_FAILURE(Check(name, &zeros)) << "zeros";
    for (const uint64_t at : PlacesOf(bytes.size(), 60)) {
      std::string flipped = bytes;
      flipped[at] = static_cast<char>(flipped[at] ^ (1 << at % 8));
      ASSERT_NO_FATAL_FAILURE(Check(name, &flipped)) << "flipped at " << at;
    }
    for (const uint64_t length : PlacesOf(bytes.size(), 40)) {
      const std::string cut = bytes.substr(0, length);
      ASSERT_NO_FATAL_FAILURE(Check(name, &cut)) << "cut to " << length;
    }
    std::printf("%s, %zu bytes: made anew %d times, %zu blocks lost in all\n", name.c_str(),
                bytes.size(), rebuilt_count_, lost_count_);
  }
  EXPECT_EQ(kinds, (std::set<std::string>{".log", ".sst", "CURR", "IDEN", "LOCK", "MANI", "OPTI"}));
}

}  // namespace
}  // namespace kvtier
