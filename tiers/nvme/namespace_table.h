// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "proto/base/check.h"
#include "proto/base/key.h"

namespace kvtier::nvme {

// Numbers that stand for namespaces, so that a million blocks do not hold a million copies of the
// same 32 bytes. A number is counted once for each block that holds it and given to another
// namespace when none does. Thread-compatible.
class NamespaceTable {
 public:
  // The number of `hash`, held once more.
  uint32_t Hold(const NamespaceHash& hash) {
    const auto [it, is_added] = idx_of_.try_emplace(hash, 0);
    if (is_added) it->second = Add(hash);
    ++namespaces_[it->second].holder_count;
    return it->second;
  }

  // Requires: held.
  void Release(uint32_t namespace_idx) {
    Namespace& released = namespaces_[namespace_idx];
    KVT_CHECK(released.holder_count > 0);
    if (--released.holder_count > 0) return;
    idx_of_.erase(released.hash);
    unused_.push_back(namespace_idx);
  }

  // Requires: held.
  const NamespaceHash& HashOf(uint32_t namespace_idx) const {
    KVT_CHECK(namespaces_[namespace_idx].holder_count > 0);
    return namespaces_[namespace_idx].hash;
  }

  size_t namespace_count() const { return idx_of_.size(); }

 private:
  struct Namespace {
    NamespaceHash hash;
    uint64_t holder_count = 0;
  };

  uint32_t Add(const NamespaceHash& hash) {
    if (unused_.empty()) {
      namespaces_.push_back({.hash = hash});
      return static_cast<uint32_t>(namespaces_.size() - 1);
    }
    const uint32_t namespace_idx = unused_.back();
    unused_.pop_back();
    namespaces_[namespace_idx].hash = hash;
    return namespace_idx;
  }

  std::vector<Namespace> namespaces_;
  std::vector<uint32_t> unused_;
  absl::flat_hash_map<NamespaceHash, uint32_t> idx_of_;
};

}  // namespace kvtier::nvme
