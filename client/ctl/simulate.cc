// SPDX-License-Identifier: Apache-2.0
#include "client/ctl/simulate.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <nlohmann/json.hpp>
#include <span>
#include <utility>

#include "absl/strings/str_format.h"
#include "client/ctl/svg_plot.h"
#include "client/ctl/table.h"
#include "policy/sim/concurrency.h"
#include "policy/sim/hints.h"
#include "proto/base/status_util.h"

namespace kvtier::ctl {
namespace {

constexpr double kBf16Bits = 16;

std::vector<std::string_view> PartsOf(std::string_view text) {
  std::vector<std::string_view> parts;
  while (true) {
    const size_t comma = text.find(',');
    parts.push_back(text.substr(0, comma));
    if (comma == std::string_view::npos) return parts;
    text.remove_prefix(comma + 1);
  }
}

uint64_t CapacityOf(const CacheSize& size, const CodecSize& codec, const sim::Trace& trace,
                    uint64_t token_bytes) {
  if (size.bytes == 0) {
    return static_cast<uint64_t>(size.share * static_cast<double>(trace.blocks.size()));
  }
  const double block_bytes =
      static_cast<double>(token_bytes) * trace.block_tokens * codec.value_bits / kBf16Bits;
  return static_cast<uint64_t>(static_cast<double>(size.bytes) / block_bytes);
}

void RunPolicies(const sim::Trace& trace, const SimulateOptions& options, uint32_t concurrency,
                 std::vector<SimulateRow>* rows) {
  const std::vector<sim::RequestHint> hints =
      HintsOf(trace, {.finished = options.hints, .returns = options.hints});
  const auto asked = static_cast<double>(std::max<uint64_t>(1, trace.BlockReferenceCount()));
  for (const CodecSize& codec : options.codecs) {
    for (const CacheSize& size : options.sizes) {
      const uint64_t capacity_blocks = CapacityOf(size, codec, trace, options.token_bytes);
      for (size_t i = 0; i < sim::kCachePolicyCount; ++i) {
        const auto policy = static_cast<sim::CachePolicy>(i);
        const sim::CacheHits hits = SimulateCache(trace, policy,
                                                  {.capacity_blocks = capacity_blocks,
                                                   .make_room_first = options.make_room_first,
                                                   .hints = hints});
        rows->push_back(
            {.policy = policy,
             .codec = codec.name,
             .concurrency = concurrency,
             .size = size.text,
             .capacity_blocks = capacity_blocks,
             .hit_rate = hits.HitRate(),
             .writes_per_block = static_cast<double>(hits.inserted_block_count) / asked});
      }
    }
  }
}

}  // namespace

absl::StatusOr<std::vector<CacheSize>> ParseCacheSizes(std::string_view text) {
  constexpr std::array<std::pair<std::string_view, double>, 6> kUnits = {
      {{"%", 0.01}, {"KiB", 0x1p10}, {"MiB", 0x1p20}, {"GiB", 0x1p30}, {"TiB", 0x1p40}, {"B", 1}}};
  std::vector<CacheSize> sizes;
  for (const std::string_view part : PartsOf(text)) {
    double number = 0;
    const auto [end, error] = std::from_chars(part.data(), part.data() + part.size(), number);
    const std::string_view unit(end, static_cast<size_t>(part.data() + part.size() - end));
    const auto* const known =
        std::ranges::find_if(kUnits, [unit](const auto& each) { return each.first == unit; });
    const bool valid = error == std::errc() && known != kUnits.end() && number > 0 &&
                       number * known->second < 0x1p60;
    if (!valid) return Invalid("size \"%s\" is none; write 5%% or 512GiB", part);
    CacheSize size{.text = std::string(part)};
    if (unit == "%") {
      size.share = number * known->second;
    } else {
      size.bytes = std::max<uint64_t>(1, static_cast<uint64_t>(number * known->second));
    }
    sizes.push_back(std::move(size));
  }
  return sizes;
}

absl::StatusOr<std::vector<CodecSize>> ParseCodecs(std::string_view text) {
  // NVFP4: four bits and an eight-bit scale for every sixteen values.
  const std::array<CodecSize, 3> known = {{{"bf16", 16}, {"fp8", 8}, {"nvfp4", 4.5}}};
  std::vector<CodecSize> codecs;
  for (const std::string_view part : PartsOf(text)) {
    const auto* const found =
        std::ranges::find_if(known, [part](const CodecSize& codec) { return codec.name == part; });
    if (found == known.end()) {
      return Invalid("codec \"%s\" is unknown; use bf16, fp8 or nvfp4", part);
    }
    codecs.push_back(*found);
  }
  return codecs;
}

std::vector<SimulateRow> RunSimulations(const sim::Trace& trace, const SimulateOptions& options) {
  std::vector<SimulateRow> rows;
  if (options.concurrency.empty()) RunPolicies(trace, options, 0, &rows);
  for (const uint32_t context_count : options.concurrency) {
    RunPolicies(sim::WithConcurrency(trace, context_count), options, context_count, &rows);
  }
  return rows;
}

std::string SimulateText(const std::vector<SimulateRow>& rows) {
  std::vector<std::string> headers = {"CODEC", "AT ONCE>", "SIZE>", "BLOCKS>"};
  for (size_t i = 0; i < sim::kCachePolicyCount; ++i) {
    headers.push_back(std::string(CachePolicyName(static_cast<sim::CachePolicy>(i))) + ">");
  }
  headers.push_back("WRITES>");
  TextTable table(headers);
  for (size_t first = 0; first + sim::kCachePolicyCount <= rows.size();
       first += sim::kCachePolicyCount) {
    const SimulateRow& row = rows[first];
    std::vector<std::string> cells = {row.codec,
                                      row.concurrency == 0 ? "-" : HumanCount(row.concurrency),
                                      row.size, HumanCount(row.capacity_blocks)};
    double writes = 0;
    for (size_t i = 0; i < sim::kCachePolicyCount; ++i) {
      cells.push_back(absl::StrFormat("%.1f", 100 * rows[first + i].hit_rate));
      if (rows[first + i].policy == sim::CachePolicy::kHazard) {
        writes = rows[first + i].writes_per_block;
      }
    }
    cells.push_back(absl::StrFormat("%.3f", writes));
    table.Add(cells);
  }
  return table.Print() +
         "Percent of tokens that hit; WRITES: blocks stored per block asked for, under hazard.\n";
}

nlohmann::json SimulateJson(const std::vector<SimulateRow>& rows) {
  nlohmann::json json = {{"runs", nlohmann::json::array()}};
  for (const SimulateRow& row : rows) {
    json["runs"].push_back({{"policy", std::string(CachePolicyName(row.policy))},
                            {"codec", row.codec},
                            {"concurrency", row.concurrency},
                            {"size", row.size},
                            {"capacity_block_count", row.capacity_blocks},
                            {"token_hit_rate", row.hit_rate},
                            {"writes_per_block", row.writes_per_block}});
  }
  return json;
}

std::string SimulateSvg(const std::vector<SimulateRow>& rows, const sim::Trace& trace) {
  const bool by_concurrency = !rows.empty() && rows.front().concurrency != 0;
  LineChart chart{.title = "Token hit rate",
                  .x_label = by_concurrency ? "contexts at once" : "blocks held, % of all",
                  .y_label = "% of tokens",
                  .log_x = true};
  for (const SimulateRow& row : rows) {
    std::string name = std::string(CachePolicyName(row.policy)) + ", " + row.codec;
    if (by_concurrency) name += ", " + row.size;
    auto line = std::ranges::find_if(
        chart.series, [&name](const LineChart::Series& each) { return each.name == name; });
    if (line == chart.series.end()) {
      line = chart.series.insert(line, LineChart::Series{.name = name});
    }
    const double x = by_concurrency ? row.concurrency
                                    : 100 * static_cast<double>(row.capacity_blocks) /
                                          static_cast<double>(trace.blocks.size());
    line->points.emplace_back(x, 100 * row.hit_rate);
  }
  for (LineChart::Series& line : chart.series) std::ranges::sort(line.points);
  const Chart drawn = std::move(chart);
  return SvgOf(std::span(&drawn, 1));
}

}  // namespace kvtier::ctl
