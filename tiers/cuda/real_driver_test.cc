// SPDX-License-Identifier: Apache-2.0
#include "tiers/cuda/real_driver.h"

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <string>

#include "absl/time/time.h"
#include "tiers/cuda/owned.h"

namespace kvtier {
namespace {

TEST(RealDriverTest, SaysWhatToDoWithoutADriver) {
  const auto driver = OpenCudaDriver("libcuda-that-is-not-there.so.1");
  EXPECT_EQ(driver.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_NE(driver.status().ToString().find("libcuda-that-is-not-there.so.1: cannot open"),
            std::string::npos)
      << driver.status();
  EXPECT_NE(driver.status().ToString().find("or set hbm.device=cpu"), std::string::npos)
      << driver.status();
}

TEST(RealDriverTest, NamesTheFunctionThatALibraryLacks) {
  const auto driver = OpenCudaDriver("libc.so.6");
  EXPECT_EQ(driver.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_NE(driver.status().ToString().find("no function cuInit"), std::string::npos)
      << driver.status();
}

// What a function that the stand-in of the driver's library has for tests answers.
int AskStandIn(const char* library_path, const char* function) {
  void* const library = dlopen(library_path, RTLD_NOW | RTLD_LOCAL);
  return reinterpret_cast<int (*)()>(dlsym(library, function))();
}

// The calls themselves, on that stand-in.
class StandInDriverTest : public testing::Test {
 protected:
  static int Ask(const char* function) { return AskStandIn(KVTIER_STAND_IN_PATH, function); }
};

TEST_F(StandInDriverTest, DescribesTheDevice) {
  const auto driver = OpenCudaDriver(KVTIER_STAND_IN_PATH);
  ASSERT_TRUE(driver.ok()) << driver.status();
  const auto devices = (*driver)->Devices();
  ASSERT_TRUE(devices.ok()) << devices.status();
  ASSERT_EQ(devices->size(), 1u);
  EXPECT_EQ(devices->front().name, "Stand-in");
  EXPECT_EQ(devices->front().total_bytes, 256u << 20);
  EXPECT_EQ(devices->front().uuid[0], 0xA0);
  EXPECT_EQ(CheckSharable(devices->front()), absl::OkStatus());
  EXPECT_FALSE((*driver)->OpenDevice(1).ok());
}

TEST_F(StandInDriverTest, SharesMemoryAndCopiesThroughIt) {
  const auto driver = OpenCudaDriver(KVTIER_STAND_IN_PATH).value();
  auto device = driver->OpenDevice(0).value();
  EXPECT_EQ(Ask("StandInRetainCount"), 1);
  {
    const uint64_t bytes = device->Granularity().value();
    const auto memory = CudaMemory::Allocate(device.get(), bytes);
    ASSERT_TRUE(memory.ok()) << memory.status();
    const int fd = (*memory)->ExportFd().value();
    const auto imported = CudaMemory::Import(device.get(), fd, bytes);
    ASSERT_TRUE(imported.ok()) << imported.status();
    close(fd);
    const auto pages = PinnedPages::Create(device.get(), 8192).value();
    const auto stream = OwnedStream::Create(device.get(), CudaDevice::Priority::kHigh).value();
    const auto other = OwnedStream::Create(device.get(), CudaDevice::Priority::kLow).value();
    const auto event = OwnedEvent::Create(device.get()).value();
    std::ranges::fill(pages.bytes().first(4096), std::byte{7});
    EXPECT_TRUE(device->Zero((*memory)->address(), bytes, stream.get()).ok());
    EXPECT_TRUE(
        device->CopyToDevice((*memory)->address() + 100, pages.bytes().first(4096), stream.get())
            .ok());
    EXPECT_TRUE(device->RecordEvent(event.get(), stream.get()).ok());
    EXPECT_TRUE(device->AwaitEvent(other.get(), event.get()).ok());
    EXPECT_TRUE(
        device->CopyToHost(pages.bytes().last(4096), (*imported)->address(), other.get()).ok());
    EXPECT_TRUE(device->RecordEvent(event.get(), other.get()).ok());
    EXPECT_EQ(AwaitDone(*device, event.get(), absl::Seconds(10)), absl::OkStatus());
    EXPECT_EQ(pages.bytes()[4096 + 99], std::byte{0});
    EXPECT_EQ(pages.bytes()[4096 + 100], std::byte{7});
    const absl::Status full = device->Allocate(1ULL << 40).status();
    EXPECT_EQ(full.message(), "cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY (2)");
  }
  device.reset();
  EXPECT_EQ(Ask("StandInRetainCount"), 0);
  EXPECT_EQ(Ask("StandInContextDepth"), 0) << "the caller's context was changed";
}

// Two ranges to the device and back. Returns how many calls copied more than one range.
int CopyTwoRanges(const char* library_path) {
  const auto driver = OpenCudaDriver(library_path).value();
  const auto device = driver->OpenDevice(0).value();
  const auto memory = CudaMemory::Allocate(device.get(), device->Granularity().value()).value();
  const auto pages = PinnedPages::Create(device.get(), 4 * 4096).value();
  const auto stream = OwnedStream::Create(device.get(), CudaDevice::Priority::kHigh).value();
  const auto event = OwnedEvent::Create(device.get()).value();
  const auto page = [&](size_t i) { return pages.bytes().subspan(i * 4096, 4096); };
  std::ranges::fill(page(0), std::byte{7});
  std::ranges::fill(page(1), std::byte{8});
  const CudaHostCopy in[] = {{.address = memory->address(), .host = page(0)},
                             {.address = memory->address() + 8192, .host = page(1)}};
  EXPECT_EQ(device->CopyAllToDevice(in, stream.get()), absl::OkStatus());
  const CudaHostCopy out[] = {{.address = memory->address(), .host = page(2)},
                              {.address = memory->address() + 8192, .host = page(3)}};
  EXPECT_EQ(device->CopyAllToHost(out, stream.get()), absl::OkStatus());
  EXPECT_TRUE(device->RecordEvent(event.get(), stream.get()).ok());
  EXPECT_EQ(AwaitDone(*device, event.get(), absl::Seconds(10)), absl::OkStatus());
  EXPECT_TRUE(std::ranges::equal(page(0), page(2)));
  EXPECT_TRUE(std::ranges::equal(page(1), page(3)));
  return AskStandIn(library_path, "StandInBatchCount");
}

TEST(RealDriverTest, CopiesInBatchesWhereTheDriverCan) {
  const int before = AskStandIn(KVTIER_STAND_IN_PATH, "StandInBatchCount");
  EXPECT_EQ(CopyTwoRanges(KVTIER_STAND_IN_PATH), before + 2);
  // Of CUDA 12.8, with the older function alone, and of CUDA 12.7.
  EXPECT_EQ(CopyTwoRanges(KVTIER_STAND_IN_12080_PATH), 2);
  EXPECT_EQ(CopyTwoRanges(KVTIER_STAND_IN_12070_PATH), 0);
}

TEST(RealDriverTest, CopiesOneByOneWhereBatchesAreRefused) {
  const int before = AskStandIn(KVTIER_STAND_IN_PATH, "StandInBatchCount");
  AskStandIn(KVTIER_STAND_IN_PATH, "StandInRefuseBatches");
  EXPECT_EQ(CopyTwoRanges(KVTIER_STAND_IN_PATH), before);
}

}  // namespace
}  // namespace kvtier
