// SPDX-License-Identifier: Apache-2.0
//
// What the nvme tier reads from a disk: header pages, index entries, logs of the index, whole
// segments. The first byte picks which. What is accepted must be the same after it was written and
// read again; what a scan finds must lie within the file and not overlap.

#include <array>
#include <cstring>
#include <optional>
#include <vector>

#include "proto/base/check.h"
#include "proto/base/crc32c.h"
#include "tests/fuzz/fuzz_input.h"
#include "tests/fuzz/memory_file.h"
#include "tiers/nvme/index_entry.h"
#include "tiers/nvme/index_log.h"
#include "tiers/nvme/record.h"
#include "tiers/nvme/segment_scan.h"

namespace kvtier::nvme {
namespace {

using fuzz::FuzzInput;
using Page = std::array<std::byte, kPageBytes>;

// Puts the right checksum over a page: else no change of one would get past it.
void Seal(std::span<std::byte> page, size_t crc_offset) {
  const std::span<const std::byte> all(page);
  const uint32_t crc = Crc32c(all.subspan(crc_offset + 4), Crc32c(all.first(crc_offset)));
  std::memcpy(&page[crc_offset], &crc, sizeof(crc));
}

// A good header with the input's bytes over it, from any place on; sealed or not.
template <typename Header>
Page ChangedPage(FuzzInput* input, const Header& good, size_t crc_offset,
                 void (*encode)(const Header&, std::span<std::byte, kPageBytes>)) {
  Page page;
  encode(good, page);
  const bool is_sealed = input->Byte() % 4 != 0;
  const size_t at = input->Byte();
  const auto bytes = input->Take(kPageBytes - at);
  if (!bytes.empty()) std::memcpy(&page[at], bytes.data(), bytes.size());
  if (is_sealed) Seal(page, crc_offset);
  return page;
}

void FuzzSegmentHeader(FuzzInput* input) {
  const SegmentHeader good{.segment_idx = 5, .segment_bytes = 1 << 20, .sequence = 77, .nonce = 42};
  const Page page = ChangedPage(input, good, 44, EncodeSegmentHeader);
  const auto parsed = ParseSegmentHeader(page);
  if (!parsed.ok()) return;
  KVT_CHECK(parsed->segment_bytes <= kSegmentBytesMax && parsed->sequence != 0);
  Page again;
  EncodeSegmentHeader(*parsed, again);
  KVT_CHECK(*ParseSegmentHeader(again) == *parsed);
}

void FuzzRecordHeader(FuzzInput* input) {
  RecordHeader good{.meta = {}, .generation = GenerationOf(9, kPageBytes), .nonce = 42};
  good.meta.payload_bytes = 5000;
  const Page page = ChangedPage(input, good, 172, EncodeRecordHeader);
  const auto parsed = ParseRecordHeader(page);
  if (!parsed.ok()) return;
  KVT_CHECK(parsed->meta.payload_bytes > 0 && SequenceOf(parsed->generation) > 0);
  Page again;
  EncodeRecordHeader(*parsed, again);
  KVT_CHECK(*ParseRecordHeader(again) == *parsed);
}

void FuzzIndexEntry(FuzzInput* input) {
  const std::string key = fuzz::TextOf(input->Take(input->Byte()));
  const std::string value = fuzz::TextOf(input->Rest());
  const auto entry = DecodeIndexEntry(key, value);
  if (!entry) return;
  KVT_CHECK(EncodeIndexKey(entry->meta.namespace_hash, entry->meta.key) == key);
  RawIndexValue raw = EncodeIndexValue(*entry);
  // Not looked at, so that a later version can use it.
  std::memcpy(&raw.reserved, &value[offsetof(RawIndexValue, reserved)], sizeof(raw.reserved));
  KVT_CHECK(std::memcmp(&raw, value.data(), sizeof(raw)) == 0);
}

// Fragments with right checksums, or any bytes.
std::string MakeLog(FuzzInput* input) {
  std::string log;
  while (!input->empty() && log.size() < (256 << 10)) {
    const uint8_t kind = input->Byte();
    std::string piece = fuzz::TextOf(input->Piece());
    if (kind % 8 == 7) {
      log += piece;
      continue;
    }
    // The end of a block is padding.
    const size_t left = (32 << 10) - log.size() % (32 << 10);
    if (left < 7) log.append(left, '\0');
    if (kind % 8 == 6) piece.resize(std::min<size_t>(left - 7, 0xFFFF));
    piece.insert(piece.begin(), static_cast<char>(kind % 6));
    const uint32_t crc = Crc32c(std::as_bytes(std::span(piece)));
    const uint32_t masked = ((crc >> 15) | (crc << 17)) + 0xA282EAD8;
    const auto length_bytes = static_cast<uint16_t>(piece.size() - 1);
    log.append(reinterpret_cast<const char*>(&masked), sizeof(masked));
    log.append(reinterpret_cast<const char*>(&length_bytes), sizeof(length_bytes));
    log += piece;
  }
  return log;
}

void FuzzLog(FuzzInput* input) {
  const std::string log = MakeLog(input);
  const auto bytes = std::as_bytes(std::span(log));
  const LogReport report = ExamineLog(bytes);
  KVT_CHECK(report.whole_bytes <= log.size());
  KVT_CHECK(report.first_sequence.has_value() == report.next_sequence.has_value());
  // What is left after the cut has no torn end, and the same writes.
  const LogReport cut = ExamineLog(bytes.first(report.whole_bytes));
  KVT_CHECK(cut.state == LogState::kWhole && cut.whole_bytes == report.whole_bytes);
  KVT_CHECK(cut.first_sequence == report.first_sequence &&
            cut.next_sequence == report.next_sequence);
}

constexpr uint64_t kScanPages = 16;
constexpr uint64_t kSequence = 3;
constexpr uint64_t kNonce = 42;

// Records, good ones and changed ones, on any pages of one segment.
std::vector<uint8_t> MakeSegment(FuzzInput* input) {
  std::vector<uint8_t> file(kScanPages * kPageBytes);
  const std::span<std::byte> bytes = std::as_writable_bytes(std::span(file));
  while (!input->empty()) {
    const uint64_t page_idx = input->Below(kScanPages);
    const auto page = bytes.subspan(page_idx * kPageBytes).first<kPageBytes>();
    RecordHeader header{
        .meta = {}, .generation = GenerationOf(kSequence, page_idx * kPageBytes), .nonce = kNonce};
    header.meta.payload_bytes = input->Number() % (1 << 17);
    const uint64_t left_bytes = (kScanPages - page_idx - 1) * kPageBytes;
    header.meta.crc32c = Crc32c(
        bytes.last(left_bytes).first(std::min<uint64_t>(header.meta.payload_bytes, left_bytes)));
    EncodeRecordHeader(header, page);
    const size_t at = input->Byte();
    const auto changes = input->Piece();
    for (size_t i = 0; i < changes.size() && at + i < kPageBytes; ++i) {
      page[at + i] ^= std::byte{changes[i]};
    }
    if (input->Byte() % 4 != 0) Seal(page, 172);
  }
  return file;
}

void FuzzScan(FuzzInput* input) {
  const uint8_t flags = input->Byte();
  std::optional<SegmentHeader> header;
  if ((flags & 1) != 0) header = SegmentHeader{.sequence = kSequence, .nonce = kNonce};
  const uint64_t cut_bytes = (flags & 2) != 0 ? input->Number() % (kScanPages * kPageBytes) : 0;
  std::vector<uint8_t> segment = MakeSegment(input);
  segment.resize(segment.size() - cut_bytes);
  const fuzz::MemoryFile file(segment);
  // As when the file was cut after its size was read.
  const uint64_t told_bytes = segment.size() + ((flags & 4) != 0 ? kPageBytes : 0);
  uint64_t end_bytes = kPageBytes;
  const auto visit = [&](const RecordHeader& record, uint64_t offset_bytes) {
    KVT_CHECK(offset_bytes >= end_bytes && OffsetOf(record.generation) == offset_bytes);
    const uint64_t payload_bytes = offset_bytes + kPageBytes;
    KVT_CHECK(payload_bytes + record.meta.payload_bytes <= segment.size());
    const auto payload = std::as_bytes(std::span(segment)).subspan(payload_bytes);
    KVT_CHECK(Crc32c(payload.first(record.meta.payload_bytes)) == record.meta.crc32c);
    end_bytes = offset_bytes + RecordBytes(record.meta.payload_bytes);
  };
  KVT_CHECK(ScanSegment(file.fd(), told_bytes, header, visit).ok());
}

}  // namespace
}  // namespace kvtier::nvme

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size_bytes) {
  kvtier::fuzz::FuzzInput input(data, size_bytes);
  constexpr std::array kTargets = {kvtier::nvme::FuzzSegmentHeader, kvtier::nvme::FuzzRecordHeader,
                                   kvtier::nvme::FuzzIndexEntry, kvtier::nvme::FuzzLog,
                                   kvtier::nvme::FuzzScan};
  kTargets[input.Below(kTargets.size())](&input);
  return 0;
}
