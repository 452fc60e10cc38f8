// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_KERNELS_MLA_H_
#define KVTIER_KERNELS_MLA_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/decode.h"
#include "kernels/element.h"
#include "kernels/executor.h"
#include "kernels/isa.h"
#include "kernels/mla_layout.h"
#include "kernels/nvfp4.h"
#include "kernels/seal.h"
#include "kernels/status.h"

// Multi-head latent attention over sealed blocks: tiles of mla_layout.h, and decode in the absorbed
// form, in which all heads read one latent row a token as K and as V. What is not said here is as
// in seal.h, gather.h and decode.h: ownership, alignment, threads, bits.

namespace kvtier::kernels {

struct MlaSealOptions {
  float g = 1.0F;  // Global scale of the latents of this layer, see nvfp4.h.
  ScaleSearch search = ScaleSearch::kAmax6;
  Isa isa = BestIsa();
};

// Seals block_tokens latent rows of 512 dims and rope rows of 64 dims. Of a cache with rows
// [latent | rope] of 576, both are views of the same memory. Latents are quantized as SealTile
// does; ropes are rounded to BF16, which keeps NaN and infinities and counts nothing. `stats`
// counts the vectors of the latents. dst is exactly MlaTileBytes(shape) long. The bytes are the
// same on every instruction set. There is no channel transform: it would change V with K. Errors:
// kInvalidArgument for a bad shape, scale, view or size; nothing is written then.
Status SealMlaTile(const MlaShape& shape, const ConstRows& latent, const ConstRows& rope,
                   const MlaSealOptions& options, std::span<std::byte> dst, SealStats* stats);

// Errors: kInvalidArgument for a bad shape or size, kDataLoss for a scale byte above 0x7E.
Status ValidateMlaTile(const MlaShape& shape, std::span<const std::byte> tile);

struct MlaGatherOptions {
  float g = 1.0F;          // The global scale that the tile was sealed with.
  bool streaming = false;  // As GatherOptions, for the latents.
  Isa isa = BestIsa();
};

// Dequantizes one tile into block_tokens latent rows and rope rows of any element type.
// Errors: kInvalidArgument for a bad shape, scale, view or size; kDataLoss as ValidateMlaTile.
// Nothing is written on an error.
Status GatherMlaTile(const MlaShape& shape, std::span<const std::byte> tile,
                     const MlaGatherOptions& options, const MutableRows& latent,
                     const MutableRows& rope);

// The last, unsealed tokens of a context. Row t of the latents begins t * latent_stride elements
// after `latent`, that of the ropes t * rope_stride elements after `rope`.
struct MlaTail {
  const void* latent = nullptr;  // May be null when token_count is 0. Needs no alignment.
  const void* rope = nullptr;
  uint32_t token_count = 0;
  uint64_t latent_stride = 0;                    // In elements, >= 512.
  uint64_t rope_stride = 0;                      // In elements, >= 64.
  ElementType latent_type = ElementType::kBf16;  // kBf16 or kFp8E4m3.
  ElementType rope_type = ElementType::kBf16;    // kBf16 or kFp8E4m3.
  float latent_scale = 1.0F;  // FP8 only: multiplies the stored values. Finite, above 0.
  float rope_scale = 1.0F;
};

// One decode step of one sequence for one layer. Fields without a comment are those of DecodeArgs.
struct DecodeMlaArgs {
  MlaBlockShape block_shape;
  uint32_t layer_idx = 0;

  // [query_len][query_head_count][576], dense, BF16 or FP32, all finite: 512 dims that meet the
  // latent (the query times the absorbed up-projection of K), then 64 that meet the rope.
  ElementType query_type = ElementType::kFp32;
  const void* query = nullptr;
  uint32_t query_head_count = 0;  // >= 1. Passes have 16 rows: multiples of 16 are best.

  // Entry i is a block of MlaBlockBytes(block_shape) bytes.
  std::span<const std::byte* const> block_table;
  uint64_t sealed_token_count = 0;
  MlaTail tail = {};

  // Multiplies q.k: of the model's head dim before absorption, not 1 / sqrt(576).
  float softmax_scale = 0.0F;
  float g = 1.0F;  // This layer's global scale.

  // [query_len][query_head_count][512]: weighted sums of latents, for the up-projection of V.
  std::span<float> out;
  std::span<float> lse;  // [query_len][query_head_count]

  uint32_t query_len = 1;
  uint64_t first_token = 0;
  uint64_t context_token_count = 0;
  uint64_t window = 0;
  float soft_cap = 0.0F;
  std::span<const float> sinks = {};
  Isa isa = BestIsa();
  const Executor* executor = nullptr;
  std::span<std::byte> workspace = {};  // DecodeMlaWorkspaceBytes, with an executor.
};

// score = softmax_scale * (q_latent . c + q_rope . k_rope), out = sum of p * c, over the
// dequantized latents c. The contract of Decode holds, with these differences: splits are 1024
// tokens or more, and with an executor a task is 16 query rows of a split; parts of a sequence
// merge with MergeDecode (head_dim 512); it uses about 270 KiB of stack; there are no mixed formats
// and no K transform. Error of out against exact attention over the same values: 1e-5 of the
// largest |out| for kScalar, kAvx2 and kNeon (which runs the scalar form), at most 2^-9 for kAvx512
// (measured: below 2^-10 from uniform to one-hot softmax).
Status DecodeMla(const DecodeMlaArgs& args);

// Bytes of workspace that DecodeMla needs with an executor; 0 for arguments that it refuses.
uint64_t DecodeMlaWorkspaceBytes(const DecodeMlaArgs& args);

}  // namespace kvtier::kernels

#endif  // KVTIER_KERNELS_MLA_H_
