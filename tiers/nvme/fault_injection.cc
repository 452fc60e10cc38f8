// SPDX-License-Identifier: Apache-2.0
#include "tiers/nvme/fault_injection.h"

#include <unistd.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <optional>
#include <random>
#include <sstream>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/synchronization/mutex.h"
#include "proto/base/status_util.h"
#include "tiers/nvme/failing_storage.h"
#include "tiers/nvme/record.h"
#include "tiers/nvme/recording_storage.h"

namespace kvtier::nvme {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kPowerOffStatus = 137;

enum class FaultKind : uint8_t { kNone, kError, kShort, kTorn, kCorrupt, kSlow };

struct Fault {
  FaultKind kind = FaultKind::kNone;
  int error = 0;
  int delay_ms = 0;
};

struct Rule {
  IoKind operation = IoKind::kRead;
  uint64_t first = 0;
  uint64_t last = 0;
  Fault fault;
};

struct Plan {
  std::vector<Rule> rules;
  std::optional<uint64_t> full_bytes;
  std::optional<uint64_t> index_write_count;
  std::optional<uint64_t> power_off_sync;
};

std::optional<uint64_t> NumberIn(std::string_view text) {
  uint64_t number = 0;
  const auto [end, error] = std::from_chars(text.begin(), text.end(), number);
  if (error != std::errc() || end != text.end()) return std::nullopt;
  return number;
}

std::optional<IoKind> OperationIn(std::string_view word) {
  if (word == "read") return IoKind::kRead;
  if (word == "write") return IoKind::kWrite;
  if (word == "sync") return IoKind::kSync;
  if (word == "allocate") return IoKind::kAllocate;
  return std::nullopt;
}

// "3", "3-5" or "3-".
bool ParseNumbers(std::string_view word, Rule& rule) {
  const size_t dash = std::min(word.find('-'), word.size());
  const auto first = NumberIn(word.substr(0, dash));
  if (!first || *first == 0) return false;
  rule.first = rule.last = *first;
  if (dash == word.size()) return true;
  const std::string_view rest = word.substr(dash + 1);
  const auto last = rest.empty() ? std::optional(UINT64_MAX) : NumberIn(rest);
  if (!last || *last < *first) return false;
  rule.last = *last;
  return true;
}

bool ParseFault(const std::vector<std::string>& words, Rule& rule) {
  constexpr std::pair<std::string_view, int> kErrors[] = {
      {"EIO", EIO}, {"ENOSPC", ENOSPC}, {"EROFS", EROFS}, {"ENOMEM", ENOMEM}};
  const std::string_view name = words[2];
  const bool is_slow = name == "slow";
  if (words.size() != (is_slow ? 4 : 3)) return false;
  for (const auto& [text, error] : kErrors) {
    if (name == text) rule.fault = {.kind = FaultKind::kError, .error = error};
  }
  const bool is_read = rule.operation == IoKind::kRead;
  if (name == "short" && is_read) rule.fault.kind = FaultKind::kShort;
  if (name == "corrupt" && is_read) rule.fault.kind = FaultKind::kCorrupt;
  if (name == "torn" && rule.operation == IoKind::kWrite) rule.fault.kind = FaultKind::kTorn;
  if (is_slow) {
    const auto delay_ms = NumberIn(words[3]);
    if (!delay_ms || *delay_ms > 60'000) return false;
    rule.fault = {.kind = FaultKind::kSlow, .delay_ms = static_cast<int>(*delay_ms)};
  }
  return rule.fault.kind != FaultKind::kNone;
}

bool ParseRule(const std::vector<std::string>& words, Plan& plan) {
  if (words.size() == 2 && words[0] == "full") {
    plan.full_bytes = NumberIn(words[1]);
    return plan.full_bytes.has_value();
  }
  if (words.size() < 3) return false;
  if (words.size() == 3 && words[0] == "index" && words[2] == "full") {
    plan.index_write_count = NumberIn(words[1]);
    return plan.index_write_count.has_value();
  }
  if (words.size() == 3 && words[0] == "sync" && words[2] == "power-off") {
    plan.power_off_sync = NumberIn(words[1]);
    return plan.power_off_sync.value_or(0) > 0;
  }
  Rule rule;
  const auto operation = OperationIn(words[0]);
  if (!operation) return false;
  rule.operation = *operation;
  if (!ParseNumbers(words[1], rule) || !ParseFault(words, rule)) return false;
  plan.rules.push_back(rule);
  return true;
}

absl::StatusOr<Plan> ParsePlan(std::string_view text) {
  Plan plan;
  std::istringstream rules{std::string(text)};
  for (std::string line; std::getline(rules, line, ';');) {
    std::vector<std::string> words;
    std::istringstream in(line);
    for (std::string word; in >> word;) words.push_back(word);
    if (words.empty()) continue;
    if (!ParseRule(words, plan)) return Invalid("no such fault: \"%s\"", line);
  }
  const bool has_others =
      !plan.rules.empty() || plan.full_bytes.has_value() || plan.index_write_count.has_value();
  if (plan.power_off_sync.has_value() && has_others) {
    return Invalid("power-off stands alone");
  }
  return plan;
}

// Says what happens to each operation. Thread-safe.
class FaultCounter {
 public:
  explicit FaultCounter(Plan plan) : plan_(std::move(plan)) {}

  Fault Next(const IoOp& op) {
    absl::MutexLock lock(&mutex_);
    if (const std::optional<Fault> full = TakeRoom(op)) return *full;
    const uint64_t number = ++counts_[static_cast<size_t>(op.kind)];
    for (const Rule& rule : plan_.rules) {
      if (rule.operation == op.kind && rule.first <= number && number <= rule.last) {
        return rule.fault;
      }
    }
    return {};
  }

 private:
  std::optional<Fault> TakeRoom(const IoOp& op) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const bool takes_room = op.kind == IoKind::kWrite || op.kind == IoKind::kAllocate;
    if (!plan_.full_bytes || !takes_room) return std::nullopt;
    if (used_bytes_ + op.total_bytes <= *plan_.full_bytes) {
      used_bytes_ += op.total_bytes;
      return std::nullopt;
    }
    return Fault{.kind = FaultKind::kError, .error = ENOSPC};
  }

  const Plan plan_;
  absl::Mutex mutex_;
  std::array<uint64_t, 4> counts_ ABSL_GUARDED_BY(mutex_) = {};
  uint64_t used_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
};

class FaultyEngine final : public IoEngine {
 public:
  FaultyEngine(std::unique_ptr<IoEngine> engine, FaultCounter& counter)
      : engine_(std::move(engine)), counter_(counter) {}

  std::string_view name() const override { return engine_->name(); }
  std::string Description() const override { return engine_->Description(); }
  void RegisterMemory(std::span<std::byte> memory) override { engine_->RegisterMemory(memory); }
  uint64_t registered_bytes() const override { return engine_->registered_bytes(); }
  void UnregisterMemory(std::span<std::byte> memory) override { engine_->UnregisterMemory(memory); }
  void Wake() override { engine_->Wake(); }

  void Submit(std::unique_ptr<IoOp> op) override {
    const Fault fault = counter_.Next(*op);
    switch (fault.kind) {
      case FaultKind::kNone:
        engine_->Submit(std::move(op));
        break;
      case FaultKind::kError:
        ended_.push_back({.op = std::move(op), .result = -fault.error});
        break;
      case FaultKind::kSlow:
        delayed_.emplace_back(Clock::now() + std::chrono::milliseconds(fault.delay_ms),
                              std::move(op));
        break;
      case FaultKind::kTorn: {
        std::unique_ptr<IoOp> half = HalfOf(*op);
        if (half == nullptr) {
          const auto result = static_cast<int64_t>(op->total_bytes);
          ended_.push_back({.op = std::move(op), .result = result});
          break;
        }
        torn_.emplace(half.get(), std::move(op));
        engine_->Submit(std::move(half));
        break;
      }
      case FaultKind::kShort:
      case FaultKind::kCorrupt:
        spoilt_.emplace(op.get(), fault.kind);
        engine_->Submit(std::move(op));
        break;
    }
  }

  std::vector<Completion> Wait(int timeout_ms) override {
    const int next_ms = SubmitDue();
    if (next_ms >= 0) timeout_ms = std::min(timeout_ms, next_ms);
    std::vector<Completion> completed = engine_->Wait(ended_.empty() ? timeout_ms : 0);
    for (Completion& completion : completed) Spoil(completion);
    for (Completion& completion : std::exchange(ended_, {})) {
      completed.push_back(std::move(completion));
    }
    return completed;
  }

 private:
  // The first half of its pages; null: there is none.
  static std::unique_ptr<IoOp> HalfOf(const IoOp& op) {
    const uint64_t half_bytes = op.total_bytes / 2 / kPageBytes * kPageBytes;
    if (half_bytes == 0) return nullptr;
    auto half = std::make_unique<IoOp>();
    half->kind = op.kind;
    half->fd = op.fd;
    half->offset_bytes = op.offset_bytes;
    for (int i = 0; i < op.buffer_count && half->total_bytes < half_bytes; ++i) {
      const iovec& buffer = op.buffers[i];
      half->AddBuffer(buffer.iov_base,
                      std::min<size_t>(buffer.iov_len, half_bytes - half->total_bytes));
    }
    return half;
  }

  // Milliseconds until the next is due; -1: none waits.
  int SubmitDue() {
    const Clock::time_point now = Clock::now();
    int next_ms = -1;
    for (auto& [at, op] : delayed_) {
      if (at <= now) {
        engine_->Submit(std::move(op));
        continue;
      }
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(at - now).count();
      next_ms = next_ms < 0 ? static_cast<int>(left) : std::min(next_ms, static_cast<int>(left));
    }
    std::erase_if(delayed_, [](const auto& delayed) { return delayed.second == nullptr; });
    return next_ms;
  }

  void Spoil(Completion& completion) {
    if (const auto torn = torn_.find(completion.op.get()); torn != torn_.end()) {
      if (completion.result >= 0) {
        completion.result = static_cast<int64_t>(torn->second->total_bytes);
      }
      std::unique_ptr<IoOp> whole = std::move(torn->second);
      torn_.erase(torn);
      completion.op = std::move(whole);
      return;
    }
    const auto spoilt = spoilt_.find(completion.op.get());
    if (spoilt == spoilt_.end()) return;
    const FaultKind kind = spoilt->second;
    spoilt_.erase(spoilt);
    if (completion.result <= 0) return;
    if (kind == FaultKind::kShort) {
      completion.result /= 2;
    } else {
      const iovec& last = completion.op->buffers[completion.op->buffer_count - 1];
      *static_cast<std::byte*>(last.iov_base) ^= std::byte{1};
    }
  }

  const std::unique_ptr<IoEngine> engine_;
  FaultCounter& counter_;
  std::vector<Completion> ended_;
  std::vector<std::pair<Clock::time_point, std::unique_ptr<IoOp>>> delayed_;
  // By the half that is under way.
  absl::flat_hash_map<const IoOp*, std::unique_ptr<IoOp>> torn_;
  absl::flat_hash_map<const IoOp*, FaultKind> spoilt_;
};

// Segments fail by the plan, RocksDB's files by FailingStorage.
class FaultyStorage final : public Storage {
 public:
  explicit FaultyStorage(const Plan& plan) : counter_(plan) {
    if (plan.index_write_count) index_.FillUpAfter(*plan.index_write_count);
  }
  std::unique_ptr<IoEngine> WrapEngine(std::unique_ptr<IoEngine> engine) override {
    return std::make_unique<FaultyEngine>(std::move(engine), counter_);
  }
  rocksdb::Env* index_env() override { return index_.index_env(); }

 private:
  FaultCounter counter_;
  FailingStorage index_;
};

// Ends the process at its Nth sync.
class PowerSwitch {
 public:
  PowerSwitch(std::string dir, uint64_t sync_number)
      : dir_(std::move(dir)), calls_left_(2 * sync_number) {}

  // Called under the lock of the book, before and after each sync.
  void AtSync(const DiskState& disk) {
    if (--calls_left_ > 0) return;
    const std::string after = dir_ + ".after-power-loss";
    std::filesystem::create_directory(after);
    std::mt19937_64 random(1);
    disk.WriteAfterLoss(after, PowerLoss::kDropsAll, random);
    _exit(kPowerOffStatus);
  }

 private:
  const std::string dir_;
  uint64_t calls_left_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Storage>> MakeFaultyStorage(std::string_view rules,
                                                           const std::string& dir) {
  KVT_ASSIGN_OR_RETURN(Plan plan, ParsePlan(rules));
  if (!plan.power_off_sync) return std::make_unique<FaultyStorage>(plan);
  // The names above the directory are not its own: it is there, durable, before the book is opened.
  std::filesystem::create_directory(dir);
  const auto power = std::make_shared<PowerSwitch>(dir, *plan.power_off_sync);
  return std::make_unique<RecordingStorage>(
      dir, [power](const DiskState& disk) { power->AtSync(disk); });
}

}  // namespace kvtier::nvme
