// SPDX-License-Identifier: Apache-2.0
//
// What the machine says of itself. Whatever cannot be found out keeps its default: a check that
// cannot be made is no fault.
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <sys/timex.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <memory>
#include <random>
#include <sstream>

#include "client/ctl/doctor.h"
#include "proto/base/status_util.h"
#include "proto/base/tls_material.h"

namespace kvtier::ctl {
namespace {

namespace fs = std::filesystem;

constexpr uint64_t kMeasuredBytes = 256ULL << 20;
constexpr size_t kChunkBytes = 1 << 20;
constexpr size_t kPageBytes = 4096;

std::string ReadFile(const std::string& path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  return std::move(text).str();
}

// "MemTotal:   16 kB" -> bytes; 0 when there is no such line.
uint64_t MeminfoBytes(const std::string& meminfo, const std::string& name) {
  const size_t at = meminfo.find(name + ":");
  if (at == std::string::npos) return 0;
  return std::strtoull(meminfo.c_str() + at + name.size() + 1, nullptr, 10) * 1024;
}

void GatherMemory(DoctorFacts* facts) {
  const std::string meminfo = ReadFile("/proc/meminfo");
  facts->memory_bytes = MeminfoBytes(meminfo, "MemTotal");
  facts->available_bytes = MeminfoBytes(meminfo, "MemAvailable");
  const std::string free_huge =
      ReadFile("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages");
  facts->free_huge_page_bytes = std::strtoull(free_huge.c_str(), nullptr, 10) * (2 << 20);
  // "always within_size [advise] never deny force"
  const std::string shmem = ReadFile("/sys/kernel/mm/transparent_hugepage/shmem_enabled");
  const size_t open = shmem.find('[');
  const size_t close = shmem.find(']');
  if (open != std::string::npos && close != std::string::npos) {
    facts->shmem_huge_pages = shmem.substr(open + 1, close - open - 1);
  }
  // Whoever has CAP_IPC_LOCK (bit 14) locks as much as there is.
  const std::string status = ReadFile("/proc/self/status");
  const size_t capabilities = status.find("CapEff:");
  const bool may_lock_all =
      capabilities != std::string::npos &&
      ((std::strtoull(status.c_str() + capabilities + 7, nullptr, 16) >> 14) & 1) != 0;
  rlimit limit{};
  if (!may_lock_all && getrlimit(RLIMIT_MEMLOCK, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY) {
    facts->memlock_bytes = limit.rlim_cur;
  }
  if (getrlimit(RLIMIT_NOFILE, &limit) == 0) facts->descriptor_max = limit.rlim_max;
}

// The tightest memory.max from this process's control group up.
void GatherControlGroup(DoctorFacts* facts) {
  std::istringstream lines(ReadFile("/proc/self/cgroup"));
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with("0::")) continue;
    for (fs::path group = line.substr(3);; group = group.parent_path()) {
      const std::string limit =
          ReadFile("/sys/fs/cgroup" + (group == "/" ? "" : group.string()) + "/memory.max");
      uint64_t bytes = 0;
      if (std::from_chars(limit.data(), limit.data() + limit.size(), bytes).ec == std::errc()) {
        facts->cgroup_bytes = std::min(facts->cgroup_bytes, bytes);
      }
      if (group == group.parent_path()) return;
    }
  }
}

void GatherNodes(DoctorFacts* facts) {
  std::error_code error;
  uint32_t count = 0;
  for (const auto& entry : fs::directory_iterator("/sys/devices/system/node", error)) {
    const std::string name = entry.path().filename();
    if (name.starts_with("node") && name.find_first_not_of("0123456789", 4) == std::string::npos) {
      ++count;
    }
  }
  facts->numa_node_count = std::max(count, 1U);
}

void GatherUring(DoctorFacts* facts) {
  // No parameters: a kernel that has it answers EFAULT, one that refuses it EPERM or ENOSYS.
  if (syscall(SYS_io_uring_setup, 1, nullptr) < 0 && errno != EFAULT) facts->io_uring_errno = errno;
  const std::string status = ReadFile("/proc/self/status");
  const size_t at = status.find("Seccomp:");
  facts->is_filtered = at != std::string::npos && std::strtol(status.c_str() + at + 8, nullptr, 10);
}

std::string FileSystemName(int64_t magic) {
  switch (static_cast<uint32_t>(magic)) {
    case 0xEF53:
      return "ext4";
    case 0x58465342:
      return "xfs";
    case 0x9123683E:
      return "btrfs";
    case 0x01021994:
      return "tmpfs";
    case 0x794C7630:
      return "overlay";
    case 0x6969:
      return "nfs";
    case 0x65735546:
      return "fuse";
    case 0x2FC12FC1:
      return "zfs";
    default:
      return absl::StrFormat("file system %#x", static_cast<uint32_t>(magic));
  }
}

// The directory, or the next one above it that is there: what the daemon would make it in.
std::string ExistingPart(const std::string& path) {
  fs::path part = path;
  std::error_code error;
  while (!fs::is_directory(part, error) && part != part.parent_path()) part = part.parent_path();
  return part;
}

// A file without a name: gone with its descriptor.
int OpenScratch(const std::string& folder, int flags) {
  const int fd = open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC | flags, 0600);
  if (fd >= 0 || errno != EOPNOTSUPP) return fd;
  std::string name = folder + "/.kvtierctl-doctor.XXXXXX";
  const int named = mkostemp(name.data(), O_CLOEXEC | flags);
  if (named >= 0) unlink(name.c_str());
  return named;
}

struct FreeDeleter {
  void operator()(std::byte* bytes) const { std::free(bytes); }
};

// Bytes a second that `move` moves in chunks, or 0 when it fails.
template <typename Move>
double Measure(Move move) {
  const auto start = std::chrono::steady_clock::now();
  for (uint64_t offset = 0; offset < kMeasuredBytes; offset += kChunkBytes) {
    if (move(static_cast<off_t>(offset)) != static_cast<ssize_t>(kChunkBytes)) return 0;
  }
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  return static_cast<double>(kMeasuredBytes) / seconds.count();
}

void MeasureDisk(int fd, DoctorFacts* facts) {
  const std::unique_ptr<std::byte, FreeDeleter> chunk(
      static_cast<std::byte*>(std::aligned_alloc(kPageBytes, kChunkBytes)));
  std::mt19937_64 random(1);
  for (size_t i = 0; i < kChunkBytes; i += sizeof(uint64_t)) {
    const uint64_t word = random();
    std::memcpy(chunk.get() + i, &word, sizeof(word));
  }
  // Twice: the first time the file grows, which the daemon's segments do not.
  double write = 0;
  for (int pass = 0; pass < 2; ++pass) {
    write = Measure([&](off_t offset) { return pwrite(fd, chunk.get(), kChunkBytes, offset); });
  }
  if (write == 0 || fdatasync(fd) != 0) return;
  facts->write_bytes_per_second = write;
  facts->read_bytes_per_second =
      Measure([&](off_t offset) { return pread(fd, chunk.get(), kChunkBytes, offset); });
}

void GatherData(const DoctorPlan& plan, bool measures_disk, DoctorFacts* facts) {
  const std::string folder = ExistingPart(plan.data_dir);
  struct statfs file_system{};
  if (statfs(folder.c_str(), &file_system) == 0) {
    facts->file_system = FileSystemName(file_system.f_type);
    facts->data_free_bytes =
        uint64_t{file_system.f_bavail} * static_cast<uint64_t>(file_system.f_bsize);
  }
  const int plain = OpenScratch(folder, 0);
  if (plain < 0) {
    facts->data_error = absl::StrFormat("%s: %s", folder, std::strerror(errno));
    return;
  }
  close(plain);
  const int direct = OpenScratch(folder, O_DIRECT);
  if (direct < 0) {
    facts->direct_errno = errno;
    return;
  }
  if (measures_disk) MeasureDisk(direct, facts);
  close(direct);
}

void GatherDirs(const DoctorPlan& plan, DoctorFacts* facts) {
  struct stat root{};
  if (stat("/", &root) != 0) return;
  for (const std::string& dir : plan.nvme_dirs) {
    struct stat status{};
    if (stat(ExistingPart(dir).c_str(), &status) == 0 && status.st_dev == root.st_dev) {
      facts->dirs_on_root.push_back(dir);
    }
  }
}

void GatherRunDir(const DoctorPlan& plan, DoctorFacts* facts) {
  const std::string folder = ExistingPart(plan.run_dir);
  if (access(folder.c_str(), W_OK | X_OK) != 0) {
    facts->run_error = absl::StrFormat("%s: %s", folder, std::strerror(errno));
  }
  struct stat socket{};
  if (stat((plan.run_dir + "/admin.sock").c_str(), &socket) == 0) {
    facts->admin_socket_mode = socket.st_mode & 07777;
  }
}

void GatherTls(const DoctorPlan& plan, DoctorFacts* facts) {
  const auto material = ReadTlsMaterial(plan.tls);
  if (!material.ok()) {
    facts->tls_error = std::string(material.status().message());
    return;
  }
  facts->tls_key_is_group_readable = material->key_is_group_readable;
  facts->tls_left_seconds = material->first_expiry_seconds - std::time(nullptr);
}

void GatherClock(DoctorFacts* facts) {
  timex state{};
  const int result = adjtimex(&state);
  // Refused by some seccomp profiles: then nothing is said.
  if (result < 0) return;
  facts->clock_is_synchronized = result != TIME_ERROR && (state.status & STA_UNSYNC) == 0;
  facts->clock_error_us = state.esterror;
}

// The driver's functions, by their C interface: the tool is not linked with CUDA.
void GatherCuda(DoctorFacts* facts) {
  constexpr int kExportsFileDescriptors = 103;
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    facts->cuda_error = "no libcuda.so.1";
    return;
  }
  const auto function = [library](const char* name, auto* pointer) {
    *reinterpret_cast<void**>(pointer) = dlsym(library, name);
    return *pointer != nullptr;
  };
  int (*init)(unsigned) = nullptr;
  int (*driver_version)(int*) = nullptr;
  int (*device_count)(int*) = nullptr;
  int (*device_get)(int*, int) = nullptr;
  int (*attribute)(int*, int, int) = nullptr;
  if (!function("cuInit", &init) || !function("cuDriverGetVersion", &driver_version) ||
      !function("cuDeviceGetCount", &device_count) || !function("cuDeviceGet", &device_get) ||
      !function("cuDeviceGetAttribute", &attribute)) {
    facts->cuda_error = "libcuda.so.1 is not NVIDIA's driver";
    return;
  }
  if (const int error = init(0); error != 0) {
    facts->cuda_error = absl::StrFormat("cuInit: CUDA error %d", error);
    return;
  }
  int count = 0;
  driver_version(&facts->cuda_version);
  if (device_count(&count) != 0) count = 0;
  facts->cuda_device_count = static_cast<uint32_t>(count);
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    int device = 0;
    int exports = 0;
    if (device_get(&device, ordinal) == 0 &&
        attribute(&exports, kExportsFileDescriptors, device) == 0 && exports != 0) {
      ++facts->cuda_exporting_count;
    }
  }
}

}  // namespace

DoctorFacts GatherFacts(const DoctorPlan& plan, bool measures_disk) {
  DoctorFacts facts;
  GatherMemory(&facts);
  GatherControlGroup(&facts);
  GatherNodes(&facts);
  GatherUring(&facts);
  if (plan.nvme_enabled) {
    GatherData(plan, measures_disk, &facts);
    GatherDirs(plan, &facts);
  }
  GatherRunDir(plan, &facts);
  if (!plan.tcp_address.empty()) GatherTls(plan, &facts);
  GatherClock(&facts);
  if (plan.device == "cuda") GatherCuda(&facts);
  return facts;
}

}  // namespace kvtier::ctl
