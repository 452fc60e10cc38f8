// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "daemon/handle_server.h"
#include "daemon/hash_domains.h"
#include "daemon/live_calls.h"
#include "daemon/session_table.h"
#include "daemon/store.h"
#include "daemon/tenant_rates.h"
#include "daemon/tenants.h"

namespace kvtier {

inline constexpr uint32_t kHeartbeatMs = 1000;
inline constexpr uint32_t kWatchBeatMs = 10;

// What the calls of the engine-facing service work with. Not owned; outlives every call.
struct ServiceContext {
  uint64_t epoch = 0;
  // Write and Read streams at once.
  uint32_t data_streams_max = 64;
  Store* store = nullptr;
  // Null for the service on TCP, whose callers map nothing and are known by their certificates.
  HandleServer* handles = nullptr;
  const TenantTable* tenants = nullptr;
  SessionTable* sessions = nullptr;
  HashDomains* hash_domains = nullptr;
  // One for all services: a tenant has its rate once. Null: no limits.
  TenantRates* rates = nullptr;
  // OpenSession streams.
  LiveCalls* session_calls = nullptr;
  // Write and Read streams.
  LiveCalls* data_calls = nullptr;
  // Watch streams; its beat is how late events come.
  LiveCalls* watch_calls = nullptr;

  bool is_tcp() const { return handles == nullptr; }
};

}  // namespace kvtier
