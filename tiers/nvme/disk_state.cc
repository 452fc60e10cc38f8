// SPDX-License-Identifier: Apache-2.0
#include "tiers/nvme/disk_state.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <utility>

#include "proto/base/check.h"
#include "tiers/nvme/record.h"

namespace kvtier::nvme {
namespace {

namespace fs = std::filesystem;

constexpr DiskState::NodeId kRoot = 0;
constexpr uint64_t kSectorBytes = 512;

std::string NameOf(const std::string& path) { return path.substr(path.rfind('/') + 1); }

bool IsZero(std::string_view bytes) {
  return std::all_of(bytes.begin(), bytes.end(), [](char byte) { return byte == 0; });
}

void WriteWhole(const std::string& path, const std::string& bytes) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  KVT_CHECK(file.flush().good());
}

}  // namespace

DiskState::DiskState() { folders_[kRoot] = {}; }

DiskState DiskState::Load(const std::string& root) {
  DiskState state;
  state.LoadFolder(root, kRoot);
  return state;
}

void DiskState::LoadFolder(const std::string& path, NodeId folder) {
  for (const auto& entry : fs::directory_iterator(path)) {
    const NodeId node = ++last_node_;
    const std::string name = entry.path().filename().string();
    folders_[folder].durable[name] = folders_[folder].current[name] = node;
    if (entry.is_directory()) {
      folders_[node] = {};
      LoadFolder(entry.path().string(), node);
    } else {
      std::stringstream bytes;
      bytes << std::ifstream(entry.path(), std::ios::binary).rdbuf();
      files_[node] = {.durable = std::make_shared<const std::string>(bytes.str()), .pending = {}};
    }
  }
}

const DiskState::NodeId* DiskState::Find(const std::string& path) const {
  const NodeId* node = &kRoot;
  std::istringstream names(path);
  for (std::string name; std::getline(names, name, '/');) {
    const auto folder = folders_.find(*node);
    if (folder == folders_.end()) return nullptr;
    const auto at = folder->second.current.find(name);
    if (at == folder->second.current.end()) return nullptr;
    node = &at->second;
  }
  return node;
}

DiskState::Folder& DiskState::ParentOf(const std::string& path) {
  const size_t slash = path.rfind('/');
  const NodeId* node = Find(slash == std::string::npos ? "" : path.substr(0, slash));
  KVT_CHECK(node != nullptr);
  return folders_.at(*node);
}

void DiskState::Change(Names& names, const NameChange& change) {
  if (!change.removed.empty()) names.erase(change.removed);
  if (!change.added.empty()) names[change.added] = change.node;
}

void DiskState::Record(Folder& folder, NameChange change) {
  Change(folder.current, change);
  folder.pending.push_back(std::move(change));
}

void DiskState::MakeFolder(const std::string& path) {
  if (Exists(path)) return;
  const NodeId node = ++last_node_;
  folders_[node] = {};
  Record(ParentOf(path), {.removed = "", .added = NameOf(path), .node = node});
}

DiskState::NodeId DiskState::CreateFile(const std::string& path) {
  const NodeId node = ++last_node_;
  files_[node] = {.durable = std::make_shared<const std::string>(), .pending = {}};
  Record(ParentOf(path), {.removed = "", .added = NameOf(path), .node = node});
  return node;
}

DiskState::NodeId DiskState::FileAt(const std::string& path) const {
  const NodeId* node = Find(path);
  KVT_CHECK(node != nullptr && files_.contains(*node));
  return *node;
}

void DiskState::Rename(const std::string& from, const std::string& to) {
  const NodeId* node = Find(from);
  KVT_CHECK(node != nullptr && &ParentOf(from) == &ParentOf(to));
  Record(ParentOf(from), {.removed = NameOf(from), .added = NameOf(to), .node = *node});
}

void DiskState::Remove(const std::string& path) {
  if (!Exists(path)) return;
  Record(ParentOf(path), {.removed = NameOf(path), .added = "", .node = 0});
}

void DiskState::SyncFolder(const std::string& path) {
  const NodeId* node = Find(path);
  KVT_CHECK(node != nullptr);
  Folder& folder = folders_.at(*node);
  folder.durable = folder.current;
  folder.pending.clear();
}

uint64_t DiskState::AddWrite(NodeId file, Write write) {
  write.id = ++last_write_id_;
  files_.at(file).pending.push_back({.write = std::make_shared<const Write>(std::move(write))});
  return last_write_id_;
}

uint64_t DiskState::StartWrite(NodeId file, uint64_t offset_bytes, std::string_view bytes) {
  return AddWrite(file, {.id = 0,
                         .offset_bytes = offset_bytes,
                         .length_bytes = bytes.size(),
                         .bytes = IsZero(bytes) ? std::string() : std::string(bytes),
                         .only_extends = false});
}

uint64_t DiskState::StartAllocate(NodeId file, uint64_t end_bytes) {
  return AddWrite(
      file,
      {.id = 0, .offset_bytes = 0, .length_bytes = end_bytes, .bytes = {}, .only_extends = true});
}

void DiskState::EndWrite(NodeId file, uint64_t write_id) {
  for (PendingWrite& pending : files_.at(file).pending) {
    if (pending.write->id == write_id) pending.has_ended = true;
  }
}

DiskState::Sync DiskState::StartSync(NodeId file) const {
  Sync sync{.node = file, .write_ids = {}};
  for (const PendingWrite& pending : files_.at(file).pending) {
    if (pending.has_ended) sync.write_ids.push_back(pending.write->id);
  }
  return sync;
}

void DiskState::EndSync(const Sync& sync) {
  File& file = files_.at(sync.node);
  std::string bytes = *file.durable;
  std::erase_if(file.pending, [&](const PendingWrite& pending) {
    const Write& write = *pending.write;
    if (std::find(sync.write_ids.begin(), sync.write_ids.end(), write.id) == sync.write_ids.end()) {
      return false;
    }
    Apply(write, 0, write.length_bytes, bytes);
    return true;
  });
  file.durable = std::make_shared<const std::string>(std::move(bytes));
}

// Bytes from_bytes to to_bytes of the write.
void DiskState::Apply(const Write& write, uint64_t from_bytes, uint64_t to_bytes,
                      std::string& bytes) {
  const uint64_t end_bytes = write.offset_bytes + to_bytes;
  if (bytes.size() < end_bytes) bytes.resize(end_bytes);
  if (write.only_extends) return;
  char* const target = bytes.data() + write.offset_bytes + from_bytes;
  if (write.bytes.empty()) {
    std::memset(target, 0, to_bytes - from_bytes);
  } else {
    std::memcpy(target, write.bytes.data() + from_bytes, to_bytes - from_bytes);
  }
}

void DiskState::ApplyTorn(const Write& write, uint64_t piece_bytes, std::mt19937_64& random,
                          std::string& bytes) {
  for (uint64_t from_bytes = 0; from_bytes < write.length_bytes;) {
    // Pieces of the disk, not of the write.
    const uint64_t at_bytes = write.offset_bytes + from_bytes;
    const uint64_t rest_bytes = piece_bytes - at_bytes % piece_bytes;
    const uint64_t to_bytes = std::min(from_bytes + rest_bytes, write.length_bytes);
    if (random() % 2 == 0) Apply(write, from_bytes, to_bytes, bytes);
    from_bytes = to_bytes;
  }
}

std::string DiskState::FileAfterLoss(const File& file, PowerLoss loss,
                                     std::mt19937_64& random) const {
  std::string bytes = *file.durable;
  for (const PendingWrite& pending : file.pending) {
    const Write& write = *pending.write;
    switch (loss) {
      case PowerLoss::kKeepsAll:
        Apply(write, 0, write.length_bytes, bytes);
        break;
      case PowerLoss::kDropsAll:
        break;
      case PowerLoss::kDropsWrites:
        if (random() % 2 == 0) Apply(write, 0, write.length_bytes, bytes);
        break;
      case PowerLoss::kTearsPages:
        ApplyTorn(write, kPageBytes, random, bytes);
        break;
      case PowerLoss::kTearsSectors:
        ApplyTorn(write, kSectorBytes, random, bytes);
        break;
    }
  }
  return bytes;
}

void DiskState::WriteFolder(const std::string& path, NodeId folder, PowerLoss loss,
                            std::mt19937_64& random) const {
  const Folder& at = folders_.at(folder);
  Names names = at.durable;
  size_t kept_count = random() % (at.pending.size() + 1);
  if (loss == PowerLoss::kKeepsAll) kept_count = at.pending.size();
  if (loss == PowerLoss::kDropsAll) kept_count = 0;
  for (size_t i = 0; i < kept_count; ++i) Change(names, at.pending[i]);
  for (const auto& [name, node] : names) {
    const std::string below = path + "/" + name;
    if (const auto file = files_.find(node); file != files_.end()) {
      WriteWhole(below, FileAfterLoss(file->second, loss, random));
    } else {
      fs::create_directory(below);
      WriteFolder(below, node, loss, random);
    }
  }
}

void DiskState::WriteAfterLoss(const std::string& root, PowerLoss loss,
                               std::mt19937_64& random) const {
  WriteFolder(root, kRoot, loss, random);
}

}  // namespace kvtier::nvme
