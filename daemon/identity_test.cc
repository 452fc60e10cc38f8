// SPDX-License-Identifier: Apache-2.0
//
// Blocks are found under their whole identity only. Whatever single field of it differs, the same
// keys get the very answers that keys get which nobody ever stored.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <functional>
#include <random>

#include "daemon/service_fixture.h"

namespace kvtier {
namespace {

constexpr uint32_t kTenantUid = 60'001;
constexpr uint32_t kOtherTenantUid = 60'002;
constexpr size_t kChainBlocks = 3;

struct Identity {
  v1::Layout layout;
  std::string adapter;
  std::string salt;
  v1::HashDomain hash_domain;
  uint32_t uid = 0;
};

// Takes on the uid in this thread alone, which is whom the handle socket sees. The rest of the
// process stays root.
class ThreadUid {
 public:
  explicit ThreadUid(uint32_t uid) { Set(uid); }
  ~ThreadUid() { Set(0); }
  ThreadUid(const ThreadUid&) = delete;
  ThreadUid& operator=(const ThreadUid&) = delete;

 private:
  static void Set(uint32_t uid) { EXPECT_EQ(syscall(SYS_setresuid, -1, uid, -1), 0); }
};

uint32_t Below(std::mt19937& random, uint32_t count) {
  return static_cast<uint32_t>(random() % count);
}

std::string RandomText(std::mt19937& random) {
  std::string text(Below(random, 9), 'a');
  for (char& c : text) c = static_cast<char>('a' + Below(random, 3));
  return text;
}

uint32_t OneOf(std::mt19937& random, std::initializer_list<uint32_t> values) {
  return values.begin()[Below(random, static_cast<uint32_t>(values.size()))];
}

Identity RandomIdentity(std::mt19937& random) {
  Identity identity;
  v1::Layout& layout = identity.layout;
  layout.set_model("m" + RandomText(random));
  layout.set_weights_revision(RandomText(random));
  layout.set_tokenizer(RandomText(random));
  layout.set_layer_count(OneOf(random, {2, 4}));
  layout.set_kv_head_count(OneOf(random, {1, 3}));
  layout.set_head_dim(OneOf(random, {64, 96, 128}));
  layout.set_block_tokens(OneOf(random, {16, 32}));
  layout.set_codec(static_cast<v1::Codec>(1 + Below(random, 3)));
  layout.set_scale_set(RandomText(random));
  layout.set_rope(RandomText(random));
  layout.set_tp_size(2 + Below(random, 7));
  layout.set_tp_rank(Below(random, layout.tp_size()));
  layout.set_pp_size(2 + Below(random, 7));
  layout.set_pp_rank(Below(random, layout.pp_size()));
  identity.adapter = RandomText(random);
  identity.salt = RandomText(random);
  identity.hash_domain.set_name("d" + RandomText(random));
  identity.hash_domain.set_probe("p" + RandomText(random));
  identity.uid = geteuid() == 0 ? kTenantUid : geteuid();
  return identity;
}

struct Change {
  const char* field;
  std::function<void(Identity*)> apply;
};

// One character more, or a piece of one field in the next: the fields are not just joined.
std::vector<Change> TextChanges() {
  return {
      {"model", [](Identity* i) { i->layout.mutable_model()->push_back('a'); }},
      {"weights_revision",
       [](Identity* i) { i->layout.mutable_weights_revision()->push_back('a'); }},
      {"tokenizer", [](Identity* i) { i->layout.mutable_tokenizer()->push_back('a'); }},
      {"scale_set", [](Identity* i) { i->layout.mutable_scale_set()->push_back('a'); }},
      {"rope", [](Identity* i) { i->layout.mutable_rope()->push_back('a'); }},
      {"adapter", [](Identity* i) { i->adapter.push_back('a'); }},
      {"salt", [](Identity* i) { i->salt.push_back('a'); }},
      {"adapter and salt",
       [](Identity* i) {
         i->salt.insert(0, i->adapter + "a");
         i->adapter.clear();
       }},
      {"hash domain's name", [](Identity* i) { i->hash_domain.mutable_name()->push_back('a'); }},
      {"hash domain's probe", [](Identity* i) { i->hash_domain.mutable_probe()->push_back('a'); }},
      {"hash domain, none", [](Identity* i) { i->hash_domain.clear_name(); }},
      {"hash domain's name and probe",
       [](Identity* i) {
         i->hash_domain.mutable_name()->push_back(i->hash_domain.probe()[0]);
         i->hash_domain.mutable_probe()->erase(0, 1);
         i->hash_domain.mutable_probe()->push_back('a');
       }},
      {"model and weights_revision",
       [](Identity* i) {
         i->layout.set_weights_revision(i->layout.model().substr(1) + "a" +
                                        i->layout.weights_revision());
         i->layout.set_model(i->layout.model().substr(0, 1));
       }},
  };
}

std::vector<Change> NumberChanges() {
  return {
      {"layer_count", [](Identity* i) { i->layout.set_layer_count(i->layout.layer_count() + 1); }},
      {"kv_head_count",
       [](Identity* i) { i->layout.set_kv_head_count(i->layout.kv_head_count() + 1); }},
      {"layer_count and kv_head_count",  // blocks of the same size
       [](Identity* i) {
         const uint32_t layers = i->layout.layer_count();
         i->layout.set_layer_count(i->layout.kv_head_count());
         i->layout.set_kv_head_count(layers);
       }},
      {"head_dim",
       [](Identity* i) { i->layout.set_head_dim(i->layout.head_dim() == 64 ? 128 : 64); }},
      {"block_tokens",
       [](Identity* i) { i->layout.set_block_tokens(i->layout.block_tokens() == 16 ? 32 : 16); }},
      {"codec",
       [](Identity* i) {
         i->layout.set_codec(i->layout.codec() == v1::CODEC_FP8 ? v1::CODEC_BF16 : v1::CODEC_FP8);
       }},
      {"tp_rank",
       [](Identity* i) { i->layout.set_tp_rank((i->layout.tp_rank() + 1) % i->layout.tp_size()); }},
      {"tp_size", [](Identity* i) { i->layout.set_tp_size(i->layout.tp_size() + 1); }},
      {"pp_rank",
       [](Identity* i) { i->layout.set_pp_rank((i->layout.pp_rank() + 1) % i->layout.pp_size()); }},
      {"pp_size", [](Identity* i) { i->layout.set_pp_size(i->layout.pp_size() + 1); }},
  };
}

// Everything that the calls with keys tell a client, in the order asked; ids, which are new each
// time, are left out.
struct Answers {
  std::string lookup;
  std::string acquired;
  std::string acquired_crc32cs;
  uint64_t lease_id = 0;
  std::string read;
  uint32_t covered_block_count = 0;
  uint64_t pending_bytes = 0;
  bool ticket_is_done = false;
  uint32_t context_block_count = 0;
  std::string reserved_statuses;

  friend bool operator==(const Answers&, const Answers&) = default;
};

class IdentityTest : public ServiceFixture {
 protected:
  void SetUp() override {
    config_.tenants = {{.name = "one", .uids = {kTenantUid}},
                       {.name = "two", .uids = {kOtherTenantUid}}};
    config_.server.socket_mode = 0666;
    ServiceFixture::SetUp();
    // Room for all, so that only what the test says moves or leaves.
    daemon_->Stop();
    daemon_.reset();
    config_.hbm.capacity_bytes = config_.host.capacity_bytes = 64 << 20;
    config_.hbm.segment_bytes = config_.host.segment_bytes = 1 << 20;
    config_.nvme.capacity_bytes = 256 << 20;
    Restart();
  }

  void Restart() {
    if (daemon_ != nullptr) {
      daemon_->Stop();
      daemon_.reset();
    }
    Start();
    for (const std::string& folder : {folder_.path(), config_.server.run_dir}) {
      ASSERT_EQ(chmod(folder.c_str(), 0755), 0);
    }
  }

  std::unique_ptr<TestClient> ClientOf(const Identity& identity) {
    std::unique_ptr<TestClient> client;
    if (identity.uid == geteuid()) {
      client = std::make_unique<TestClient>(config_.server.run_dir);
    } else {
      const ThreadUid uid(identity.uid);
      client = std::make_unique<TestClient>(config_.server.run_dir);
    }
    EXPECT_TRUE(client->Open(client->TakeToken()));
    v1::RegisterLayoutRequest request;
    request.set_session_id(client->session_id);
    *request.mutable_layout() = identity.layout;
    request.set_adapter(identity.adapter);
    request.set_salt(identity.salt);
    if (!identity.hash_domain.name().empty()) *request.mutable_hash_domain() = identity.hash_domain;
    v1::RegisterLayoutResponse response;
    const grpc::Status status =
        client->stub().RegisterLayout(TestClient::Deadline().get(), request, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    client->namespace_id = response.namespace_id();
    client->block_bytes = response.block_bytes();
    namespace_hash_ = response.namespace_hash();
    return client;
  }

  static void Context(TestClient& client, const std::string& name, const std::vector<Key>& keys) {
    auto create = client.Ask<v1::CreateContextRequest>();
    create.set_context(name);
    v1::CreateContextResponse created;
    EXPECT_TRUE(client.stub().CreateContext(TestClient::Deadline().get(), create, &created).ok());
    auto append = client.Ask<v1::AppendContextRequest>();
    append.set_context(name);
    append.set_keys(PackKeys(keys));
    v1::AppendContextResponse appended;
    EXPECT_TRUE(client.stub().AppendContext(TestClient::Deadline().get(), append, &appended).ok());
  }

  static Answers AllAnswers(TestClient& client, const std::vector<Key>& keys,
                            const std::string& context) {
    Answers answers;
    const std::vector<uint8_t> residency = client.Lookup(keys);
    answers.lookup.assign(residency.begin(), residency.end());
    v1::AcquireResponse acquired;
    EXPECT_TRUE(client.Acquire(keys, &acquired).ok());
    answers.acquired = acquired.results();
    answers.acquired_crc32cs = acquired.crc32cs();
    answers.lease_id = acquired.lease_id();
    AskStreamAndTicket(client, keys, &answers);
    auto create = client.Ask<v1::CreateContextRequest>();
    create.set_context(context);
    v1::CreateContextResponse created;
    EXPECT_TRUE(client.stub().CreateContext(TestClient::Deadline().get(), create, &created).ok());
    answers.context_block_count = created.block_count();
    // Last, since it changes what others hear.
    auto reserve = client.Ask<v1::ReserveRequest>();
    reserve.set_keys(PackKeys(keys));
    reserve.set_tier(v1::TIER_HOST);
    v1::ReserveResponse reserved;
    EXPECT_TRUE(client.stub().Reserve(TestClient::Deadline().get(), reserve, &reserved).ok());
    const auto places = UnpackRecords<BlockResult>(reserved.results(), "results").value();
    for (const BlockResult& place : places) {
      answers.reserved_statuses.push_back(static_cast<char>(place.status));
    }
    return answers;
  }

  static void AskStreamAndTicket(TestClient& client, const std::vector<Key>& keys,
                                 Answers* answers) {
    auto read = client.Ask<v1::ReadRequest>();
    read.set_keys(PackKeys(keys));
    const auto context = TestClient::Deadline();
    const auto reader = client.stub().Read(context.get(), read);
    for (v1::ReadResponse message; reader->Read(&message);) {
      answers->read += message.header().statuses() + message.header().crc32cs() + message.chunk();
    }
    EXPECT_TRUE(reader->Finish().ok());
    auto prefetch = client.Ask<v1::PrefetchRequest>();
    prefetch.set_keys(PackKeys(keys));
    v1::PrefetchResponse ticket;
    EXPECT_TRUE(client.stub().Prefetch(TestClient::Deadline().get(), prefetch, &ticket).ok());
    answers->covered_block_count = ticket.ticket().covered_block_count();
    answers->pending_bytes = ticket.ticket().pending_bytes();
    answers->ticket_is_done = ticket.ticket().done();
  }

  // One chain on each tier.
  void Store(const std::vector<Identity>& identities) {
    for (const Identity& identity : identities) {
      EXPECT_THAT(ClientOf(identity)->Put(OnNvme()), testing::Each(BlockStatus::kOk));
    }
    Restart();  // what was in memory is on nvme alone
    for (const Identity& identity : identities) {
      const auto client = ClientOf(identity);
      EXPECT_THAT(client->Put(OnHost()), testing::Each(BlockStatus::kOk));
      Context(*client, "on host", OnHost());
      auto pause = client->Ask<v1::PauseContextRequest>();
      pause.set_context("on host");
      v1::PauseContextResponse paused;
      EXPECT_TRUE(client->stub().PauseContext(TestClient::Deadline().get(), pause, &paused).ok());
      EXPECT_THAT(client->Put(OnHbm()), testing::Each(BlockStatus::kOk));
    }
  }

  void ExpectStored(const Identity& identity) {
    const auto client = ClientOf(identity);
    const auto on = [](uint8_t tier) {
      return testing::AllOf(
          testing::SizeIs(kChainBlocks),
          testing::Each(testing::Truly([=](uint8_t bits) { return bits & tier; })));
    };
    EXPECT_THAT(client->Lookup(OnHbm()), on(kResidentHbm));
    EXPECT_THAT(client->Lookup(OnHost()), on(kResidentHost));
    EXPECT_THAT(client->Lookup(OnNvme()), on(kResidentNvme));
  }

  // The keys of `base` in the namespace of `other`.
  void ExpectMisses(const Identity& base, const Identity& other) {
    const auto owner = ClientOf(base);
    const std::string base_hash = namespace_hash_;
    const auto client = ClientOf(other);
    EXPECT_NE(namespace_hash_, base_hash);
    const Answers nothing = AllAnswers(*client, TestChain(99, kChainBlocks), "of nobody");
    EXPECT_EQ(nothing.lookup, "");
    EXPECT_EQ(nothing.lease_id, 0U);
    for (const auto& keys : {OnHbm(), OnHost(), OnNvme()}) {
      EXPECT_EQ(AllAnswers(*client, keys, "on host"), nothing);
      // The context is this namespace's own from then on.
      auto close = client->Ask<v1::CloseContextRequest>();
      close.set_context("on host");
      v1::CloseContextResponse closed;
      EXPECT_TRUE(client->stub().CloseContext(TestClient::Deadline().get(), close, &closed).ok());
    }
  }

  static std::vector<Key> OnHbm() { return TestChain(1, kChainBlocks); }
  static std::vector<Key> OnHost() { return TestChain(2, kChainBlocks); }
  static std::vector<Key> OnNvme() { return TestChain(3, kChainBlocks); }

  std::string namespace_hash_;
};

TEST_F(IdentityTest, AnyFieldThatDiffersIsAMissOnEveryTier) {
  const uint32_t seed = std::random_device()();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  std::vector<Identity> bases = {RandomIdentity(random), RandomIdentity(random)};
  bases[1].layout.set_model("n" + bases[1].layout.model());
  Store(bases);
  std::vector<Change> changes = TextChanges();
  for (Change& change : NumberChanges()) changes.push_back(std::move(change));
  for (const Identity& base : bases) {
    ExpectStored(base);
    for (const Change& change : changes) {
      SCOPED_TRACE(change.field);
      Identity other = base;
      change.apply(&other);
      ExpectMisses(base, other);
      if (HasFailure()) return;
    }
    ExpectStored(base);
  }
}

TEST_F(IdentityTest, AnotherTenantsBlocksAreAsIfThereWereNone) {
  if (geteuid() != 0) GTEST_SKIP() << "being seen as two users needs root";
  std::mt19937 random(1);
  const Identity base = RandomIdentity(random);
  Store({base});
  ExpectStored(base);
  Identity other = base;
  other.uid = kOtherTenantUid;
  ExpectMisses(base, other);
  ExpectStored(base);
}

}  // namespace
}  // namespace kvtier
