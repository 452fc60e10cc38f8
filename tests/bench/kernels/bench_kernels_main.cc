// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "kernels/decode.h"
#include "kernels/engine_pages.h"
#include "kernels/engine_pages_layouts.h"
#include "kernels/gather.h"
#include "kernels/isa.h"
#include "kernels/seal.h"
#include "nlohmann/json.hpp"
#include "tests/bench/kernels/data.h"
#include "tests/bench/kernels/mla_data.h"
#include "tests/bench/kernels/ratio.h"

// Prints the speed table of kernels/: each row is the ratio of two things timed in turn.
//
//   bench_kernels [--json] [--rounds N] [--filter TEXT]

namespace kvtier::bench {
namespace {

using kernels::Isa;

constexpr uint32_t kHeadDim = 128;
constexpr kernels::TileShape kTile{.block_tokens = 64, .head_dim = kHeadDim};
constexpr uint64_t kTransferTiles = 4096;  // 128 MiB of BF16: no cache holds it.
constexpr uint64_t kContextTokens = 32768;
constexpr uint32_t kContextHeads = 16;

struct Row {
  std::string name;
  double must = 0;  // 0: shown only.
  double goal = 0;
  bool less_is_better = false;
  double value = 0;
  std::string rates;
};

void Require(const kernels::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "kernel failed: %s\n", status.message());
  std::exit(1);
}

// Runs the tasks of Decode on `thread_count` threads, the caller among them.
class Threads {
 public:
  explicit Threads(uint32_t thread_count) : thread_count_(thread_count) {}

  kernels::Executor executor() { return {.run = Run, .self = this}; }

 private:
  static void Run(void* self, uint32_t task_count, kernels::Executor::Task task, void* context) {
    const uint32_t threads = static_cast<Threads*>(self)->thread_count_;
    std::atomic<uint32_t> next{0};
    const auto work = [&] {
      for (uint32_t i = next++; i < task_count; i = next++) task(context, i);
    };
    std::vector<std::jthread> others;
    for (uint32_t i = 1; i < threads; ++i) others.emplace_back(work);
    work();
  }

  uint32_t thread_count_;
};

// Reads every cache line once, as fast as the core can.
uint64_t ReadAll(std::span<const std::byte> bytes) {
  uint64_t sums[32] = {};
  for (uint64_t i = 0; i + sizeof(sums) <= bytes.size(); i += sizeof(sums)) {
    uint64_t words[32];
    std::memcpy(words, bytes.data() + i, sizeof(words));
    for (uint32_t w = 0; w < 32; ++w) sums[w] ^= words[w];
  }
  uint64_t sum = 0;
  for (const uint64_t x : sums) sum ^= x;
  return sum;
}

class Bench {
 public:
  explicit Bench(uint32_t round_count, std::string filter)
      : round_count_(round_count), filter_(std::move(filter)) {}

  void RunAll() {
    for (const Isa isa : {Isa::kAvx512, Isa::kAvx2, Isa::kNeon}) {
      if (kernels::IsaIsAvailable(isa)) Transfers(isa);
    }
    EnginePageRows();
    for (const uint32_t group : {8U, 1U, 4U, 16U}) DecodeRows(group);
    for (const uint32_t heads : {16U, 128U}) MlaRows(heads);
    TwoCores();
  }

  const std::vector<Row>& rows() const { return rows_; }

 private:
  bool Wanted(const std::string& name) const { return name.find(filter_) != std::string::npos; }

  void Add(Row row) {
    std::fprintf(stderr, ".");
    rows_.push_back(std::move(row));
  }

  static std::string Rates(double subject_bytes, double anchor_bytes, const Ratio& ratio) {
    char text[96];
    std::snprintf(text, sizeof(text), "%.1f and %.1f GB/s",
                  subject_bytes / ratio.subject_seconds / 1e9,
                  anchor_bytes / ratio.anchor_seconds / 1e9);
    return text;
  }

  void Transfers(Isa isa) {
    const std::string isa_name = kernels::IsaName(isa);
    const bool best = isa == kernels::BestIsa();
    const std::string names[] = {"seal BF16, " + isa_name + ": input bytes over memcpy of it",
                                 "seal BF16 4-over-6, " + isa_name + ": input bytes over memcpy",
                                 "gather to BF16, " + isa_name + ": output bytes over memcpy of it",
                                 "gather to FP8, " + isa_name + ": output bytes over memcpy of it"};
    if (std::none_of(std::begin(names), std::end(names),
                     [&](const std::string& name) { return Wanted(name); })) {
      return;
    }
    const uint64_t side_elements = uint64_t{kTile.block_tokens} * kHeadDim;
    const uint64_t bytes = kTransferTiles * side_elements * 2 * 2;
    const Buffer source(bytes);
    const Buffer copy(bytes);
    const Buffer tiles(kTransferTiles * kernels::TileBytes(kTile));
    FillBf16(source);
    kernels::SealStats stats;
    const auto tile_at = [&](uint64_t i) {
      return tiles.bytes().subspan(i * kernels::TileBytes(kTile), kernels::TileBytes(kTile));
    };
    const auto seal = [&](kernels::ScaleSearch search) {
      for (uint64_t i = 0; i < kTransferTiles; ++i) {
        const uint16_t* k = source.words() + 2 * i * side_elements;
        Require(kernels::SealTile(kTile, {.data = k, .token_stride = kHeadDim},
                                  {.data = k + side_elements, .token_stride = kHeadDim},
                                  {.g_k = 0x1p-6F, .g_v = 0x1p-6F, .search = search, .isa = isa},
                                  tile_at(i), &stats));
      }
    };
    const auto gather = [&](kernels::ElementType type) {
      for (uint64_t i = 0; i < kTransferTiles; ++i) {
        std::byte* k = copy.bytes().data() + 2 * i * side_elements * kernels::ElementBytes(type);
        Require(kernels::GatherTile(kTile, tile_at(i),
                                    {.g_k = 0x1p-6F, .g_v = 0x1p-6F, .streaming = true, .isa = isa},
                                    {.type = type, .data = k, .token_stride = kHeadDim},
                                    {.type = type,
                                     .data = k + side_elements * kernels::ElementBytes(type),
                                     .token_stride = kHeadDim}));
      }
    };
    const auto copy_bytes = [&](uint64_t count) {
      std::memcpy(copy.bytes().data(), source.bytes().data(), count);
    };
    const auto add = [&](const std::string& name, double must, double goal, uint64_t count,
                         const std::function<void()>& subject) {
      const Ratio ratio = Measure({subject, [&] { copy_bytes(count); }}, round_count_);
      if (!Wanted(name)) return;
      Add({.name = name,
           .must = best ? must : 0,
           .goal = best ? goal : 0,
           .value = 1 / ratio.subject_over_anchor,
           .rates = Rates(static_cast<double>(count), static_cast<double>(count), ratio)});
    };
    add(names[0], 0.35, 0.6, bytes, [&] { seal(kernels::ScaleSearch::kAmax6); });
    add(names[1], 0, 0, bytes, [&] { seal(kernels::ScaleSearch::kFourOverSix); });
    seal(kernels::ScaleSearch::kAmax6);
    add(names[2], 0.5, 0.8, bytes, [&] { gather(kernels::ElementType::kBf16); });
    add(names[3], 0, 0, bytes / 2, [&] { gather(kernels::ElementType::kFp8E4m3); });
  }

  // Pages of 16 tokens and 8 kv heads, tiles of all heads in turn: what an engine would do.
  void EnginePageRows() {
    constexpr kernels::EnginePageShape kPage{
        .kv_head_count = 8, .head_dim = kHeadDim, .page_tokens = 16};
    const struct {
      std::string name;
      kernels::EnginePageLayout layout;
    } engines[] = {
        {"vLLM HND", kernels::VllmHnd(kPage, kernels::ScaleOrder::kInterleaved4)},
        {"vLLM NHD, linear scales", kernels::VllmNhd(kPage, kernels::ScaleOrder::kLinear)}};
    for (const auto& engine : engines) {
      const std::string names[] = {"import pages of " + engine.name + ": tile bytes over memcpy",
                                   "export pages of " + engine.name + ": tile bytes over memcpy"};
      if (!Wanted(names[0]) && !Wanted(names[1])) continue;
      const uint64_t bytes = kTransferTiles * kernels::TileBytes(kTile);
      const Buffer pool(bytes);  // Zeros are valid scales.
      const Buffer tiles(bytes);
      const auto move = [&](bool import) {
        for (uint64_t i = 0; i < kTransferTiles; ++i) {
          const std::span<std::byte> tile =
              tiles.bytes().subspan(i * kernels::TileBytes(kTile), kernels::TileBytes(kTile));
          kernels::MutableEnginePages pages = kernels::OneBuffer(pool.bytes());
          pages.first_slot = i / kPage.kv_head_count * kTile.block_tokens;
          pages.kv_head_idx = static_cast<uint32_t>(i % kPage.kv_head_count);
          Require(import ? kernels::ImportTile(kTile, engine.layout, pages.AsConst(),
                                               {.k = 1.0F, .v = 1.0F}, tile)
                         : kernels::ExportTile(kTile, tile, engine.layout, pages));
        }
      };
      for (const bool import : {true, false}) {
        const std::string& name = names[import ? 0 : 1];
        if (!Wanted(name)) continue;
        const Ratio ratio =
            Measure({[&] { move(import); },
                     [&] { std::memcpy(tiles.bytes().data(), pool.bytes().data(), bytes); }},
                    round_count_);
        Add({.name = name,
             .value = 1 / ratio.subject_over_anchor,
             .rates = Rates(static_cast<double>(bytes), static_cast<double>(bytes), ratio)});
      }
    }
  }

  void DecodeRows(uint32_t group) {
    const std::string prefix = "decode GQA " + std::to_string(group);
    const std::string over_bf16 = prefix + ": time over own BF16 decode";
    const std::string over_read = prefix + ": stored bytes over read bandwidth";
    const std::string over_avx512 = prefix + ": avx2 time over avx512 time";
    if (!Wanted(over_bf16) && !Wanted(over_read) && !Wanted(over_avx512)) return;
    Context context(kContextTokens, kContextHeads, group, kHeadDim);
    const Isa best = kernels::BestIsa();
    const auto decode = [](const kernels::DecodeArgs& args) { Require(kernels::Decode(args)); };
    const kernels::DecodeArgs sealed = context.Sealed(best);
    const auto stored = static_cast<double>(context.SealedBytes());
    if (Wanted(over_bf16)) {
      const kernels::DecodeArgs bf16 = context.Bf16(best);
      const Ratio ratio = Measure({[&] { decode(sealed); }, [&] { decode(bf16); }}, round_count_);
      Add({.name = over_bf16,
           .must = group == 8 ? 0.8 : 0,
           .goal = group == 8 ? 0.5 : 0,
           .less_is_better = true,
           .value = ratio.subject_over_anchor,
           .rates = Rates(stored, stored * 32 / 9, ratio)});
    }
    if (Wanted(over_read)) {
      const Ratio ratio = Measure(
          {[&] { decode(sealed); }, [&] { sink_ ^= ReadAll(context.blocks()); }}, round_count_);
      Add({.name = over_read,
           .must = group == 1 ? 0.4 : 0,
           .goal = group == 1 ? 0.7 : 0,
           .value = 1 / ratio.subject_over_anchor,
           .rates = Rates(stored, stored, ratio)});
    }
    if (Wanted(over_avx512) && best == Isa::kAvx512 && kernels::IsaIsAvailable(Isa::kAvx2)) {
      const kernels::DecodeArgs avx2 = context.Sealed(Isa::kAvx2);
      const Ratio ratio = Measure({[&] { decode(avx2); }, [&] { decode(sealed); }}, round_count_);
      Add({.name = over_avx512,
           .less_is_better = true,
           .value = ratio.subject_over_anchor,
           .rates = Rates(stored, stored, ratio)});
    }
  }

  void MlaRows(uint32_t heads) {
    const std::string prefix = "decode MLA, " + std::to_string(heads) + " heads";
    const std::string over_bf16 = prefix + ": time over own BF16 decode";
    const std::string over_read = prefix + ": stored bytes over read bandwidth";
    if (!Wanted(over_bf16) && !Wanted(over_read)) return;
    MlaContext context(2 * kContextTokens, heads);
    const auto decode = [](const kernels::DecodeMlaArgs& args) {
      Require(kernels::DecodeMla(args));
    };
    const kernels::DecodeMlaArgs sealed = context.Sealed(kernels::BestIsa());
    const auto stored = static_cast<double>(context.SealedBytes());
    if (Wanted(over_bf16)) {
      const kernels::DecodeMlaArgs bf16 = context.Bf16(kernels::BestIsa());
      const Ratio ratio = Measure({[&] { decode(sealed); }, [&] { decode(bf16); }}, round_count_);
      Add({.name = over_bf16,
           .less_is_better = true,
           .value = ratio.subject_over_anchor,
           .rates = Rates(stored, static_cast<double>(context.Bf16Bytes()), ratio)});
    }
    if (Wanted(over_read)) {
      const Ratio ratio = Measure(
          {[&] { decode(sealed); }, [&] { sink_ ^= ReadAll(context.blocks()); }}, round_count_);
      Add({.name = over_read,
           .value = 1 / ratio.subject_over_anchor,
           .rates = Rates(stored, stored, ratio)});
    }
  }

  void TwoCores() {
    const std::string name = "decode GQA 8, one context: speed of two cores over one";
    if (!Wanted(name)) return;
    Context context(8 * kContextTokens, 2, 8, kHeadDim);
    const kernels::DecodeArgs one = context.Sealed(kernels::BestIsa());
    kernels::DecodeArgs two = one;
    Threads threads(2);
    const kernels::Executor executor = threads.executor();
    std::vector<std::byte> workspace(kernels::DecodeWorkspaceBytes(one));
    two.executor = &executor;
    two.workspace = workspace;
    const Ratio ratio = MeasureWall(
        {[&] { Require(kernels::Decode(two)); }, [&] { Require(kernels::Decode(one)); }},
        round_count_);
    const auto stored = static_cast<double>(context.SealedBytes());
    Add({.name = name,
         .must = 1.8,
         .goal = 1.95,
         .value = 1 / ratio.subject_over_anchor,
         .rates = Rates(stored, stored, ratio)});
  }

  uint32_t round_count_;
  std::string filter_;
  std::vector<Row> rows_;
  uint64_t sink_ = 0;  // Keeps ReadAll from being left out.
};

const char* Verdict(const Row& row) {
  if (row.must == 0) return "";
  const auto reached = [&](double bound) {
    return row.less_is_better ? row.value <= bound : row.value >= bound;
  };
  return reached(row.goal) ? "goal" : (reached(row.must) ? "must" : "MISSED");
}

void PrintTable(const std::vector<Row>& rows) {
  std::printf("\n%s; %s; ratios are medians\n\n", MachineName().c_str(),
              kernels::IsaName(kernels::BestIsa()));
  std::printf("| what | must | goal | measured | | rates |\n|---|---|---|---|---|---|\n");
  for (const Row& row : rows) {
    const char* sign = row.less_is_better ? "<=" : ">=";
    if (row.must == 0) {
      std::printf("| %s | - | - | %.2f | | %s |\n", row.name.c_str(), row.value, row.rates.c_str());
    } else {
      std::printf("| %s | %s %.2f | %s %.2f | %.2f | %s | %s |\n", row.name.c_str(), sign, row.must,
                  sign, row.goal, row.value, Verdict(row), row.rates.c_str());
    }
  }
}

void PrintJson(const std::vector<Row>& rows) {
  nlohmann::json json;
  json["machine"] = MachineName();
  json["isa"] = kernels::IsaName(kernels::BestIsa());
  for (const Row& row : rows) {
    nlohmann::json entry = {{"name", row.name}, {"value", row.value}, {"rates", row.rates}};
    if (row.must != 0) {
      entry["must"] = row.must;
      entry["goal"] = row.goal;
      entry["verdict"] = Verdict(row);
    }
    json["rows"].push_back(entry);
  }
  std::printf("%s\n", json.dump(2).c_str());
}

int Main(int argc, char** argv) {
  bool json = false;
  uint32_t round_count = 15;
  std::string filter;
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    if (flag == "--json") {
      json = true;
    } else if (flag == "--rounds" && i + 1 < argc) {
      round_count = std::max(1U, static_cast<uint32_t>(std::strtoul(argv[++i], nullptr, 10)));
    } else if (flag == "--filter" && i + 1 < argc) {
      filter = argv[++i];
    } else {
      std::fprintf(stderr, "usage: bench_kernels [--json] [--rounds N] [--filter TEXT]\n");
      return 2;
    }
  }
  Bench bench(round_count, filter);
  bench.RunAll();
  std::fprintf(stderr, "\n");
  if (json) {
    PrintJson(bench.rows());
  } else {
    PrintTable(bench.rows());
  }
  return std::any_of(bench.rows().begin(), bench.rows().end(),
                     [](const Row& row) { return std::strcmp(Verdict(row), "MISSED") == 0; })
             ? 1
             : 0;
}

}  // namespace
}  // namespace kvtier::bench

int main(int argc, char** argv) { return kvtier::bench::Main(argc, argv); }
