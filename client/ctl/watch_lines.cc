// SPDX-License-Identifier: Apache-2.0
#include "client/ctl/watch_lines.h"

#include <nlohmann/json.hpp>
#include <span>

#include "client/ctl/format.h"
#include "proto/base/status_util.h"

namespace kvtier::ctl {
namespace {

// Blocks that follow one another in one chain.
struct Run {
  std::span<const Key> keys;
  std::optional<Key> parent;
};

std::vector<Run> RunsOf(const client::WatchedBlocks& blocks) {
  const std::span<const Key> keys(blocks.keys);
  if (!blocks.stored) return {{.keys = keys, .parent = std::nullopt}};
  std::vector<Run> runs;
  size_t first = 0;
  for (size_t i = 1; i <= keys.size(); ++i) {
    if (i < keys.size() && blocks.parents[i] == keys[i - 1]) continue;
    runs.push_back({.keys = keys.subspan(first, i - first), .parent = blocks.parents[first]});
    first = i;
  }
  return runs;
}

std::string Line(const client::WatchUpdate& update, const char* event, Json fields) {
  Json line = {{"event", event}, {"epoch", EpochText(update.epoch)}, {"sequence", update.sequence}};
  line.update(fields);
  return line.dump() + "\n";
}

std::string JsonLine(const client::WatchUpdate& update, const client::WatchedBlocks& blocks,
                     const Run& run) {
  Json hashes = Json::array();
  for (const Key& key : run.keys) hashes.push_back(key.Hex());
  Json fields = {{"block_hashes", hashes},
                 {"medium", std::string(client::MediumOf(blocks.tier))},
                 {"namespace", blocks.namespace_hash.Hex()}};
  if (!blocks.stored) return Line(update, "BlockRemoved", fields);
  fields["parent_block_hash"] = nullptr;
  if (run.parent.has_value()) fields["parent_block_hash"] = run.parent->Hex();
  fields["block_size"] = nullptr;
  if (blocks.block_tokens > 0) fields["block_size"] = blocks.block_tokens;
  return Line(update, "BlockStored", fields);
}

std::string TextLine(const client::WatchedBlocks& blocks, const Run& run) {
  return absl::StrFormat("%s %-7s %5d  %s%s\n", blocks.stored ? "stored " : "removed",
                         client::MediumOf(blocks.tier), run.keys.size(), run.keys.front().Hex(),
                         run.parent.has_value() ? " after " + run.parent->Hex() : "");
}

}  // namespace

std::string WatchLines(const client::WatchUpdate& update, bool json) {
  std::string lines;
  if (update.lost) lines += json ? Line(update, "Lost", Json::object()) : "lost events\n";
  if (update.reset) {
    lines += json ? Line(update, "AllBlocksCleared", Json::object()) : "snapshot\n";
  }
  for (const client::WatchedBlocks& blocks : update.blocks) {
    for (const Run& run : RunsOf(blocks)) {
      if (run.keys.empty()) continue;
      lines += json ? JsonLine(update, blocks, run) : TextLine(blocks, run);
    }
  }
  return lines;
}

}  // namespace kvtier::ctl
