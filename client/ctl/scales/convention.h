// SPDX-License-Identifier: Apache-2.0
//
// What the scales of K and V in checkpoints mean. Every tool stores amax, the largest magnitude
// that its calibration saw, divided by another number, under names that do not tell which. Read in
// (project: file; all of 2026):
//   NVIDIA/Model-Optimizer: modelopt/torch/export/unified_export_hf.py divides by 448 for FP8 and
//   for
//     NVFP4 since pull request 790 (merged January 2026), and by 6 * 448 for NVFP4 before; which
//     release was the first is not confirmed: 0.43 has it, 0.40 does not. quant_utils.py
//     (postprocess_state_dict) writes k_proj.k_scale and v_proj.v_scale. Exports before 0.43 raise
//     FP8 scales to 1, and the fp8_cast and nvfp4_cast modes store 1: no calibration at all.
//   intel/auto-round: auto_round/experimental/kv_cache.py: NVFP4 amax / 2688 as
//     self_attn.k_global_scale and v_global_scale, FP8 amax / 448 as self_attn.k_scale and v_scale,
//     one value or one a kv head.
//   vllm-project/compressed-tensors: quantization/lifecycle: self_attn.k_scale and v_scale, FP8
//     amax / 448. Its own runtime reads a k_global_scale the other way around, 2688 / amax, says
//     auto-round's file; not confirmed in a checkpoint.
//   vllm-project/llm-compressor: pull request 2845 (not merged when read) makes NVFP4 KV scales of
//     amax / 6, says vllm-project/vllm pull request 46329; the tensors' names are not confirmed.
//   vllm-project/vllm: model_executor/model_loader/weight_utils.py (maybe_remap_kv_scale_name) for
//   the
//     names that occur: kv_scale, qkv_proj.k_scale, attn.k_scale, k_proj.output_scale (AMD Quark).
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace kvtier::ctl {

enum class ScaleConvention : uint8_t {
  kModelOpt,       // amax / 448
  kModelOpt2688,   // amax / 2688, NVFP4 before pull request 790
  kAutoRound,      // amax / 2688, NVFP4
  kLlmCompressor,  // amax / 6, NVFP4
  kTrtllm,         // amax / 448
  kFp8,            // amax / 448, FP8 of any tool
  kEncode2688,     // 2688 / amax: what multiplies values when they are encoded
};

struct ConventionFacts {
  ScaleConvention convention;
  std::string_view name;  // As on the command line.
  float factor;           // amax = stored * factor, or factor / stored.
  bool is_inverse;
};
std::span<const ConventionFacts> AllConventions();
const ConventionFacts& FactsOf(ScaleConvention convention);
// "modelopt", "modelopt-2688", "auto-round", "llm-compressor", "trtllm", "fp8", "encode-2688".
// Errors: INVALID_ARGUMENT for another name.
absl::StatusOr<ScaleConvention> ParseConvention(std::string_view name);

// The largest magnitude that a stored scale stands for.
float AmaxOfStored(ScaleConvention convention, float stored);

// A key or value outside these is not one that a model computes: real ones are 0.1 to 1000.
inline constexpr float kPlausibleAmaxMin = 1e-4F;
inline constexpr float kPlausibleAmaxMax = 1e5F;

}  // namespace kvtier::ctl
