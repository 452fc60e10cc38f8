// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace kvtier::nvme {

// How a power loss treats what was not synced. What reaches the disk is drawn at random: whole
// writes or pieces of them, and in each folder the first few of its changes of names.
enum class PowerLoss : uint8_t { kKeepsAll, kDropsAll, kDropsWrites, kTearsPages, kTearsSectors };
inline constexpr int kPowerLossCount = 5;

// What a disk holds for certain, and what was asked of it and may be there after a power loss: the
// memory behind the test of power losses. Syncing a file covers the writes that had ended when the
// sync started, and not the file's name: that takes a sync of its folder, as POSIX has it.
// Paths are relative to one root, "" is the root itself. A plain value, copied cheaply.
// Thread-compatible.
class DiskState {
 public:
  using NodeId = uint32_t;
  // Names the writes that a sync makes durable.
  struct Sync {
    NodeId node = 0;
    std::vector<uint64_t> write_ids;
  };

  DiskState();
  // Everything below `root`, durable.
  static DiskState Load(const std::string& root);

  bool Exists(const std::string& path) const { return Find(path) != nullptr; }
  void MakeFolder(const std::string& path);
  // A new, empty file, whatever had the name before.
  NodeId CreateFile(const std::string& path);
  NodeId FileAt(const std::string& path) const;
  void Rename(const std::string& from, const std::string& to);
  void Remove(const std::string& path);
  void SyncFolder(const std::string& path);

  // Asked for, in flight until EndWrite. Returns the write's id.
  uint64_t StartWrite(NodeId file, uint64_t offset_bytes, std::string_view bytes);
  // Makes the file this long if it is shorter.
  uint64_t StartAllocate(NodeId file, uint64_t end_bytes);
  void EndWrite(NodeId file, uint64_t write_id);
  Sync StartSync(NodeId file) const;
  void EndSync(const Sync& sync);

  // Writes what is there after a power loss to the folder `root`, which exists and is empty.
  void WriteAfterLoss(const std::string& root, PowerLoss loss, std::mt19937_64& random) const;

 private:
  struct Write {
    uint64_t id = 0;
    uint64_t offset_bytes = 0;
    uint64_t length_bytes = 0;
    // Empty: zeros.
    std::string bytes;
    bool only_extends = false;
  };
  struct PendingWrite {
    std::shared_ptr<const Write> write;
    bool has_ended = false;
  };
  // Immutable parts are shared between copies of the state.
  struct File {
    std::shared_ptr<const std::string> durable;
    std::vector<PendingWrite> pending;
  };
  using Names = std::map<std::string, NodeId>;
  struct NameChange {
    std::string removed;  // empty: none
    std::string added;    // empty: none
    NodeId node = 0;      // of `added`
  };
  struct Folder {
    Names durable;
    Names current;
    std::vector<NameChange> pending;
  };

  static void Change(Names& names, const NameChange& change);
  static void Apply(const Write& write, uint64_t from_bytes, uint64_t to_bytes, std::string& bytes);
  static void ApplyTorn(const Write& write, uint64_t piece_bytes, std::mt19937_64& random,
                        std::string& bytes);
  const NodeId* Find(const std::string& path) const;
  Folder& ParentOf(const std::string& path);
  void Record(Folder& folder, NameChange change);
  uint64_t AddWrite(NodeId file, Write write);
  void LoadFolder(const std::string& path, NodeId folder);
  void WriteFolder(const std::string& path, NodeId folder, PowerLoss loss,
                   std::mt19937_64& random) const;
  std::string FileAfterLoss(const File& file, PowerLoss loss, std::mt19937_64& random) const;

  std::map<NodeId, File> files_;
  std::map<NodeId, Folder> folders_;
  NodeId last_node_ = 0;
  uint64_t last_write_id_ = 0;
};

}  // namespace kvtier::nvme
