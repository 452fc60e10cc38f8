// SPDX-License-Identifier: Apache-2.0
//
// The inside of NvmeTier. A block's way in: Write -> a checking thread: checksum -> I/O thread:
// place, write -> fdatasync for the whole group -> index thread: one synced RocksDB batch -> done.
// Its way out: Read -> I/O thread: read, header -> a checking thread: checksum -> done.
// nvme_tier.cc has the public calls, nvme_io.cc the I/O thread's transfers, nvme_memory.cc its
// registered memory, nvme_reclaim.cc its upkeep (activation, moves, healing), nvme_commit.cc the
// index thread, nvme_scrub.cc the scrub thread, nvme_recover.cc start.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "proto/base/timed_wait.h"
#include "tiers/nvme/block_index.h"
#include "tiers/nvme/data_dir.h"
#include "tiers/nvme/io_engine.h"
#include "tiers/nvme/nvme_tier.h"
#include "tiers/nvme/page_pool.h"
#include "tiers/nvme/record.h"
#include "tiers/nvme/replica_table.h"
#include "tiers/nvme/segment_table.h"
#include "tiers/nvme/storage.h"
#include "tiers/nvme/worker_pool.h"
#include "tiers/nvme/write_budget.h"

namespace kvtier {

class NvmeTier::Impl final : public SegmentObserver {
 public:
  explicit Impl(const NvmeOptions& options)
      : options_(options), budget_(options.write_bytes_per_day_max) {}
  ~Impl() override { Close(); }

  // What NvmeTier's functions of these names say.
  absl::Status Open();
  absl::StatusOr<ReplicaId> Reserve(uint32_t payload_bytes);
  void Free(ReplicaId replica_id);
  uint64_t FootprintBytes(uint32_t payload_bytes) const;
  TierUsage Usage() const;
  void Write(ReplicaId replica_id, const BlockMeta& meta, std::span<const std::byte> source,
             Done done);
  enum class Urgency : uint8_t { kDemand, kAhead };
  // Read, or ReadAhead.
  void Read(ReplicaId replica_id, const BlockMeta& meta, std::span<std::byte> target,
            Urgency urgency, Done done);
  void Expedite(ReplicaId replica_id);
  absl::Status Recover(const std::function<void(const BlockMeta&, ReplicaId)>& found);
  TierHealth Health() const;
  NvmeStats Stats() const;
  void Close();

  // SegmentObserver.
  void OnMapped(std::span<std::byte> segment) override;
  void OnUnmapping(std::span<std::byte> segment) override;

 private:
  using Location = nvme::Location;
  using Replica = nvme::Replica;
  using ReplicaState = nvme::ReplicaState;
  using Stream = nvme::Stream;
  using Clock = std::chrono::steady_clock;

  // The checksum of a payload up to this is taken by the I/O thread: handing it over costs more.
  static constexpr uint32_t kCheckedHereBytesMax = 32 << 10;

  struct WriteRequest {
    ReplicaId replica_id = kNoReplica;
    BlockMeta meta;
    std::span<const std::byte> source;
    Done done;
    // What a checking thread found; nothing: the I/O thread checks.
    std::optional<absl::Status> check = {};
  };
  struct ReadRequest {
    ReplicaId replica_id = kNoReplica;
    BlockMeta meta;
    std::span<std::byte> target;
    Urgency urgency = Urgency::kDemand;
    Done done;
  };
  // A record that is written, on its way to be durable and then indexed.
  struct Commit {
    ReplicaId replica_id = kNoReplica;
    BlockMeta meta;
    Location at;
    bool is_move = false;
    // An index write that may have happened has failed.
    bool was_attempted = false;
    Done done;  // of a write
  };
  // A live record on its way from the victim to another segment.
  struct Move {
    ReplicaId replica_id = kNoReplica;
    BlockMeta meta;
    nvme::PageMemory record;
    Move(ReplicaId id, uint64_t record_bytes) : replica_id(id), record(record_bytes) {}
  };
  // An index entry to take away; its segment is pinned until that is durable.
  struct Removal {
    nvme::IndexRemoval removal;
    uint32_t segment_idx = 0;
    ReplicaId replica_id = kNoReplica;  // to be forgotten then, if any
  };
  struct Finished {
    Done done;
    absl::Status status;
    bool is_write = false;
    // Payload that a read gave out.
    uint64_t useful_bytes = 0;
  };
  struct ReadJob;
  struct WriteJob;
  struct ActivationJob;
  struct CommitBatch;

  // nvme_tier.cc
  void Finish(Finished finished) ABSL_LOCKS_EXCLUDED(mutex_);
  void Degrade(const absl::Status& reason) ABSL_LOCKS_EXCLUDED(mutex_);
  // For the I/O thread, which whoever brings the first of it wakes.
  bool HasNewWork() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return !new_reads_.empty() || !new_writes_.empty() || !expedited_.empty();
  }
  // True when nothing was queued for the I/O thread: it has to be woken.
  bool QueueWrite(WriteRequest request) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // On a checking thread.
  void CheckWrite(WriteRequest request);
  int Fault(NvmeFaultPoint point) const { return hook_ ? hook_(point) : 0; }
  nvme::Storage& storage() const {
    return options_.storage != nullptr ? *options_.storage : nvme::Storage::Plain();
  }
  uint64_t RoomBytes() const { return segment_bytes_ - nvme::kPageBytes; }

  // nvme_io.cc; all on the I/O thread.
  absl::StatusOr<std::unique_ptr<nvme::IoEngine>> MakeEngine();
  absl::Status StartEngine();
  void IoMain();
  bool TakeQueues();
  void TakeExpedited() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Submit(std::unique_ptr<nvme::IoOp> op);
  void StartReads();
  // Takes the first of one of the queues of reads.
  void StartNextRead(std::deque<ReadRequest>& queue);
  void StartRead(ReadRequest request, const Location& at);
  void EndRead(std::unique_ptr<ReadJob> job, int64_t result);
  void StartWrites();
  absl::Status CheckHeader(const ReadJob& job, int64_t result);
  static absl::Status CheckSource(const WriteRequest& request);
  void StartWrite(WriteRequest request, const Location& at);
  void EndWrite(WriteJob& job, int64_t result);
  void RefuseWrite(WriteRequest request, absl::Status status);
  void EndCheckedRead(ReadJob& job);
  // In flight, of callers who wait.
  int demand_count() const { return transfer_count_ - background_count_ - ahead_count_; }
  // One more read ahead may be in flight, were it alone in the queue.
  bool IsRoomAhead() const;
  // Places for writes and moves that may be taken now.
  int BackgroundDepth() const;
  // What the engine reported for a record; -EIO when its segment has no header.
  int64_t ResultInSegment(uint32_t segment_idx, int64_t result) const;
  void StartSync();
  void SyncNext();
  void FailGroup(std::vector<Commit> group, const absl::Status& status);

  // nvme_memory.cc; all on the I/O thread.
  void ServeMemory();
  void LetGoOfMemory(std::span<std::byte> memory);
  void NoteEngine();
  void ReleaseMemory(std::span<std::byte> memory);
  void ReleaseAllMemory();

  // nvme_reclaim.cc; all on the I/O thread.
  void StartActivation(Stream stream, const nvme::SegmentTable::Activation& activation);
  void ZeroNext(std::unique_ptr<ActivationJob> job);
  void WriteSegmentHeader(std::unique_ptr<ActivationJob> job);
  void EndSegmentHeader(uint32_t segment_idx, int64_t result);
  void FailActivation(const ActivationJob& job, const absl::Status& status);
  void StartMoves();
  void RefillMoves(uint32_t victim_idx) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void StartMoveRead(std::unique_ptr<Move> move, const Location& at);
  void EndMoveRead(std::unique_ptr<Move> move, const Location& at, int64_t result);
  void LoseReplica(ReplicaId replica_id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  nvme::IndexRemoval RemovalOf(const Replica& replica) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void StartMoveWrites();
  void StartMoveWrite(std::unique_ptr<Move> move, const Location& at);
  void EndMove(ReplicaId replica_id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void StopMoves(bool victim_is_bad) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // What others may do to the file system, and to our files, is looked at now and then.
  void LookAround();
  void RefreshRoom(bool may_lower);
  // Closes the descriptors of files that somebody deleted, once nothing uses them any more.
  void ForgetVanished() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void MaybeHeal();
  void HealProbe();
  void HealGrow();
  void HealIndex();
  void EndHeal(const absl::Status& status);

  // nvme_commit.cc; all on the index thread, KeepSpent after its end, too.
  void IndexMain();
  bool IndexHasWork() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  CommitBatch TakeBatch() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status ApplyBatch(const CommitBatch& batch);
  void EndBatch(CommitBatch& batch) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void FailBatch(CommitBatch& batch, const absl::Status& status)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void EndCommit(const Commit& commit) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void ProbeIndex();
  void RefreshPhysicalBytes();
  void LookForMissingSegments();
  // Drops what is in a segment whose file is gone. The blocks.
  std::vector<std::pair<NamespaceHash, Key>> LoseSegment(uint32_t segment_idx)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void KeepSpent(bool is_due_only) ABSL_LOCKS_EXCLUDED(mutex_);

  // nvme_scrub.cc; CountWritten and Now on any thread, the others on the scrub's.
  void CountWritten(uint64_t bytes) ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Time Now() const;
  void ScrubMain();
  bool ScrubRound();
  bool ScrubPause(absl::Duration duration) ABSL_LOCKS_EXCLUDED(mutex_);
  bool ScrubSegment(uint32_t segment_idx);
  uint64_t ScrubReplica(int fd, uint32_t segment_idx, ReplicaId replica_id, uint64_t& lost_count);
  static bool IsScrubbable(const Replica& replica, uint32_t segment_idx);
  static absl::StatusOr<bool> VerifyRecord(int fd, const Replica& expected,
                                           const NamespaceHash& namespace_hash,
                                           const nvme::PageMemory& record);

  // nvme_recover.cc; before the threads have work.
  absl::Status OpenIndex();
  absl::Status OpenDatabase();
  absl::Status RebuildIndex(const absl::Status& why);
  absl::Status FillIndexFromSegments();
  void ChooseSegmentBytes();
  absl::Status StartThreads();
  absl::StatusOr<std::vector<nvme::IndexEntry>> LoadEntries(
      std::vector<nvme::IndexRemoval>& dropped);
  bool IsPossible(const nvme::IndexEntry& entry) const;
  absl::Status DropExcessSegments(std::vector<nvme::IndexEntry>& entries,
                                  std::vector<nvme::IndexRemoval>& dropped);
  void DropExcessEntries(std::vector<nvme::IndexEntry>& entries, uint64_t capacity_bytes,
                         std::vector<nvme::IndexRemoval>& dropped) const;
  uint64_t IndexBufferBytes() const;
  // Room for the index of a tier of this capacity.
  uint64_t IndexBytes(uint64_t capacity_bytes) const;
  absl::Status CheckSegmentCount(uint64_t segment_count, uint64_t index_bytes) const;
  nvme::WriteBudget::Spent FindSpent();

  const NvmeOptions options_;
  std::function<int(NvmeFaultPoint)> hook_;
  std::unique_ptr<nvme::DataDir> dir_;
  std::unique_ptr<nvme::BlockIndex> index_;
  std::map<uint32_t, nvme::DataDir::SegmentFile> files_;  // until Recover
  uint64_t segment_bytes_ = 0;
  uint32_t segment_count_ = 0;
  uint64_t recovered_count_ = 0;
  uint64_t dropped_count_ = 0;
  bool is_rebuilt_ = false;
  // What the segments tell of the bytes written today, if is_rebuilt_.
  uint64_t rebuilt_spent_bytes_ = 0;

  mutable absl::Mutex mutex_;
  bool is_recovered_ ABSL_GUARDED_BY(mutex_) = false;
  bool is_closing_ ABSL_GUARDED_BY(mutex_) = false;
  // is_closing_, for the scrub, which waits for it.
  TimedNotification scrub_end_;
  bool is_io_done_ ABSL_GUARDED_BY(mutex_) = false;
  std::optional<absl::Status> engine_made_ ABSL_GUARDED_BY(mutex_);
  std::string engine_name_ ABSL_GUARDED_BY(mutex_);
  uint64_t registered_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  std::unique_ptr<nvme::SegmentTable> segments_ ABSL_GUARDED_BY(mutex_);
  nvme::ReplicaTable replicas_ ABSL_GUARDED_BY(mutex_);
  uint64_t used_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t physical_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t moved_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t sync_count_ ABSL_GUARDED_BY(mutex_) = 0;
  nvme::WriteBudget budget_ ABSL_GUARDED_BY(mutex_);
  uint64_t written_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t useful_read_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t scrubbed_count_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t scrub_lost_count_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t scrub_round_count_ ABSL_GUARDED_BY(mutex_) = 0;
  TierHealth health_ ABSL_GUARDED_BY(mutex_);
  // Accepted and not done.
  int read_count_ ABSL_GUARDED_BY(mutex_) = 0;
  int write_count_ ABSL_GUARDED_BY(mutex_) = 0;
  std::deque<ReadRequest> new_reads_ ABSL_GUARDED_BY(mutex_);
  std::deque<WriteRequest> new_writes_ ABSL_GUARDED_BY(mutex_);
  // Of reads ahead that somebody waits for now.
  std::vector<ReplicaId> expedited_ ABSL_GUARDED_BY(mutex_);
  // Writes that a checking thread has.
  int check_count_ ABSL_GUARDED_BY(mutex_) = 0;
  // What is to be registered, and what must be let go of; somebody waits for the latter.
  std::deque<std::span<std::byte>> coming_memory_ ABSL_GUARDED_BY(mutex_);
  std::deque<std::span<std::byte>> leaving_memory_ ABSL_GUARDED_BY(mutex_);
  // Of the latter, asked for and done so far.
  uint64_t leaving_memory_count_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t left_memory_count_ ABSL_GUARDED_BY(mutex_) = 0;
  // For the index thread.
  std::vector<Commit> commits_ ABSL_GUARDED_BY(mutex_);
  std::vector<Commit> stalled_moves_ ABSL_GUARDED_BY(mutex_);
  std::vector<ReplicaId> frees_ ABSL_GUARDED_BY(mutex_);
  std::vector<Removal> removals_ ABSL_GUARDED_BY(mutex_);
  bool is_index_failed_ ABSL_GUARDED_BY(mutex_) = false;
  bool is_index_probe_wanted_ ABSL_GUARDED_BY(mutex_) = false;
  bool is_look_wanted_ ABSL_GUARDED_BY(mutex_) = false;
  std::optional<absl::Status> index_probe_result_ ABSL_GUARDED_BY(mutex_);
  // Moves between the start of their read and their end.
  int move_count_ ABSL_GUARDED_BY(mutex_) = 0;

  // The I/O thread's own.
  std::unique_ptr<nvme::IoEngine> engine_;  // Wake: any thread
  std::deque<ReadRequest> reads_;
  std::deque<ReadRequest> reads_ahead_;
  std::deque<WriteRequest> writes_;
  std::vector<nvme::IoEngine::Completion> injected_;
  // Why it is not the better one.
  std::string engine_note_;
  std::unique_ptr<nvme::PagePool> pages_;
  std::vector<std::span<std::byte>> registered_;
  int transfer_count_ = 0;    // reads and writes of records
  int background_count_ = 0;  // of these, all but the reads of callers
  int ahead_count_ = 0;       // of these, the reads of callers that began as reads ahead
  uint64_t ahead_bytes_ = 0;  // of their payloads
  int op_count_ = 0;          // all operations
  bool is_write_waiting_ = false;
  // Something changed that an earlier step of this round has looked at.
  bool wants_another_round_ = false;
  // Segments whose header is being written, and those whose header could not be.
  std::vector<uint32_t> opening_;
  std::vector<uint32_t> headless_;
  std::vector<Commit> written_;
  std::vector<Commit> sync_group_;
  std::vector<uint32_t> sync_segments_;
  std::deque<ReplicaId> move_queue_;
  std::deque<std::unique_ptr<Move>> moves_ready_;
  uint64_t move_bytes_ = 0;
  std::optional<nvme::PageMemory> zeros_;
  std::optional<nvme::PageMemory> probe_page_;
  std::mt19937_64 random_{std::random_device{}()};
  bool is_healing_ = false;
  bool has_grow_failed_ = false;
  Clock::time_point next_heal_;
  Clock::time_point next_room_;
  Clock::time_point next_look_;
  bool has_said_limit_ = false;

  // The index thread's own.
  Clock::time_point next_refresh_;
  uint32_t next_looked_at_ = 0;

  std::unique_ptr<nvme::WorkerPool> checkers_;
  std::jthread io_thread_;
  std::jthread index_thread_;
  std::jthread scrub_thread_;
};

}  // namespace kvtier
