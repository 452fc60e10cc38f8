// SPDX-License-Identifier: Apache-2.0
#include "tests/gpu/device_decode.h"

#include <algorithm>
#include <span>

namespace kvtier::gpu {
namespace {

template <typename T>
std::span<const T> All(const kernels::cuda::emu::DeviceBuffer<T>& buffer) {
  return buffer;
}

}  // namespace

DeviceDecode::DeviceDecode(kernels::cuda::DecodeData* data)
    : sealed_counts(All(data->sealed_counts)),
      damage_count(All(data->damage_count)),
      data_(data),
      blocks_(All(data->blocks)),
      table_(Moved(data->table, data->blocks.data(), blocks_.data())),
      tail_counts_(data->test_case().tail_tokens),
      tail_k_(All(data->tail_k)),
      tail_v_(All(data->tail_v)),
      tail_k_addresses_(Moved(data->tail_k_addresses, data->tail_k.data(), tail_k_.data())),
      tail_v_addresses_(Moved(data->tail_v_addresses, data->tail_v.data(), tail_v_.data())),
      g_k_(All(data->g_k)),
      g_v_(All(data->g_v)),
      sinks_(All(data->sinks)),
      k_mean_(All(data->k_mean)),
      k_smooth_(All(data->k_smooth)),
      query_(All(data->query)),
      out_(data->out.size()),
      lse_(data->lse.size()),
      workspace_(All(data->workspace)) {}

std::vector<const void*> DeviceDecode::Moved(
    const kernels::cuda::emu::DeviceBuffer<const void*>& table, const void* from, const void* to) {
  std::vector<const void*> moved;
  for (const void* address : table) {
    const std::ptrdiff_t offset = address == nullptr ? 0
                                                     : static_cast<const std::byte*>(address) -
                                                           static_cast<const std::byte*>(from);
    moved.push_back(address == nullptr ? nullptr : static_cast<const std::byte*>(to) + offset);
  }
  return moved;
}

kernels::cuda::DecodeBatchArgs DeviceDecode::Args() {
  kernels::cuda::DecodeBatchArgs args = data_->Args();
  args.block_table = table_.data();
  args.sealed_token_counts = sealed_counts.data();
  args.tails.token_counts = tail_counts_.data();
  args.tails.k = tail_k_addresses_.data();
  args.tails.v = tail_v_addresses_.data();
  args.query = query_.data();
  args.g_k = g_k_.data();
  args.g_v = g_v_.data();
  if (args.k_smooth != nullptr) args.k_smooth = k_smooth_.data();
  if (args.k_mean != nullptr) args.k_mean = k_mean_.data();
  if (args.sinks != nullptr) args.sinks = sinks_.data();
  args.out = out_.data();
  args.lse = lse_.data();
  args.damage_count = damage_count.data();
  args.workspace = workspace_.data();
  return args;
}

void DeviceDecode::DownloadResults() {
  const std::vector<std::byte> out = out_.Download();
  const std::vector<float> lse = lse_.Download();
  std::copy(out.begin(), out.end(), data_->out.begin());
  std::copy(lse.begin(), lse.end(), data_->lse.begin());
}

}  // namespace kvtier::gpu
