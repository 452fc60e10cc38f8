// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <utility>
#include <vector>

#include "tiers/nvme/record.h"

namespace kvtier::nvme {

// Where a record lies.
struct Location {
  uint32_t segment_idx = 0;
  uint64_t offset_bytes = 0;
  uint64_t generation = 0;
  uint64_t nonce = 0;

  friend bool operator==(const Location&, const Location&) = default;
};

// Who appends: blocks that the store writes, or live records moved out of a segment being emptied.
// Each has a segment of its own, so that writes can never take the room that a move needs.
enum class Stream : uint8_t { kWrite = 0, kMove = 1 };

// Which segment holds what, where the next record goes, which segment to empty.
//
// A segment is absent (no file), free, a head (appended to), sealed, or the victim being emptied.
// A sealed one is free again once nothing in it is live, uncommitted or pinned. Writes leave one
// free segment to moves, unless the head of the moves has room for all that the next victim holds;
// emptying a segment therefore always finds room.
// A pure state machine: no I/O, no clock. Thread-compatible.
class SegmentTable {
 public:
  struct Options {
    // Whole pages.
    uint64_t segment_bytes = 0;
    // Files that may exist; see LimitFiles.
    uint32_t segment_count = 0;
  };
  static constexpr uint32_t kSegmentCountMin = 5;

  struct Activation {
    SegmentHeader header;
    // The file is to be created, allocated and written over first.
    bool needs_prepare = false;
    // The segment continues behind its records; no header is to be written.
    bool is_reopened = false;
  };

  // Requires: segment_count >= kSegmentCountMin.
  explicit SegmentTable(const Options& options);

  // Loading, before anything else: a file that exists (header absent: unreadable), then the live
  // records, each within the segment, then FinishLoad.
  void LoadSegment(uint32_t segment_idx, const std::optional<SegmentHeader>& header, bool is_whole);
  void LoadRecord(const Location& at, uint64_t record_bytes);
  void FinishLoad();

  // Room in the stream's head, counted as live and uncommitted; nothing when there is no head or it
  // is too full.
  std::optional<Location> Place(Stream stream, uint64_t record_bytes);
  // Seals the head and takes another segment, to be made ready and announced with EndActivation.
  // Nothing when there is none to take now. `nonce` is random.
  std::optional<Activation> BeginActivation(Stream stream, uint64_t record_bytes, uint64_t nonce);
  // !is_ready: the segment goes back (`exists`: its file is there).
  void EndActivation(Stream stream, bool is_ready, bool exists);
  bool IsActivating(Stream stream) const { return heads_[Idx(stream)].activating.has_value(); }
  // After a failed write: nothing more goes into this segment before it is recycled.
  void SealIfHead(uint32_t segment_idx);

  // The end of a placed record's way: it stays (Commit), or never was (Abandon).
  void Commit(const Location& at);
  void Abandon(const Location& at, uint64_t record_bytes);
  // A committed record is not live any more.
  void Drop(const Location& at, uint64_t record_bytes);
  // The file system has room for so many files more: capacity and free_count follow, down only if
  // `may_lower`. Not counted below kSegmentCountMin files, nor below one more where none is free,
  // which moves need: whoever makes that one finds out.
  void LimitFiles(uint64_t more_count, bool may_lower);
  // The next activation makes a file, or leaves one to be made by moves.
  bool MayMakeFile() const { return free_.size() < 2 && file_count_ < file_limit_; }
  uint32_t file_limit() const { return file_limit_; }

  // Its file can be asked for: it is there, or was when it was last heard of.
  bool HasFile(uint32_t segment_idx) const;
  // Somebody took the file away. What is live in it is to be dropped; then it is absent, and its
  // number comes with the next TakeVanished. Requires: HasFile. False: that was known.
  bool LoseFile(uint32_t segment_idx);
  std::vector<uint32_t> TakeVanished() { return std::exchange(vanished_, {}); }

  // Keeps the segment from being recycled: for reads, and until deletes are durable.
  void Pin(uint32_t segment_idx);
  void Unpin(uint32_t segment_idx);

  // The sealed segment with the fewest live bytes whose emptying gains room; it becomes the victim.
  // `is_urgent` takes any gain, else it must be worth the moves. Nothing: none, or there is one
  // already.
  std::optional<uint32_t> PickVictim(bool is_urgent);
  bool CanPickVictim(bool is_urgent) const { return FindVictim(is_urgent).has_value(); }
  std::optional<uint32_t> victim() const { return victim_; }
  // Stops emptying. `is_bad`: it cannot be read, and is not picked again.
  void ReleaseVictim(bool is_bad);

  // Segments a head could take: free or absent.
  uint32_t free_count() const;
  // The next segment for writes is still to be won, and soon needed. Not earlier: while the head
  // fills, more of a victim goes by itself and need not be moved.
  bool wants_reclaim() const;
  // Something in flight will, or may, free room by itself.
  bool is_busy() const { return uncommitted_count_ + pin_count_ > 0; }
  uint64_t live_bytes() const { return live_bytes_; }
  uint32_t file_count() const { return file_count_; }
  // Segments are numbered below this.
  uint32_t segment_count() const { return static_cast<uint32_t>(segments_.size()); }
  // Record bytes that can be live while emptying segments still gains room.
  uint64_t capacity_bytes() const;
  uint64_t room_bytes() const { return options_.segment_bytes - kPageBytes; }
  uint64_t segment_live_bytes(uint32_t segment_idx) const;

 private:
  enum class State : uint8_t { kAbsent, kFree, kActivating, kHead, kSealed, kVictim };
  struct Segment {
    State state = State::kAbsent;
    // The file is whole and written over once.
    bool is_prepared = false;
    bool is_bad = false;
    // Its file is gone.
    bool is_missing = false;
    // Loaded with a good header: its rest can be appended to.
    bool is_reopenable = false;
    uint64_t sequence = 0;
    uint64_t nonce = 0;
    // Where the next record goes.
    uint64_t end_bytes = kPageBytes;
    // Bytes that emptying could bring back, live ones included.
    uint64_t filled_bytes = 0;
    uint64_t live_bytes = 0;
    uint32_t uncommitted_count = 0;
    uint32_t pin_count = 0;
  };
  struct Head {
    std::optional<uint32_t> segment_idx;
    std::optional<uint32_t> activating;
  };

  static size_t Idx(Stream stream) { return static_cast<size_t>(stream); }
  uint32_t reserve_count() const;
  std::optional<uint32_t> TakeFree();
  std::optional<uint32_t> FindReopenable(uint64_t record_bytes,
                                         std::optional<uint32_t> except) const;
  std::optional<uint32_t> FindVictim(bool is_urgent) const;
  uint64_t MoveRoom(uint32_t victim_idx) const;
  uint64_t MoveHeadRoom() const;
  bool MayWriteTakeFree() const;
  void Seal(Stream stream);
  void RecycleIfDone(uint32_t segment_idx);
  void Vanish(uint32_t segment_idx);

  const Options options_;
  std::vector<Segment> segments_;
  // Longest free first: wear is even, and a bad place is met rarely.
  std::deque<uint32_t> free_;
  std::vector<uint32_t> vanished_;
  Head heads_[2];
  std::optional<uint32_t> victim_;
  uint64_t next_sequence_ = 1;
  uint32_t file_limit_;
  uint32_t file_count_ = 0;
  uint64_t live_bytes_ = 0;
  uint64_t uncommitted_count_ = 0;
  uint64_t pin_count_ = 0;
};

}  // namespace kvtier::nvme
