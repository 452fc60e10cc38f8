// SPDX-License-Identifier: Apache-2.0
//
// An engine that does one thing over and over, holding what it takes for that, until it is killed.
//   client_victim RUN_DIR MODEL SEED STEP READY_FILE
// STEP: reserve, seal, commit, acquire, decode, prefetch or resume. READY_FILE appears when it has
// done so once.
#include "tests/integration/client_victim.h"

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>

#include "tests/integration/daemon_process.h"

namespace kvtier::testing {
namespace {

class Victim {
 public:
  Victim(std::unique_ptr<client::Client> client, client::Namespace ns, uint32_t seed)
      : client_(std::move(client)),
        ns_(ns),
        seed_(seed),
        shared_(MakeChain(ns, kSharedSeed, kVictimChainBlocks)) {}

  // False: it went wrong.
  bool Do(const std::string& step) {
    if (step == "reserve") return Reserve();
    if (step == "seal") return Seal();
    if (step == "commit") return Commit();
    if (step == "acquire") return Acquire();
    if (step == "decode") return Decode();
    if (step == "prefetch") return Prefetch();
    return step == "resume" && Resume();
  }

 private:
  std::vector<Key> NextChain() {
    return MakeChain(ns_, seed_ + count_++ % kVictimChains, kVictimChainBlocks);
  }

  // Half of what it reserves is given back.
  bool Reserve() {
    const auto fill = client_->Reserve(ns_, std::nullopt, NextChain());
    if (!fill.ok()) return false;
    return count_ % 2 == 0 || client_->Abort(ns_, *fill).ok();
  }
  bool Seal() {
    if (!fill_.has_value()) {
      auto fill = client_->Reserve(ns_, std::nullopt, NextChain());
      if (!fill.ok()) return false;
      fill_ = *std::move(fill);
    }
    for (const client::MappedBlock& block : fill_->blocks) {
      for (std::byte& byte : block.bytes) byte = std::byte{0x5A};
    }
    return true;
  }
  bool Commit() {
    const auto keys = NextChain();
    const auto taken = PutChain(client_.get(), ns_, keys);
    return taken.ok() && client_->ReportBad(ns_, keys).ok();
  }
  // Every third lease is kept.
  bool Acquire() {
    auto lease = client_->Acquire(ns_, shared_);
    if (!lease.ok()) return false;
    if (count_++ % 3 == 0 && leases_.size() < 32) leases_.push_back(*std::move(lease));
    return true;
  }
  bool Decode() {
    if (leases_.empty() && !Acquire()) return false;
    for (const client::MappedBlock& block : leases_[0].blocks()) {
      for (const std::byte byte : block.bytes) sum_ = sum_ + static_cast<uint8_t>(byte);
    }
    return true;
  }
  // hbm <-> host, so that something is always on its way.
  bool Move(bool (Victim::*bring)()) {
    const std::string name = "victim " + std::to_string(seed_);
    if (count_++ == 0) {
      const auto keys = MakeChain(ns_, seed_, kVictimChainBlocks);
      if (!PutChain(client_.get(), ns_, keys).ok() || !client_->CreateContext(ns_, name).ok() ||
          !client_->AppendContext(ns_, name, 0, keys).ok()) {
        return false;
      }
    }
    return client_->PauseContext(ns_, name).ok() && (this->*bring)();
  }
  bool Prefetch() { return Move(&Victim::PrefetchChain); }
  bool Resume() { return Move(&Victim::ResumeContext); }
  bool PrefetchChain() {
    return client_->Prefetch(ns_, MakeChain(ns_, seed_, kVictimChainBlocks)).ok();
  }
  bool ResumeContext() {
    return client_->ResumeContext(ns_, "victim " + std::to_string(seed_)).ok();
  }

  const std::unique_ptr<client::Client> client_;
  const client::Namespace ns_;
  const uint32_t seed_;
  const std::vector<Key> shared_;
  uint32_t count_ = 0;
  std::optional<client::Fill> fill_;
  std::vector<client::Lease> leases_;
  volatile uint64_t sum_ = 0;
};

int Main(char** argv) {
  auto client = client::Client::Connect({.run_dir = argv[1], .client_name = "victim"});
  if (!client.ok()) return 3;
  const auto ns = (*client)->RegisterLayout(SmallLayout(argv[2]));
  if (!ns.ok()) return 4;
  Victim victim(*std::move(client), *ns, static_cast<uint32_t>(std::atoi(argv[3])));
  if (!victim.Do(argv[4])) return 5;
  std::ofstream(argv[5]) << "ready" << std::endl;
  while (victim.Do(argv[4])) {
  }
  return 6;
}

}  // namespace
}  // namespace kvtier::testing

int main(int argc, char** argv) { return argc == 6 ? kvtier::testing::Main(argv) : 2; }
