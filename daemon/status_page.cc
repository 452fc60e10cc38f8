// SPDX-License-Identifier: Apache-2.0
#include "daemon/status_page.h"

#include <google/protobuf/util/json_util.h>

namespace kvtier {
namespace {

std::string Json(const google::protobuf::Message& message) {
  google::protobuf::util::JsonPrintOptions options;
  options.always_print_primitive_fields = true;
  options.preserve_proto_field_names = true;
  std::string json;
  // Fails for Any and out-of-range times only, which these messages do not have.
  if (!google::protobuf::util::MessageToJsonString(message, &json, options).ok()) return "{}";
  return json;
}

}  // namespace

std::string StatusJson(const v1::GetStatusResponse& status, const v1::GetTiersResponse& tiers) {
  return "{\"status\": " + Json(status) + ", \"tiers\": " + Json(tiers) + "}\n";
}

const char kStatusPage[] = R"html(<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>kvtierd</title>
<style>
:root { color-scheme: light dark; --line: #8884; --good: #2a8f4a; --bad: #c8372d; }
body { font: 15px/1.45 system-ui, sans-serif; max-width: 62rem; margin: 1.5rem auto;
       padding: 0 1rem; }
h1 { font-size: 1.3rem; margin: 0 0 .2rem; }
h2 { font-size: 1rem; margin: 1.6rem 0 .4rem; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: right; padding: .25rem .6rem; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; }
td { font-variant-numeric: tabular-nums; }
.bar { height: .5rem; background: var(--line); border-radius: .25rem; overflow: hidden;
       min-width: 6rem; }
.bar > div { height: 100%; background: #3b74c4; }
.bad { color: var(--bad); } .good { color: var(--good); }
svg { width: 100%; height: 8rem; border-bottom: 1px solid var(--line); }
</style>
</head>
<body>
<h1>kvtierd <span id="state"></span></h1>
<div id="about">no answer yet</div>
<h2>Tiers</h2>
<table><thead><tr><th>tier</th><th></th><th>used</th><th>capacity</th><th>pinned</th><th>blocks</th>
<th>hits</th><th>evicted</th><th>corrupt</th></tr></thead><tbody id="tiers"></tbody></table>
<h2>Hit rate of the last ten minutes, by tier</h2>
<svg id="rate" viewBox="0 0 300 100" preserveAspectRatio="none"></svg>
<div id="attribution"></div>
<h2>Links</h2>
<table><thead><tr><th>link</th><th>now</th><th>moved</th><th>blocks</th><th>failed</th>
<th>under way</th></tr></thead><tbody id="links"></tbody></table>
<script>
"use strict";
const INTERVAL_MS = 2000, KEPT = 300, TIERS = ["TIER_HBM", "TIER_HOST", "TIER_NVME"];
const COLORS = {TIER_HBM: "#2a8f4a", TIER_HOST: "#3b74c4", TIER_NVME: "#b9822b"};
const history = [];
const byId = id => document.getElementById(id);
const short = tier => tier.replace("TIER_", "").toLowerCase();
function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit + 1 < units.length) { value /= 1024; unit++; }
  return value.toFixed(unit && value < 100 ? 1 : 0) + " " + units[unit];
}
function row(cells) {
  const tr = document.createElement("tr");
  for (const cell of cells) {
    const td = document.createElement("td");
    if (cell instanceof Node) td.append(cell); else td.textContent = cell;
    tr.append(td);
  }
  return tr;
}
function bar(share) {
  const outer = document.createElement("div"), inner = document.createElement("div");
  outer.className = "bar";
  inner.style.width = Math.min(100, 100 * share) + "%";
  outer.append(inner);
  return outer;
}
function hitsOf(now) {
  const hits = {};
  for (const tier of now.tiers.tiers) hits[tier.tier] = Number(tier.hit_block_count);
  return hits;
}
function drawRate() {
  const paths = {};
  let floor = [];
  for (const tier of TIERS) {
    const top = [];
    for (let i = 1; i < history.length; i++) {
      const asked = history[i].asked - history[i - 1].asked;
      const hit = (history[i].hits[tier] || 0) - (history[i - 1].hits[tier] || 0);
      top.push((floor[i - 1] || 0) + (asked > 0 ? hit / asked : 0));
    }
    const x = i => 300 * (KEPT - history.length + 1 + i) / KEPT;
    const upper = top.map((y, i) => x(i) + "," + (100 - 100 * y));
    const lower = top.map((_, i) => x(i) + "," + (100 - 100 * (floor[i] || 0))).reverse();
    paths[tier] = upper.concat(lower).join(" ");
    floor = top;
  }
  byId("rate").replaceChildren(...TIERS.map(tier => {
    const polygon = document.createElementNS("http://www.w3.org/2000/svg", "polygon");
    polygon.setAttribute("points", paths[tier]);
    polygon.setAttribute("fill", COLORS[tier]);
    return polygon;
  }));
}
function show(now, seconds) {
  const status = now.status, store = now.tiers.store;
  const sick = status.tier_healths.filter(health => health.degraded);
  const state = byId("state");
  state.textContent = status.draining ? "draining" : sick.length ? "degraded" : "serving";
  state.className = status.draining || sick.length ? "bad" : "good";
  byId("about").textContent = "version " + status.version + ", up " +
      Math.floor(status.uptime_ms / 1000) + " s, hbm on " + status.device + ", " +
      status.session_count + " sessions, " + status.context_count + " contexts, " +
      status.block_count + " blocks" +
      sick.map(health => "; " + short(health.tier) + ": " + health.reason).join("");
  byId("tiers").replaceChildren(...now.tiers.tiers.map(tier => row([
    short(tier.tier), bar(tier.used_bytes / Math.max(1, tier.capacity_bytes)),
    bytes(Number(tier.used_bytes)), bytes(Number(tier.capacity_bytes)),
    bytes(Number(tier.pinned_bytes)), tier.block_count, tier.hit_block_count,
    tier.evicted_block_count, tier.corrupt_block_count])));
  const asked = Number(store.lookup_block_count);
  const share = count => (asked ? 100 * count / asked : 0).toFixed(1) + " %";
  const hits = hitsOf(now);
  byId("attribution").textContent = "of " + asked + " blocks looked up since the start: " +
      TIERS.map(tier => short(tier) + " " + share(hits[tier] || 0)).join(", ") + ", missed " +
      share(asked - Number(store.lookup_hit_block_count));
  const before = history.length ? history[history.length - 1].moved : {};
  const moved = {};
  byId("links").replaceChildren(...now.tiers.links.map(link => {
    const name = short(link.source) + " \u2192 " + short(link.target);
    moved[name] = Number(link.moved_bytes);
    const rate = name in before ? (moved[name] - before[name]) / seconds : 0;
    return row([name, bytes(rate) + "/s", bytes(moved[name]), link.moved_block_count,
                link.failed_block_count, link.inflight_count]);
  }));
  if (history.length && asked < history[history.length - 1].asked) history.length = 0;
  history.push({asked, hits, moved});
  if (history.length > KEPT + 1) history.shift();
  drawRate();
}
let last = performance.now();
async function poll() {
  try {
    const answer = await fetch("/status.json", {signal: AbortSignal.timeout(INTERVAL_MS)});
    const now = await answer.json();
    const seconds = (performance.now() - last) / 1000;
    last = performance.now();
    show(now, seconds);
  } catch (error) {
    byId("state").textContent = "does not answer";
    byId("state").className = "bad";
  }
  setTimeout(poll, INTERVAL_MS);
}
poll();
</script>
</body>
</html>
)html";

}  // namespace kvtier
