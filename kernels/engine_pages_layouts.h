// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_KERNELS_ENGINE_PAGES_LAYOUTS_H_
#define KVTIER_KERNELS_ENGINE_PAGES_LAYOUTS_H_

#include <cstdint>
#include <initializer_list>

#include "kernels/engine_pages.h"

// NVFP4 page layouts of engines, as read in their public sources in November 2026. H = kv heads, P
// = page_tokens, d = head_dim, S = d / 16. [a][b][c] is row-major. Where an allocator pads pages or
// puts other layers between them, overwrite page_stride and offset after construction.
//
// Read (file, commit):
//   FlashInfer  flashinfer/quantization/fp4_quantization.py, 001b5cff
//   (nvfp4_quantize_paged_kv_cache:
//               shapes, V order for NHD and HND); include/flashinfer/page.cuh, 0006e88a (strides, K
//               and V apart); csrc/fp4_kv_quantization.cu, 0c33fb60 (linear scales)
//   TRT-LLM cpp/tensorrt_llm/kernels/unfusedAttentionKernels/unfusedAttentionKernels_2_template.h,
//               0097566b (quantizeAndWriteFP4KVCache); cpp/tensorrt_llm/kernels/kvCacheUtils.h,
//               0ccf9032 (KVBlockArray)
//   vLLM        csrc/libtorch_stable/nvfp4_kv_cache_kernels.cu, 0cd789b3
//   SGLang      python/sglang/srt/layers/quantization/nvfp4_kv_cache.py, 93b81000;
//               fp4_kv_cache_quant_method.py beside it, 02719cd1
// Not confirmed: nothing here has been run against these engines; which releases have what was
// read; that TRT-LLM's pool of scales has no padding between blocks.

namespace kvtier::kernels {

struct EnginePageShape {
  uint32_t kv_head_count = 0;
  uint32_t head_dim = 0;
  uint32_t page_tokens = 0;
};

// [page][P][H][row_bytes], the only content of its buffer.
constexpr EngineRows NhdRows(const EnginePageShape& shape, uint64_t row_bytes) {
  return {.page_stride = uint64_t{shape.page_tokens} * shape.kv_head_count * row_bytes,
          .head_stride = row_bytes,
          .token_stride = shape.kv_head_count * row_bytes};
}

// [page][H][P][row_bytes], the only content of its buffer.
constexpr EngineRows HndRows(const EnginePageShape& shape, uint64_t row_bytes) {
  return {.page_stride = uint64_t{shape.page_tokens} * shape.kv_head_count * row_bytes,
          .head_stride = shape.page_tokens * row_bytes,
          .token_stride = row_bytes};
}

// K and V alike, each with codes and scales in buffers of their own.
constexpr EnginePageLayout FourBuffers(const EnginePageShape& shape, const EngineRows& codes,
                                       const EngineRows& scales, ScaleOrder v_scale_order) {
  return {.kv_head_count = shape.kv_head_count,
          .head_dim = shape.head_dim,
          .page_tokens = shape.page_tokens,
          .k = {.codes = codes, .scales = scales},
          .v = {.codes = codes, .scales = scales, .scale_order = v_scale_order}};
}

// FlashInfer, a tuple (k, v) of caches [page][P][H][d/2] and one of scales [page][P][H][S]. V
// scales are linear for FA2 and XQA (SM12x) and what nvfp4_kv_quantize and the append functions
// write; interleaved for trtllm-gen (SM100), from nvfp4_quantize_paged_kv_cache.
constexpr EnginePageLayout FlashInferNhd(const EnginePageShape& shape, ScaleOrder v_scale_order) {
  return FourBuffers(shape, NhdRows(shape, shape.head_dim / 2), NhdRows(shape, shape.head_dim / 16),
                     v_scale_order);
}

// FlashInfer, [page][H][P][d/2] and [page][H][P][S]; V scales as above.
constexpr EnginePageLayout FlashInferHnd(const EnginePageShape& shape, ScaleOrder v_scale_order) {
  return FourBuffers(shape, HndRows(shape, shape.head_dim / 2), HndRows(shape, shape.head_dim / 16),
                     v_scale_order);
}

// FlashInfer, one tensor [page][2][...] of codes and one of scales in place of tuples: give the
// buffer of each twice.
constexpr EnginePageLayout Stacked(EnginePageLayout layout) {
  layout.v.codes.offset += layout.k.codes.page_stride;
  layout.v.scales.offset += layout.k.scales.page_stride;
  for (EngineRows* rows : {&layout.k.codes, &layout.k.scales, &layout.v.codes, &layout.v.scales}) {
    rows->page_stride *= 2;
  }
  return layout;
}

// TRT-LLM with trtllm-gen: a pool of blocks [H][P][d/2] and one of [H][P][S] with the same numbers.
// A block holds K or V: page_table and v_page_table are the two rows of the block offsets, without
// the bit that marks the secondary pool. Codes of K and V share a buffer, scales too.
constexpr EnginePageLayout TrtLlm(const EnginePageShape& shape) {
  return FlashInferHnd(shape, ScaleOrder::kInterleaved4);
}

// SGLang on SM100 (GenMHA): slots of codes [slot][H][d/2], scales [page][H][P][S], V interleaved.
// On SM120 it is FlashInferNhd, linear.
constexpr EnginePageLayout SglangGenMha(const EnginePageShape& shape) {
  return FourBuffers(shape, NhdRows(shape, shape.head_dim / 2), HndRows(shape, shape.head_dim / 16),
                     ScaleOrder::kInterleaved4);
}

// One buffer of pages [K codes | K scales | V codes | V scales], each ordered as `layout` (of
// FourBuffers) has it.
constexpr EnginePageLayout PackedPage(EnginePageLayout layout) {
  uint64_t end = 0;
  for (EngineRows* rows : {&layout.k.codes, &layout.k.scales, &layout.v.codes, &layout.v.scales}) {
    rows->offset = end;
    end += rows->page_stride;
  }
  for (EngineRows* rows : {&layout.k.codes, &layout.k.scales, &layout.v.codes, &layout.v.scales}) {
    rows->page_stride = end;
  }
  return layout;
}

// vLLM, HND: [K codes | K scales | V codes | V scales] a page, each [H][P][...]. The shapes
// (pages, 2, P, H, 9 d / 16) permuted to HND and (pages, 2 H, P, 9 d / 16) have the same bytes. V
// scales are interleaved below SM120; on SM12x linear in sources that distinguish, interleaved in
// those before (vllm issue 50084).
constexpr EnginePageLayout VllmHnd(const EnginePageShape& shape, ScaleOrder v_scale_order) {
  return PackedPage(FlashInferHnd(shape, v_scale_order));
}

// vLLM, NHD, of the shape (pages, 2, P, H, 9 d / 16): sections as above, each [P][H][...].
constexpr EnginePageLayout VllmNhd(const EnginePageShape& shape, ScaleOrder v_scale_order) {
  return PackedPage(FlashInferNhd(shape, v_scale_order));
}

}  // namespace kvtier::kernels

#endif  // KVTIER_KERNELS_ENGINE_PAGES_LAYOUTS_H_
