// SPDX-License-Identifier: Apache-2.0
#include "daemon/core/store_core_model.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/hash/hash.h"
#include "daemon/core/fake_tier.h"
#include "daemon/core/store_core.h"

namespace kvtier::core {
namespace {

constexpr size_t kChains = 6;
constexpr size_t kDepth = 8;

// Passes calls on and checks what a policy may rely on, and what the core may.
class CheckedPolicy final : public policy::EvictionPolicy {
 public:
  explicit CheckedPolicy(std::unique_ptr<policy::EvictionPolicy> policy)
      : policy_(std::move(policy)) {}

  void Use(const policy::BlockUse& use) override {
    EXPECT_NE(use.block, use.parent);
    used_.insert(use.block);
    policy_->Use(use);
  }
  void Expect(policy::BlockRef block, policy::NextStep next, uint64_t now_ms,
              uint64_t returns_in_ms) override {
    EXPECT_TRUE(used_.contains(block)) << "announced before it was used";
    policy_->Expect(block, next, now_ms, returns_in_ms);
  }
  void Forget(policy::BlockRef block, uint64_t key) override {
    for (const auto& candidates : candidates_) EXPECT_FALSE(candidates.contains(block));
    used_.erase(block);
    policy_->Forget(block, key);
  }
  void Upsert(policy::TierIdx tier, policy::BlockRef block,
              const policy::BlockFacts& facts) override {
    EXPECT_TRUE(used_.contains(block)) << "a candidate that was never used";
    candidates_[tier].insert(block);
    policy_->Upsert(tier, block, facts);
  }
  void Erase(policy::TierIdx tier, policy::BlockRef block) override {
    candidates_[tier].erase(block);
    policy_->Erase(tier, block);
  }
  std::optional<policy::BlockRef> Victim(policy::TierIdx tier, policy::PoolIdx pool) override {
    return Checked(tier, policy_->Victim(tier, pool));
  }
  std::optional<policy::BlockRef> IdleVictim(policy::TierIdx tier, policy::PoolIdx pool) override {
    return Checked(tier, policy_->IdleVictim(tier, pool));
  }

 private:
  std::optional<policy::BlockRef> Checked(policy::TierIdx tier,
                                          std::optional<policy::BlockRef> victim) {
    EXPECT_TRUE(!victim.has_value() || candidates_[tier].contains(*victim));
    return victim;
  }

  std::unique_ptr<policy::EvictionPolicy> policy_;
  std::set<policy::BlockRef> used_;
  std::array<std::set<policy::BlockRef>, kTierCount> candidates_;
};

}  // namespace

class StoreCoreModel::Impl {
 public:
  Impl(const Options& model, PickNumber pick)
      : pick_(std::move(pick)),
        slots_{FakeSlots(model.hbm_slots), FakeSlots(model.host_slots),
               FakeSlots(model.nvme_slots)} {
    CoreOptions options;
    options.transfers_per_link_max = 3;
    options.waiters_max = 64;
    options.watch_events_max = 24;
    if (model.has_tenants) options.tenants = DrawLimits();
    core_ = std::make_unique<StoreCore>(
        options, &slots_[0], &slots_[1], &slots_[2],
        std::make_unique<CheckedPolicy>(policy::NewEvictionPolicy(model.eviction)));
    for (uint32_t chain = 0; chain < kChains; ++chain) {
      std::optional<Key> parent;
      for (uint32_t depth = 0; depth < kDepth; ++depth) {
        // Chains share their first blocks in pairs, as forks do.
        const uint32_t tokens[] = {depth < 3 ? chain / 2 : chain, depth};
        parent = HashBlock(NamespaceHash{}, parent, tokens);
        keys_[chain][depth] = *parent;
      }
    }
    for (size_t i = 0; i < clients_.size(); ++i) {
      if (model.has_tenants) clients_[i].owner = static_cast<OwnerIdx>(i % 2);
    }
    if (model.has_tenants) StoreOfBystander();
    for (auto& client : clients_) Open(&client);
  }

  void Step() {
    now_ += Pick(3);
    Client& client = clients_[Pick(clients_.size())];
    const auto& chain = keys_[Pick(kChains)];
    const std::span<const Key> keys(chain.data(), 1 + Pick(kDepth));
    const std::string context = "c" + std::to_string(Pick(4));
    switch (Pick(16)) {
      case 0:
      case 1:
        Reserve(&client, keys);
        break;
      case 2:
      case 3:
        Commit(&client);
        break;
      case 4:
        Abort(&client);
        break;
      case 5:
      case 6:
        Acquire(&client, keys);
        break;
      case 7:
      case 8:
        Release(&client);
        break;
      case 9:
        if (Pick(20) == 0) Reopen(&client);
        break;
      case 10:
        (void)core_->CreateContext(client.session, client.ns, context, now_);
        (void)core_->AppendContext(client.session, client.ns, context,
                                   static_cast<uint32_t>(Pick(3)), keys, now_, &effects_);
        break;
      case 11:
        ++pending_replies_;
        core_->PauseContext(
            client.session, client.ns, context,
            {.next = static_cast<policy::NextStep>(Pick(3)), .returns_in_ms = Pick(200)},
            now_ + Pick(20), now_, [this](const auto&) { --pending_replies_; }, &effects_);
        break;
      case 12:
        Note(&client,
             core_->ResumeContext(client.session, client.ns, context,
                                  {.needed_in_ms = Pick(20), .prefill_tokens_per_second = 1e6},
                                  now_, &effects_));
        break;
      case 13:
        if (Pick(4) == 0) {
          (void)core_->CloseContext(client.session, client.ns, context, Pick(2) == 0, now_,
                                    &effects_);
        } else {
          Note(&client, core_->Prefetch(client.session, client.ns, keys, {.needed_in_ms = Pick(20)},
                                        now_, &effects_));
        }
        break;
      case 14:
        Rare(&client, keys);
        break;
      default:
        core_->Tick(now_, &effects_);
        break;
    }
    Settle();
    // With transfers under way, which is when it is hard.
    if (!transfers_.empty() && Pick(500) == 0) LoseHbm();
    while (!transfers_.empty() && Pick(3) != 0) CompleteOne();
    core_->CheckInvariants();
    CheckLeasedContents();
    CheckBystander();
    CheckBoards();
    Watch();
  }

  // Ends every session and completes everything: nothing may be left but unpinned blocks.
  void Finish() {
    for (auto& client : clients_) Close(&client);
    if (bystander_tier_ != 0) Close(&bystander_);
    bystander_tier_ = 0;
    for (int i = 0; i < 1000 && (!transfers_.empty() || i < 3); ++i) {
      while (!transfers_.empty()) CompleteOne();
      now_ += 100;
      core_->Tick(now_, &effects_);
      Settle();
    }
    core_->CheckInvariants();
    EXPECT_EQ(pending_replies_, 0);
    const CoreCounters counters = core_->Counters();
    EXPECT_EQ(counters.lease_count, 0U);
    EXPECT_EQ(counters.pending_fill_count, 0U);
    for (size_t tier = 0; tier < kTierCount; ++tier) {
      EXPECT_EQ(counters.tiers[tier].pinned_bytes, 0U);
      EXPECT_EQ(counters.tiers[tier].quarantined_bytes, 0U);
      EXPECT_EQ(counters.tiers[tier].block_count, slots_[tier].contents.size()) << "leaked slots";
    }
  }

  uint64_t verified() const { return verified_; }
  uint64_t watched_count() const { return watched_count_; }
  // Of everything that moved, in order.
  size_t moves_hash() const { return moves_hash_; }

 private:
  struct Held {
    TierId tier;
    ReplicaId replica;
    Key key;
  };
  struct Client {
    OwnerIdx owner = 1;
    SessionId session = 0;
    NamespaceIdx ns = 0;
    std::map<Key, Held> fills;
    std::map<LeaseId, std::vector<Held>> leases;
    std::shared_ptr<TicketBoardPage> board = std::make_shared<TicketBoardPage>();
    std::deque<TicketState> tickets;  // the last ones
  };

  size_t Pick(size_t bound) { return pick_(bound); }
  FakeSlots& Slots(TierId tier) { return slots_[static_cast<size_t>(tier)]; }

  void Open(Client* client) {
    client->session = *core_->OpenSession(client->owner, now_);
    core_->AttachMapping(client->session);
    core_->ShowTickets(client->session, client->board);
    client->ns = *core_->OpenNamespace(client->session, SpecOf(client->owner));
  }

  static NamespaceSpec SpecOf(OwnerIdx owner) {
    NamespaceSpec spec{.hash = {}, .layout = {}, .block_bytes = FakeSlots::kBlockBytes};
    spec.hash.bytes[0] = static_cast<uint8_t>(owner);
    return spec;
  }

  std::vector<TenantLimits> DrawLimits() {
    std::vector<TenantLimits> limits(kBystander + 1);
    limits[kBystander].reserve_bytes.fill(FakeSlots::kBlockBytes);
    for (OwnerIdx owner = 0; owner < kBystander; ++owner) {
      for (uint64_t& quota_bytes : limits[owner].quota_bytes) {
        if (Pick(3) != 0) quota_bytes = Pick(8) * FakeSlots::kBlockBytes;
      }
    }
    return limits;
  }

  // One block on hbm, which nobody may take from it.
  void StoreOfBystander() {
    bystander_.owner = kBystander;
    Open(&bystander_);
    const std::span<const Key> keys(keys_[0].data(), 1);
    Reserve(&bystander_, keys);
    Settle();
    if (!bystander_.fills.empty()) {
      EXPECT_TRUE(
          core_->Commit(bystander_.session, bystander_.ns, keys, std::array{0U}, now_, &effects_)
              .ok());
      bystander_.fills.clear();
    }
    Settle();
    bystander_tier_ = core_->Lookup(bystander_.session, bystander_.ns, keys)->residency.at(0);
  }

  // What a watcher of the first client's tenant knows, against what can be read: it reads now and
  // then, and loses events.
  void Watch() {
    if (++steps_ % 5 != 0) return;
    const SessionId session = clients_[0].session;
    if (!watched_.has_value()) {
      watched_ = *core_->BeginWatch(session);
      snapshot_position_ = 0;
      known_.clear();
    }
    if (snapshot_position_.has_value()) {
      // The next part comes later, in whatever state the blocks are then.
      const WatchedSnapshot part = *core_->ReadSnapshot(session, *snapshot_position_, 7);
      Apply(part.events);
      snapshot_position_ = part.position;
      if (!part.done) return;
      snapshot_position_.reset();
    }
    const WatchedEvents events = *core_->ReadEvents(session, *watched_, 1000);
    if (events.lost) {
      watched_.reset();
      return;
    }
    Apply(events.events);
    watched_ = events.sequence;
    for (const auto& chain : keys_) {
      for (size_t depth = 0; depth < chain.size(); ++depth) {
        const auto found = core_->Lookup(session, clients_[0].ns, std::span(&chain[depth], 1));
        const uint8_t is = found->residency.empty() ? 0 : found->residency[0];
        EXPECT_EQ(known_[chain[depth]], is) << "depth " << depth;
      }
    }
    ++watched_count_;
  }

  void Apply(const std::vector<BlockEvent>& events) {
    for (const BlockEvent& event : events) {
      EXPECT_EQ(event.namespace_hash, SpecOf(clients_[0].owner).hash) << "another tenant's";
      const auto bit = static_cast<uint8_t>(1U << static_cast<size_t>(event.tier));
      uint8_t& residency = known_[event.key];
      residency = static_cast<uint8_t>(event.is_stored ? residency | bit : residency & ~bit);
    }
  }

  void CheckBystander() {
    if (bystander_tier_ == 0) return;
    const std::span<const Key> keys(keys_[0].data(), 1);
    const auto found = core_->Lookup(bystander_.session, bystander_.ns, keys);
    ASSERT_TRUE(found.ok());
    if (bystander_tier_ == kResidentHbm && slots_[0].degraded) return;  // lost
    ASSERT_EQ(found->residency.size(), 1U) << "lost to another tenant";
    EXPECT_EQ(found->residency[0] & bystander_tier_, bystander_tier_) << "moved for another tenant";
    const TenantsReport report = core_->Tenants();
    for (const TenantTierCounters& tier : report.tenants.at(kBystander).tiers) {
      EXPECT_EQ(tier.displaced_block_count, 0U);
    }
  }

  void Close(Client* client) {
    core_->EndSession(client->session, now_, &effects_);
    Settle();
    CheckLeasedContents();  // still mapped: untouched
    client->fills.clear();
    client->leases.clear();
    client->tickets.clear();
    core_->DetachMapping(client->session, now_, &effects_);
    Settle();
  }

  void Note(Client* client, const absl::StatusOr<TicketState>& ticket) {
    if (!ticket.ok()) return;
    client->tickets.push_back(*ticket);
    if (client->tickets.size() > 8) client->tickets.pop_front();
  }

  // What a load tells is what a call tells.
  void CheckBoards() {
    for (const Client& client : clients_) {
      for (const TicketState& given : client.tickets) {
        const auto now = core_->GetTicket(client.session, given.ticket);
        ASSERT_TRUE(now.ok()) << now.status();
        const auto shown = client.board->Find(given.board_slot, given.ticket);
        ASSERT_TRUE(shown.has_value());
        ASSERT_EQ(shown->done, now->done) << "ticket " << given.ticket;
      }
    }
  }

  void Reopen(Client* client) {
    Close(client);
    Open(client);
  }

  void Reserve(Client* client, std::span<const Key> keys) {
    ++pending_replies_;
    const SessionId session = client->session;
    core_->Reserve(
        session, client->ns, {}, keys, Pick(4) == 0 ? TierId::kHost : TierId::kHbm, now_ + Pick(30),
        now_,
        [this, client, session, keys](absl::StatusOr<std::vector<PlacedBlock>> blocks) {
          --pending_replies_;
          if (!blocks.ok() || client->session != session) return;
          for (size_t i = 0; i < keys.size(); ++i) {
            const PlacedBlock& block = (*blocks)[i];
            if (block.status != BlockStatus::kOk || LostTo(block)) continue;
            Slots(block.tier).contents.at(block.replica) = keys[i];  // the client fills it
            client->fills[keys[i]] = {block.tier, block.replica, keys[i]};
          }
        },
        &effects_);
  }

  void Commit(Client* client) {
    std::vector<Key> keys;
    for (const auto& [key, held] : client->fills) {
      if (Pick(2) == 0) keys.push_back(key);
    }
    const std::vector<uint32_t> crcs(keys.size(), 0);
    const auto statuses = core_->Commit(client->session, client->ns, keys, crcs, now_, &effects_);
    ASSERT_TRUE(statuses.ok());
    for (size_t i = 0; i < keys.size(); ++i) {
      EXPECT_EQ((*statuses)[i], BlockStatus::kOk);
      client->fills.erase(keys[i]);
    }
  }

  void Abort(Client* client) {
    if (client->fills.empty()) return;
    const Key key = client->fills.begin()->first;
    client->fills.erase(key);
    EXPECT_TRUE(core_->Abort(client->session, client->ns, std::array{key}, now_, &effects_).ok());
  }

  void Acquire(Client* client, std::span<const Key> keys) {
    ++pending_replies_;
    const SessionId session = client->session;
    core_->Acquire(
        session, client->ns, keys, now_ + Pick(30), now_,
        [this, client, session, keys](absl::StatusOr<AcquireResult> result) {
          --pending_replies_;
          if (!result.ok() || client->session != session) return;
          for (size_t i = 0; i < keys.size(); ++i) {
            const PlacedBlock& block = result->blocks[i];
            if (block.status != BlockStatus::kOk) continue;
            client->leases[result->lease].push_back({block.tier, block.replica, keys[i]});
          }
        },
        &effects_);
  }

  // A slot that was given out just before its tier was lost: its fill is void.
  bool LostTo(const PlacedBlock& block) { return block.tier == TierId::kHbm && slots_[0].degraded; }

  void Release(Client* client) {
    if (client->leases.empty()) return;
    const LeaseId lease = client->leases.begin()->first;
    client->leases.erase(lease);
    const LeaseId twice[] = {lease, lease};
    EXPECT_TRUE(core_->Release(client->session, twice, now_, &effects_).ok());
  }

  void Rare(Client* client, std::span<const Key> keys) {
    switch (Pick(6)) {
      case 0:
        (void)core_->ReportBad(client->session, client->ns, keys.last(1), now_, &effects_);
        break;
      case 1:
        slots_[2].degraded = !slots_[2].degraded;
        break;
      case 2:
        ++pending_replies_;
        core_->Flush(now_ + Pick(30), now_, [this](const auto&) { --pending_replies_; }, &effects_);
        break;
      default:
        break;
    }
  }

  void LoseHbm() {
    slots_[0].degraded = true;
    core_->LoseTier(TierId::kHbm, now_, &effects_);
    for (auto& client : clients_) {
      std::erase_if(client.fills,
                    [](const auto& fill) { return fill.second.tier == TierId::kHbm; });
    }
    Settle();
  }

  void Settle() {
    for (const Transfer& transfer : effects_.transfers) {
      moves_hash_ = absl::HashOf(moves_hash_, transfer.meta.key.AsBytes(), transfer.source_tier,
                                 transfer.target_tier);
      transfers_.push_back(transfer);
    }
    for (const ReplicaId replica : effects_.expedited) {
      EXPECT_TRUE(std::ranges::any_of(transfers_, [replica](const Transfer& transfer) {
        return transfer.source_tier == TierId::kNvme && transfer.source == replica;
      })) << "nobody reads what is to be expedited";
    }
    auto replies = std::move(effects_.replies);
    effects_ = Effects();
    for (auto& reply : replies) reply();
  }

  void CompleteOne() {
    const size_t at = Pick(transfers_.size());
    const Transfer transfer = transfers_[at];
    transfers_.erase(transfers_.begin() + static_cast<std::ptrdiff_t>(at));
    absl::Status status;
    const bool is_bystanders =
        bystander_tier_ != 0 && transfer.meta.namespace_hash == SpecOf(kBystander).hash;
    const size_t dice = is_bystanders ? 2 : Pick(20);
    if (dice == 0) status = Unavailable("injected");
    if (dice == 1) status = DataLoss("injected");
    // A transfer must find its source untouched and its target still reserved.
    const Key& bytes = Slots(transfer.source_tier).contents.at(transfer.source);
    EXPECT_EQ(bytes, transfer.meta.key);
    Slots(transfer.target_tier).contents.at(transfer.target) = bytes;
    core_->OnTransferDone(transfer.job, status, now_, &effects_);
    Settle();
  }

  void CheckLeasedContents() {
    for (auto& client : clients_) {
      for (const auto& [lease, blocks] : client.leases) {
        for (const Held& held : blocks) {
          ASSERT_EQ(Slots(held.tier).contents.at(held.replica), held.key) << "wrong bytes";
          ++verified_;
        }
      }
      for (const auto& [key, held] : client.fills) {
        ASSERT_EQ(Slots(held.tier).contents.at(held.replica), key) << "fill overwritten";
      }
    }
  }

  const PickNumber pick_;
  std::array<FakeSlots, kTierCount> slots_;
  std::unique_ptr<StoreCore> core_;
  std::array<std::array<Key, kDepth>, kChains> keys_;
  std::array<Client, 3> clients_;
  static constexpr OwnerIdx kBystander = 2;
  Client bystander_;
  // Where its block is; 0: there is none.
  uint8_t bystander_tier_ = 0;
  uint64_t steps_ = 0;
  // What the watcher knows: up to which event, and where it has seen each block.
  std::optional<uint64_t> watched_;
  std::optional<uint64_t> snapshot_position_;
  std::map<Key, uint8_t> known_;
  uint64_t watched_count_ = 0;
  Effects effects_;
  std::vector<Transfer> transfers_;
  TimeMs now_ = 1;
  int64_t pending_replies_ = 0;
  uint64_t verified_ = 0;
  size_t moves_hash_ = 0;
};

StoreCoreModel::StoreCoreModel(const Options& options, PickNumber pick)
    : impl_(std::make_unique<Impl>(options, std::move(pick))) {}
StoreCoreModel::~StoreCoreModel() = default;

void StoreCoreModel::Step() { impl_->Step(); }
void StoreCoreModel::Finish() { impl_->Finish(); }
uint64_t StoreCoreModel::verified() const { return impl_->verified(); }
uint64_t StoreCoreModel::watched_count() const { return impl_->watched_count(); }
size_t StoreCoreModel::moves_hash() const { return impl_->moves_hash(); }

}  // namespace kvtier::core
