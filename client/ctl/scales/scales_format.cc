// SPDX-License-Identifier: Apache-2.0
#include "client/ctl/scales/scales_format.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <span>

#include "absl/strings/escaping.h"
#include "absl/strings/str_format.h"
#include "client/ctl/table.h"

namespace kvtier::ctl {
namespace {

using Json = nlohmann::json;

struct Range {
  float min = 0.0F;
  float max = 0.0F;
};

// Of the values of one layer in an array of all layers; zeros if the array is empty.
Range RangeOf(const std::vector<float>& values, size_t layer, size_t layer_count) {
  if (values.empty()) return {};
  const size_t count = values.size() / layer_count;
  const auto [min, max] = std::ranges::minmax(std::span(values).subspan(layer * count, count));
  return {.min = min, .max = max};
}

// Global scales are powers of two: 2^-7 says more than 0.0078125.
std::string ScaleText(float value) {
  int exponent = 0;
  if (std::frexp(value, &exponent) == 0.5F) return absl::StrFormat("2^%d", exponent - 1);
  return absl::StrFormat("%.4g", value);
}

std::string RangeText(const Range& range, bool as_power) {
  const auto text = [as_power](float value) {
    return as_power ? ScaleText(value) : absl::StrFormat("%.4g", value);
  };
  if (range.min == range.max) return text(range.min);
  return text(range.min) + " .. " + text(range.max);
}

Json RangeJson(const Range& range) { return {{"min", range.min}, {"max", range.max}}; }

std::string TransformText(const ScaleSetFile& file) {
  std::string text = file.scales.k_mean.empty() ? "" : "K less its mean";
  if (!file.scales.k_smooth.empty()) {
    text += text.empty() ? "K smoothed" : ", smoothed";
    text += absl::StrFormat(" by amax^%g", file.provenance.smooth_alpha);
  }
  return text.empty() ? "none" : text;
}

std::string OriginText(const Provenance& provenance) {
  std::string text = provenance.kind + " by " + provenance.tool + ", " + provenance.created;
  if (!provenance.convention.empty()) text += ", convention " + provenance.convention;
  if (provenance.token_count > 0) text += ", " + HumanCount(provenance.token_count) + " tokens";
  // Texts come from a file: control characters must not reach a terminal.
  return absl::CHexEscape(text);
}

}  // namespace

Json ScalesJson(const ScaleSetFile& file) {
  const ScaleSetData& scales = file.scales;
  const Provenance& provenance = file.provenance;
  Json layers = Json::array();
  for (uint32_t i = 0; i < scales.layer_count; ++i) {
    Json layer = {{"layer", i},
                  {"k", SideFormatName(kernels::LayerFormatOf(scales.View(), i).k)},
                  {"v", SideFormatName(kernels::LayerFormatOf(scales.View(), i).v)},
                  {"g_k", RangeJson(RangeOf(scales.g_k, i, scales.layer_count))},
                  {"g_v", RangeJson(RangeOf(scales.g_v, i, scales.layer_count))}};
    for (const auto& [name, vector] :
         {std::pair("k_mean", &scales.k_mean), std::pair("k_smooth", &scales.k_smooth)}) {
      if (!vector->empty()) layer[name] = RangeJson(RangeOf(*vector, i, scales.layer_count));
    }
    layers.push_back(std::move(layer));
  }
  Json files = Json::array();
  for (const Provenance::File& source : provenance.files) {
    files.push_back({{"name", source.name}, {"bytes", source.bytes}, {"sha256", source.sha256}});
  }
  return {{"id", ScaleSetId(scales)},
          {"layer_count", scales.layer_count},
          {"kv_head_count", scales.kv_head_count},
          {"head_dim", scales.head_dim},
          {"search", SearchName(scales.search)},
          {"has_mean", !scales.k_mean.empty()},
          {"has_smooth", !scales.k_smooth.empty()},
          {"layers", layers},
          {"provenance",
           {{"kind", provenance.kind},
            {"tool", provenance.tool},
            {"created", provenance.created},
            {"model", provenance.model},
            {"convention", provenance.convention},
            {"token_count", provenance.token_count},
            {"nonfinite_count", provenance.nonfinite_count},
            {"smooth_alpha", provenance.smooth_alpha},
            {"files", files}}}};
}

std::string ScalesText(const ScaleSetFile& file) {
  const ScaleSetData& scales = file.scales;
  TextTable table({"LAYER>", "K", "V", "G_K", "G_V", "K_MEAN", "K_SMOOTH"});
  for (uint32_t i = 0; i < scales.layer_count; ++i) {
    const auto range = [&](const std::vector<float>& values, bool as_power) {
      return values.empty() ? "-" : RangeText(RangeOf(values, i, scales.layer_count), as_power);
    };
    table.Add({std::to_string(i),
               std::string(SideFormatName(kernels::LayerFormatOf(scales.View(), i).k)),
               std::string(SideFormatName(kernels::LayerFormatOf(scales.View(), i).v)),
               range(scales.g_k, true), range(scales.g_v, true), range(scales.k_mean, false),
               range(scales.k_smooth, true)});
  }
  const std::string model = absl::CHexEscape(file.provenance.model);
  return absl::StrFormat(
             "scale set %s\n  model      %s\n  shape      %d layers, %d kv heads, head dim %d\n"
             "  search     %s\n  transform  %s\n  origin     %s\n",
             ScaleSetId(scales), model.empty() ? "not named" : model, scales.layer_count,
             scales.kv_head_count, scales.head_dim, SearchName(scales.search), TransformText(file),
             OriginText(file.provenance)) +
         table.Print();
}

}  // namespace kvtier::ctl
