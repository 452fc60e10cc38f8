// SPDX-License-Identifier: Apache-2.0
//
// DeviceKernels end to end: a daemon, the client library, and the kernels on its slots, on the cpu
// device and on a fake card whose kernels run on the emulated machine.
#include "kvtier/device_kernels.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "client/src/kernel_launches.h"
#include "daemon/daemon.h"
#include "kernels/cuda/decode_kernel.h"
#include "kernels/cuda/decode_plan.h"
#include "kernels/cuda/emu/launch.h"
#include "kernels/cuda/gather_kernel.h"
#include "kernels/cuda/seal_kernel.h"
#include "kernels/cuda/transfer_params.h"
#include "kernels/decode.h"
#include "kernels/seal.h"
#include "tiers/cuda/fake_driver.h"
#include "tiers/tier_test_util.h"

namespace kvtier {
namespace {

namespace cuda = kernels::cuda;
using client::Client;
using client::DeviceKernels;
using client::MappedBlock;
using kernels::ElementType;

// The GPU's memory, as the kernels see it, and what runs there.
std::vector<std::span<std::byte>>& DeviceMemory() {
  static std::vector<std::span<std::byte>> memory;
  return memory;
}

template <typename Body, typename Params>
void Emulate(const cuda::emu::LaunchConfig& config, Body body, const Params& params) {
  cuda::emu::Memory memory;
  for (const std::span<std::byte> range : DeviceMemory()) memory.AddInOut(range);
  const auto report = cuda::emu::Launch(config, memory, body, params);
  EXPECT_TRUE(report.ok()) << report.ToString();
}

cuda::emu::LaunchConfig ConfigOf(const cuda::LaunchShape& shape) {
  return {.grid = {shape.grid_x, shape.grid_y, shape.grid_z},
          .block = {shape.block_x, shape.block_y},
          .shared_bytes = shape.shared_bytes};
}

kernels::Status Upload(void* device, const void* host, uint64_t bytes, cuda::Stream) {
  std::memcpy(device, host, bytes);
  return kernels::Status();
}
kernels::Status Seal(const cuda::SealBlocksArgs& args, cuda::Stream) {
  cuda::SealPlan plan;
  if (const kernels::Status status = PlanSeal(args, &plan); !status.ok()) return status;
  Emulate(ConfigOf(plan.shape), &cuda::SealBody<cuda::Sm90, ElementType::kBf16>, plan.params);
  return kernels::Status();
}
kernels::Status Gather(const cuda::GatherBlocksArgs& args, cuda::Stream) {
  cuda::GatherPlan plan;
  if (const kernels::Status status = PlanGather(args, &plan); !status.ok()) return status;
  Emulate(ConfigOf(plan.shape), &cuda::GatherBody<cuda::Sm90, ElementType::kBf16>, plan.params);
  return kernels::Status();
}
kernels::Status Decode(const cuda::DecodeBatchArgs& args, cuda::Stream) {
  constexpr cuda::DeviceLimits kLimits{
      .multiprocessor_count = 2, .shared_bytes_per_block = 232448, .copies_bulk = true};
  cuda::DecodePlan plan;
  if (const kernels::Status status = PlanDecode(args, kLimits, &plan); !status.ok()) return status;
  EXPECT_EQ(plan.tiles_n, 1u);
  EXPECT_EQ(plan.query_parts, 1u);
  Emulate({.grid = {plan.grid_size},
           .block = {32 * plan.warp_count},
           .shared_bytes = plan.shared_bytes},
          &cuda::DecodeBody<cuda::Sm90, 64, 1, 1>, plan.params);
  return kernels::Status();
}
constexpr client::KernelLaunches kEmulated = {
    .upload = &Upload, .seal = &Seal, .gather = &Gather, .decode = &Decode};

// Memory that kernels reach on either device.
template <typename T>
class Array {
 public:
  explicit Array(size_t count)
      : bytes_((count * sizeof(T) + 255) / 256 * 256),
        data_(static_cast<T*>(std::aligned_alloc(256, bytes_))),
        count_(count) {
    std::memset(static_cast<void*>(data_), 0, bytes_);
    DeviceMemory().push_back({reinterpret_cast<std::byte*>(data_), bytes_});
  }
  ~Array() {
    std::erase_if(DeviceMemory(), [this](std::span<std::byte> range) {
      return range.data() == reinterpret_cast<std::byte*>(data_);
    });
    std::free(data_);
  }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;

  T* data() { return data_; }
  std::span<T> span() { return {data_, count_}; }
  T& operator[](size_t i) { return data_[i]; }

 private:
  size_t bytes_;
  T* data_;
  size_t count_;
};

uint16_t Bf16Of(float value) {
  uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof(bits));
  return static_cast<uint16_t>(bits >> 16);
}

constexpr uint32_t kLayers = 2;
constexpr uint32_t kHeads = 2;
constexpr uint32_t kQueryHeads = 4;
constexpr uint32_t kDim = 64;
constexpr uint32_t kTokens = 16;
constexpr uint32_t kBlocks = 3;
constexpr uint32_t kTailTokens = 5;
constexpr uint32_t kSlots = kBlocks * kTokens + kTailTokens;
constexpr uint64_t kLayerValues = uint64_t{kSlots} * kHeads * kDim;

class DeviceKernelsTest : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    config_.server.run_dir = folder_.path() + "/run";
    config_.server.data_dir = folder_.path() + "/data";
    config_.hbm_device.device = GetParam();
    config_.hbm = {.capacity_bytes = 2 << 20,
                   .segment_bytes = 1 << 20,
                   .high_watermark = 1,
                   .low_watermark = 1};
    config_.host = config_.hbm;
    config_.nvme.enabled = false;
    auto daemon = Daemon::Start(config_, std::make_shared<FakeCudaDriver>());
    ASSERT_TRUE(daemon.ok()) << daemon.status();
    daemon_ = std::move(daemon).value();
    card_ = std::make_shared<FakeCudaDriver>();
    client_ = Client::Connect({.run_dir = config_.server.run_dir, .cuda = card_}).value();
    layout_.model = "test";
    layout_.layer_count = kLayers;
    layout_.kv_head_count = kHeads;
    layout_.head_dim = kDim;
    layout_.block_tokens = kTokens;
    ns_ = client_->RegisterLayout(layout_).value();
    for (uint32_t i = 0; i < kBlocks; ++i) {
      const std::optional<Key> parent = keys_.empty() ? std::nullopt : std::optional(keys_.back());
      keys_.push_back(HashBlock(ns_.hash, parent, std::vector<uint32_t>(kTokens, i)));
    }
    std::mt19937 random(42);
    std::normal_distribution<float> normal;
    for (uint16_t& value : k_.span()) value = Bf16Of(normal(random));
    for (uint16_t& value : v_.span()) value = Bf16Of(normal(random));
    for (uint16_t& value : query_.span()) value = Bf16Of(normal(random));
    std::ranges::fill(g_k_.span(), 0.125F);
    std::ranges::fill(g_v_.span(), 0.0625F);
    client::SetKernelLaunches(&kEmulated);
  }
  void TearDown() override {
    for (const std::span<std::byte> slot : slots_) {
      std::erase_if(DeviceMemory(), [slot](auto range) { return range.data() == slot.data(); });
    }
    client_.reset();
    daemon_.reset();
  }

  bool on_gpu() const { return config_.hbm_device.device == "cuda"; }

  // The fake card's memory is not where its addresses say: the kernels get where it is.
  std::vector<MappedBlock> Reachable(std::span<const MappedBlock> blocks) {
    std::vector<MappedBlock> reachable(blocks.begin(), blocks.end());
    for (MappedBlock& block : reachable) {
      if (block.device_address == 0) continue;
      const std::span<std::byte> bytes = card_->DeviceBytes(block.device_address, ns_.block_bytes);
      block.device_address = reinterpret_cast<uintptr_t>(bytes.data());
      const auto known = [bytes](std::span<std::byte> range) {
        return range.data() == bytes.data();
      };
      // A lease may be of slots that a fill had.
      if (std::ranges::none_of(DeviceMemory(), known)) DeviceMemory().push_back(bytes);
      slots_.push_back(bytes);
    }
    return reachable;
  }

  client::TableSpace Space() {
    return {.host = std::as_writable_bytes(host_table_.span()),
            .device = on_gpu() ? device_table_.data() : nullptr,
            .device_bytes = device_table_.span().size_bytes()};
  }

  // [layer][slot][head][dim], as an engine without pages has it.
  client::KvRows Rows(Array<uint16_t>& k, Array<uint16_t>& v) {
    return {.type = ElementType::kBf16,
            .k = k.data(),
            .v = v.data(),
            .layer_stride = kLayerValues,
            .head_stride = kDim,
            .token_stride = uint64_t{kHeads} * kDim};
  }
  client::GlobalScales Scales() { return {.g_k = g_k_.data(), .g_v = g_v_.data()}; }

  // The tile that the CPU's kernel makes of block, layer and head.
  std::vector<std::byte> Expected(uint32_t block, uint32_t layer, uint32_t head) {
    const kernels::TileShape shape{.block_tokens = kTokens, .head_dim = kDim};
    std::vector<std::byte> tile(kernels::TileBytes(shape));
    const uint64_t at = layer * kLayerValues + (uint64_t{block} * kTokens * kHeads + head) * kDim;
    const auto rows = [&](Array<uint16_t>& values) {
      return kernels::ConstRows{.type = ElementType::kBf16,
                                .data = values.data() + at,
                                .token_stride = uint64_t{kHeads} * kDim};
    };
    kernels::SealStats stats;
    EXPECT_TRUE(
        kernels::SealTile(shape, rows(k_), rows(v_), {.g_k = 0.125F, .g_v = 0.0625F}, tile, &stats)
            .ok());
    return tile;
  }

  // Attention of the test's queries over the sealed blocks of `layer` and the tail, in FP64.
  std::vector<float> Attention(uint32_t layer, Array<uint16_t>& k, Array<uint16_t>& v) {
    const auto value = [](uint16_t bits) {
      const uint32_t wide = uint32_t{bits} << 16;
      float result = 0;
      std::memcpy(&result, &wide, sizeof(result));
      return static_cast<double>(result);
    };
    std::vector<float> out;
    for (uint32_t q = 0; q < kQueryHeads; ++q) {
      const uint64_t head_at = layer * kLayerValues + uint64_t{q / (kQueryHeads / kHeads)} * kDim;
      double total = 0;
      std::vector<double> sum(kDim);
      for (uint32_t slot = 0; slot < kSlots; ++slot) {
        const uint64_t at = head_at + uint64_t{slot} * kHeads * kDim;
        double score = 0;
        for (uint32_t d = 0; d < kDim; ++d) score += value(query_[q * kDim + d]) * value(k[at + d]);
        const double weight = std::exp(score * 0.125);
        total += weight;
        for (uint32_t d = 0; d < kDim; ++d) sum[d] += weight * value(v[at + d]);
      }
      for (uint32_t d = 0; d < kDim; ++d) out.push_back(static_cast<float>(sum[d] / total));
    }
    return out;
  }

  client::DecodeStep Step(std::span<const client::DecodeSequence> sequences, uint32_t layer) {
    return {.layer_idx = layer,
            .sequences = sequences,
            .tail_token_stride = uint64_t{kHeads} * kDim,
            .tail_head_stride = kDim,
            .query = query_.data(),
            .query_head_count = kQueryHeads,
            .softmax_scale = 0.125F,
            .scales = Scales(),
            .out = out_.data(),
            .lse = lse_.data(),
            .damage_count = damage_.data()};
  }
  client::DecodeSequence Sequence(std::span<const MappedBlock> blocks, uint32_t layer) {
    const uint64_t tail_at = layer * kLayerValues + uint64_t{kBlocks} * kTokens * kHeads * kDim;
    return {.blocks = blocks,
            .tail_k = k_.data() + tail_at,
            .tail_v = v_.data() + tail_at,
            .tail_token_count = kTailTokens};
  }

  TempFolder folder_;
  Config config_;
  std::unique_ptr<Daemon> daemon_;
  std::shared_ptr<FakeCudaDriver> card_;
  std::unique_ptr<Client> client_;
  Layout layout_;
  client::Namespace ns_;
  std::vector<Key> keys_;
  const std::vector<uint32_t> first_slots_ = {0, kTokens, 2 * kTokens};
  Array<uint16_t> k_{kLayers * kLayerValues};
  Array<uint16_t> v_{kLayers * kLayerValues};
  Array<uint16_t> query_{kQueryHeads * kDim};
  Array<float> g_k_{kLayers * kHeads};
  Array<float> g_v_{kLayers * kHeads};
  Array<float> out_{kQueryHeads * kDim};
  Array<float> lse_{kQueryHeads};
  Array<uint32_t> damage_{1};
  Array<uint64_t> host_table_{256};
  Array<uint64_t> device_table_{256};
  Array<cuda::SealCounters> sealed_{1};
  Array<cuda::GatherCounters> gathered_{1};
  std::vector<std::span<std::byte>> slots_;
};

INSTANTIATE_TEST_SUITE_P(Devices, DeviceKernelsTest, testing::Values("cpu", "cuda"),
                         [](const auto& param) { return std::string(param.param); });

TEST_P(DeviceKernelsTest, SealsCommitsAcquiresDecodesAndGathers) {
  const auto kernels = DeviceKernels::Create(layout_, ns_);
  ASSERT_TRUE(kernels.ok()) << kernels.status();
  {
    const auto fill = client_->Reserve(ns_, std::nullopt, keys_);
    ASSERT_TRUE(fill.ok()) << fill.status();
    ASSERT_EQ(fill->blocks[0].device_address != 0, on_gpu());
    const auto blocks = Reachable(fill->blocks);
    ASSERT_EQ(
        kernels->Seal(blocks, first_slots_, Rows(k_, v_), Scales(), sealed_.data(), {}, Space()),
        absl::OkStatus());
    const auto committed = client_->Commit(ns_, *fill, client::DeviceStream());
    ASSERT_TRUE(committed.ok()) << committed.status();
  }
  EXPECT_EQ(sealed_[0].nonfinite_count + sealed_[0].refused_count, 0u);

  const auto lease = client_->Acquire(ns_, keys_);
  ASSERT_TRUE(lease.ok()) << lease.status();
  ASSERT_EQ(lease->ok_prefix_count(), kBlocks);
  const auto blocks = Reachable(lease->blocks());
  for (uint32_t i = 0; i < kBlocks; ++i) {
    const auto* const bytes = on_gpu()
                                  ? reinterpret_cast<const std::byte*>(blocks[i].device_address)
                                  : blocks[i].bytes.data();
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      for (uint32_t head = 0; head < kHeads; ++head) {
        const std::vector<std::byte> tile = Expected(i, layer, head);
        EXPECT_EQ(std::memcmp(bytes + kernels::TileOffset(kernels->shape(), layer, head),
                              tile.data(), tile.size()),
                  0)
            << i << " " << layer << " " << head;
      }
    }
  }

  // What comes back, and the tail as it was.
  Array<uint16_t> k(kLayers * kLayerValues);
  Array<uint16_t> v(kLayers * kLayerValues);
  std::ranges::copy(k_.span(), k.data());
  std::ranges::copy(v_.span(), v.data());
  ASSERT_EQ(
      kernels->Gather(blocks, first_slots_, Rows(k, v), Scales(), gathered_.data(), {}, Space()),
      absl::OkStatus());
  EXPECT_EQ(gathered_[0].invalid_count + gathered_[0].refused_count, 0u);
  EXPECT_FALSE(std::ranges::equal(k.span(), k_.span())) << "nothing was quantized";

  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    const client::DecodeSequence sequences[] = {Sequence(blocks, layer)};
    client::DecodeStep step = Step(sequences, layer);
    Array<std::byte> scratch(kernels->DecodeScratchBytes(step, kBlocks));
    step.scratch = scratch.data();
    ASSERT_EQ(kernels->Decode(step, {}, Space()), absl::OkStatus());
    const std::vector<float> expected = Attention(layer, k, v);
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_NEAR(out_[i], expected[i], 4e-3) << layer << " " << i;
    }
    EXPECT_EQ(damage_[0], 0u);
  }
}

TEST_P(DeviceKernelsTest, TellsDamagedTiles) {
  const auto kernels = DeviceKernels::Create(layout_, ns_).value();
  const auto fill = client_->Reserve(ns_, std::nullopt, keys_).value();
  const auto blocks = Reachable(fill.blocks);
  // Not sealed: every scale byte is one that is never written.
  for (const MappedBlock& block : blocks) {
    auto* const bytes =
        on_gpu() ? reinterpret_cast<std::byte*>(block.device_address) : block.bytes.data();
    std::fill(bytes, bytes + ns_.block_bytes, std::byte{0xFF});
  }
  const absl::Status status =
      kernels.Gather(blocks, first_slots_, Rows(k_, v_), Scales(), gathered_.data(), {}, Space());
  EXPECT_EQ(status.code(), on_gpu() ? absl::StatusCode::kOk : absl::StatusCode::kDataLoss);
  EXPECT_GT(gathered_[0].invalid_count, 0u);
}

TEST_P(DeviceKernelsTest, RefusesWhatIsNotAllOfOneDeviceAndLayout) {
  const auto kernels = DeviceKernels::Create(layout_, ns_).value();
  Layout other = layout_;
  other.scale_set = "another";
  EXPECT_EQ(DeviceKernels::Create(other, ns_).status().code(), absl::StatusCode::kInvalidArgument);

  const auto fill = client_->Reserve(ns_, std::nullopt, keys_).value();
  const auto blocks = Reachable(fill.blocks);
  const auto seal = [&](std::span<const MappedBlock> some, const client::TableSpace& space) {
    return kernels
        .Seal(some, std::span(first_slots_).first(some.size()), Rows(k_, v_), Scales(),
              sealed_.data(), {}, space)
        .code();
  };
  std::vector<MappedBlock> changed = blocks;
  changed[1] = {.status = BlockStatus::kOk, .tier = 2, .bytes = std::as_writable_bytes(k_.span())};
  changed[1].bytes = changed[1].bytes.first(ns_.block_bytes);
  if (on_gpu()) {
    EXPECT_EQ(seal(changed, Space()), absl::StatusCode::kFailedPrecondition);
    // All on host, as when hbm is full: the rows are on the GPU all the same.
    EXPECT_EQ(seal(std::span(changed).subspan(1, 1), Space()),
              absl::StatusCode::kFailedPrecondition);
    changed = blocks;
    changed[1].device_ordinal = 1;
    EXPECT_EQ(seal(changed, Space()), absl::StatusCode::kFailedPrecondition);
    client::TableSpace space = Space();
    space.device_bytes = DeviceKernels::TransferTableBytes(kBlocks) - 1;
    EXPECT_EQ(seal(blocks, space), absl::StatusCode::kInvalidArgument);
    space = Space();
    space.host = space.host.first(DeviceKernels::TransferTableBytes(kBlocks) - 1);
    EXPECT_EQ(seal(blocks, space), absl::StatusCode::kInvalidArgument);
    // A build without CUDA kernels.
    client::SetKernelLaunches(nullptr);
    EXPECT_EQ(seal(blocks, Space()), absl::StatusCode::kUnimplemented);
  } else {
    changed[1].bytes = changed[1].bytes.first(ns_.block_bytes - 1);
    EXPECT_EQ(seal(changed, Space()), absl::StatusCode::kInvalidArgument);
  }
  // Blocks without a slot are left out of a seal, and not read by the others.
  changed = blocks;
  changed[0] = {.status = BlockStatus::kExists};
  client::SetKernelLaunches(&kEmulated);
  EXPECT_EQ(seal(changed, Space()), absl::StatusCode::kOk);
  const client::DecodeSequence sequences[] = {Sequence(changed, 0)};
  EXPECT_EQ(kernels.Decode(Step(sequences, 0), {}, Space()).code(),
            absl::StatusCode::kInvalidArgument);
  const client::DecodeSequence whole[] = {Sequence(blocks, 0)};
  EXPECT_EQ(kernels.Decode(Step(whole, kLayers), {}, Space()).code(),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace kvtier
