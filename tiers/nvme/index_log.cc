// SPDX-License-Identifier: Apache-2.0
#include "tiers/nvme/index_log.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <system_error>
#include <vector>

#include "proto/base/crc32c.h"

namespace kvtier::nvme {
namespace {

namespace fs = std::filesystem;

constexpr size_t kBlockBytes = 32 << 10;
constexpr size_t kHeaderBytes = 7;
constexpr size_t kTypeOffset = 6;
constexpr uint8_t kWhole = 1;
constexpr uint8_t kFirst = 2;
constexpr uint8_t kLast = 4;

uint32_t Masked(uint32_t crc) { return ((crc >> 15) | (crc << 17)) + 0xA282EAD8; }

struct Fragment {
  uint8_t type = 0;
  size_t total_bytes = 0;
};

// An intact one at this place.
std::optional<Fragment> ParseFragment(std::span<const std::byte> log, size_t offset_bytes) {
  const size_t block_end = offset_bytes / kBlockBytes * kBlockBytes + kBlockBytes;
  const size_t end = std::min(block_end, log.size());
  if (end - offset_bytes < kHeaderBytes) return std::nullopt;
  uint32_t crc = 0;
  uint16_t length_bytes = 0;
  std::memcpy(&crc, &log[offset_bytes], sizeof(crc));
  std::memcpy(&length_bytes, &log[offset_bytes + sizeof(crc)], sizeof(length_bytes));
  const auto type = static_cast<uint8_t>(log[offset_bytes + kTypeOffset]);
  const size_t total_bytes = kHeaderBytes + length_bytes;
  if (type < kWhole || type > kLast || total_bytes > end - offset_bytes) return std::nullopt;
  if (Masked(Crc32c(log.subspan(offset_bytes + kTypeOffset, 1 + length_bytes))) != crc) {
    return std::nullopt;
  }
  return Fragment{.type = type, .total_bytes = total_bytes};
}

struct Write {
  uint64_t sequence = 0;
  uint32_t count = 0;
};

Write ParseWrite(std::span<const std::byte> payload) {
  Write write;
  if (payload.size() < sizeof(write.sequence) + sizeof(write.count)) return write;
  std::memcpy(&write.sequence, payload.data(), sizeof(write.sequence));
  std::memcpy(&write.count, &payload[sizeof(write.sequence)], sizeof(write.count));
  return write;
}

// Numbers of at least six digits: a longer one is newer.
bool IsOlder(const fs::path& a, const fs::path& b) {
  const std::string left = a.filename().string();
  const std::string right = b.filename().string();
  return left.size() != right.size() ? left.size() < right.size() : left < right;
}

// What cannot be read is for RocksDB to report.
std::string ReadWhole(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

}  // namespace

LogReport ExamineLog(std::span<const std::byte> log) {
  LogReport report;
  size_t offset_bytes = 0;
  // A write whose last fragment is still to come.
  bool is_started = false;
  Write started;
  const auto end_write = [&](const Write& write, size_t end_bytes) {
    report.whole_bytes = end_bytes;
    if (!report.first_sequence) report.first_sequence = write.sequence;
    report.next_sequence = write.sequence + write.count;
    is_started = false;
  };
  while (offset_bytes < log.size()) {
    if (kBlockBytes - offset_bytes % kBlockBytes < kHeaderBytes) {
      offset_bytes = (offset_bytes / kBlockBytes + 1) * kBlockBytes;
      continue;
    }
    const auto fragment = ParseFragment(log, offset_bytes);
    if (!fragment) break;
    const auto payload = log.subspan(offset_bytes, fragment->total_bytes).subspan(kHeaderBytes);
    const size_t end_bytes = offset_bytes + fragment->total_bytes;
    if (fragment->type == kWhole) end_write(ParseWrite(payload), end_bytes);
    if (fragment->type == kFirst) {
      started = ParseWrite(payload);
      is_started = true;
    }
    if (fragment->type == kLast && is_started) end_write(started, end_bytes);
    offset_bytes = end_bytes;
  }
  if (is_started || offset_bytes < log.size()) report.state = LogState::kTorn;
  for (size_t behind = offset_bytes + 1; behind < log.size(); ++behind) {
    const auto fragment = ParseFragment(log, behind);
    if (fragment && (fragment->type == kWhole || fragment->type == kFirst)) {
      report.state = LogState::kDamaged;
    }
  }
  return report;
}

LogState StateOfLogs(const std::string& index_path) {
  std::vector<fs::path> paths;
  std::error_code error;
  for (fs::directory_iterator it(index_path, error), end; !error && it != end;
       it.increment(error)) {
    if (it->path().extension() == ".log") paths.push_back(it->path());
  }
  std::sort(paths.begin(), paths.end(), IsOlder);
  LogState state = LogState::kWhole;
  std::optional<uint64_t> next_sequence;
  for (const fs::path& path : paths) {
    const std::string log = ReadWhole(path);
    const LogReport report = ExamineLog(std::as_bytes(std::span(log)));
    if (report.state == LogState::kDamaged) return LogState::kDamaged;
    const bool has_gap =
        report.first_sequence && next_sequence && *report.first_sequence != *next_sequence;
    if (state == LogState::kTorn && has_gap) return LogState::kDamaged;
    if (report.state == LogState::kTorn) state = LogState::kTorn;
    if (report.next_sequence) next_sequence = report.next_sequence;
  }
  return state;
}

void CutTornManifest(const std::string& index_path) {
  std::string name = ReadWhole(fs::path(index_path) / "CURRENT");
  if (!name.starts_with("MANIFEST-") || name.find('/') != std::string::npos) return;
  if (name.ends_with('\n')) name.pop_back();
  const fs::path path = fs::path(index_path) / name;
  const std::string manifest = ReadWhole(path);
  const LogReport report = ExamineLog(std::as_bytes(std::span(manifest)));
  if (report.state != LogState::kTorn) return;
  // If the cut does not reach the disk, the next start makes it.
  std::error_code ignored;
  fs::resize_file(path, report.whole_bytes, ignored);
}

}  // namespace kvtier::nvme
