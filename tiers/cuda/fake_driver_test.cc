// SPDX-License-Identifier: Apache-2.0
//
// The fake card keeps the rules that the tests above it rely on.
#include "tiers/cuda/fake_driver.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include "tiers/cuda/owned.h"

namespace kvtier {
namespace {

class FakeDriverTest : public testing::Test {
 protected:
  static constexpr uint64_t kBytes = 64 << 10;

  FakeCudaDriver driver_;
  const std::unique_ptr<CudaDevice> device_ = driver_.OpenDevice(0).value();
};

TEST_F(FakeDriverTest, TheCpuDoesNotReachDeviceMemory) {
  const auto memory = CudaMemory::Allocate(device_.get(), kBytes).value();
  ASSERT_EQ(driver_.DeviceBytes(memory->address(), kBytes).size(), kBytes);
  EXPECT_DEATH(*reinterpret_cast<volatile char*>(memory->address()) = 1, "");
}

TEST_F(FakeDriverTest, FreshMemoryIsNotZero) {
  const auto memory = CudaMemory::Allocate(device_.get(), kBytes).value();
  EXPECT_NE(driver_.DeviceBytes(memory->address(), 1)[0], std::byte{0});
}

TEST_F(FakeDriverTest, StreamsRunInOrderAndWaitForEvents) {
  const auto memory = CudaMemory::Allocate(device_.get(), kBytes).value();
  const auto pages = PinnedPages::Create(device_.get(), 4096).value();
  const auto first = OwnedStream::Create(device_.get(), CudaDevice::Priority::kHigh).value();
  const auto second = OwnedStream::Create(device_.get(), CudaDevice::Priority::kLow).value();
  const auto event = OwnedEvent::Create(device_.get()).value();
  EXPECT_TRUE(device_->IsDone(event.get()).value()) << "never recorded";
  driver_.HoldWork();
  ASSERT_TRUE(device_->Zero(memory->address(), kBytes, first.get()).ok());
  ASSERT_TRUE(device_->RecordEvent(event.get(), first.get()).ok());
  ASSERT_TRUE(device_->AwaitEvent(second.get(), event.get()).ok());
  ASSERT_TRUE(device_->CopyToHost(pages.bytes(), memory->address(), second.get()).ok());
  pages.bytes()[0] = std::byte{1};
  driver_.ReleaseStream(second.get());
  EXPECT_EQ(pages.bytes()[0], std::byte{1}) << "did not wait";
  EXPECT_FALSE(device_->IsDone(event.get()).value());
  driver_.ReleaseStream(first.get());
  EXPECT_TRUE(device_->IsDone(event.get()).value());
  EXPECT_EQ(pages.bytes()[0], std::byte{0});
  EXPECT_EQ(driver_.counts().unpinned_copy, 0u);
}

TEST_F(FakeDriverTest, RefusesWhatACardRefuses) {
  const auto code = [](const auto& result) { return result.status().code(); };
  EXPECT_EQ(code(device_->Allocate(kBytes + 1)), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(device_->Allocate(1ULL << 40)), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(code(device_->ExportFd(12345)), absl::StatusCode::kInvalidArgument);
  int pipe_fds[2];
  ASSERT_EQ(pipe(pipe_fds), 0);
  EXPECT_EQ(code(device_->ImportFd(pipe_fds[0])), absl::StatusCode::kInvalidArgument);
  close(pipe_fds[0]);
  close(pipe_fds[1]);
  const auto stream = OwnedStream::Create(device_.get(), CudaDevice::Priority::kHigh).value();
  EXPECT_EQ(device_->Zero(4096, 1, stream.get()).code(), absl::StatusCode::kInvalidArgument);
  const auto memory = CudaMemory::Allocate(device_.get(), kBytes).value();
  EXPECT_EQ(device_->Zero(memory->address() + 1, kBytes, stream.get()).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(device_->FreeAddresses(memory->address(), kBytes).code(),
            absl::StatusCode::kInvalidArgument)
      << "still mapped";
}

}  // namespace
}  // namespace kvtier
