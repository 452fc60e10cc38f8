// SPDX-License-Identifier: Apache-2.0
#include "client/ctl/scales/convention.h"

#include "absl/strings/str_join.h"
#include "proto/base/status_util.h"

namespace kvtier::ctl {
namespace {

constexpr ConventionFacts kConventions[] = {
    {ScaleConvention::kModelOpt, "modelopt", 448.0F, false},
    {ScaleConvention::kModelOpt2688, "modelopt-2688", 2688.0F, false},
    {ScaleConvention::kAutoRound, "auto-round", 2688.0F, false},
    {ScaleConvention::kLlmCompressor, "llm-compressor", 6.0F, false},
    {ScaleConvention::kTrtllm, "trtllm", 448.0F, false},
    {ScaleConvention::kFp8, "fp8", 448.0F, false},
    {ScaleConvention::kEncode2688, "encode-2688", 2688.0F, true},
};

}  // namespace

std::span<const ConventionFacts> AllConventions() { return kConventions; }

const ConventionFacts& FactsOf(ScaleConvention convention) {
  return kConventions[static_cast<size_t>(convention)];
}

absl::StatusOr<ScaleConvention> ParseConvention(std::string_view name) {
  for (const ConventionFacts& facts : kConventions) {
    if (facts.name == name) return facts.convention;
  }
  return Invalid("unknown convention %s", name);
}

float AmaxOfStored(ScaleConvention convention, float stored) {
  const ConventionFacts& facts = FactsOf(convention);
  return facts.is_inverse ? facts.factor / stored : facts.factor * stored;
}

}  // namespace kvtier::ctl
