// SPDX-License-Identifier: Apache-2.0
#include "tiers/nvme/data_dir.h"

#include <fcntl.h>
#include <spdlog/spdlog.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <set>
#include <system_error>
#include <utility>
#include <vector>

#include "proto/base/check.h"
#include "proto/base/status_util.h"
#include "tiers/nvme/spent_file.h"

namespace kvtier::nvme {
namespace {

namespace fs = std::filesystem;

constexpr char kDamagedPrefix[] = "index.damaged-";
constexpr char kNewSuffix[] = ".new";

std::optional<uint32_t> NumberOf(const std::string& text) {
  uint32_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (text.empty() || error != std::errc() || end != text.data() + text.size()) {
    return std::nullopt;
  }
  return number;
}

// What is at the path, if anything, is a directory.
absl::Status CheckIsFolder(const std::string& path) {
  std::error_code error;
  const fs::file_status status = fs::symlink_status(path, error);
  if (fs::is_symlink(status)) {
    return FailedPrecondition("%s is a link: configure the directory that it leads to", path);
  }
  if (!fs::exists(status) || fs::is_directory(status)) return absl::OkStatus();
  return NotFound("%s is no directory", path);
}

}  // namespace

PageMemory::PageMemory(uint64_t size_bytes)
    : size_bytes_(RoundUpToPage(size_bytes)),
      data_(static_cast<std::byte*>(std::aligned_alloc(kPageBytes, RoundUpToPage(size_bytes)))) {
  KVT_CHECK(data_ != nullptr);
}

absl::StatusOr<std::unique_ptr<DataDir>> DataDir::Open(const std::string& path, Storage& storage) {
  KVT_RETURN_IF_ERROR(CheckIsFolder(path));
  KVT_ASSIGN_OR_RETURN(const bool is_new, storage.MakeFolder(path));
  if (is_new) {
    KVT_RETURN_IF_ERROR(storage.SyncFolder((fs::path(path) / "..").lexically_normal().string()));
  }
  std::unique_ptr<DataDir> dir(new DataDir(path, storage));
  KVT_RETURN_IF_ERROR(dir->TakeLock());
  KVT_RETURN_IF_ERROR(storage.MakeFolder(path + "/segments").status());
  KVT_RETURN_IF_ERROR(dir->OpenProbe());
  // Of a process that ended while it tried, or replaced it.
  KVT_RETURN_IF_ERROR(storage.Remove(path + "/grow"));
  storage.Remove(dir->spent_path() + kNewSuffix).IgnoreError();  // it will be written over
  // Or that ended before it made a segment's name durable.
  KVT_RETURN_IF_ERROR(storage.SyncFolder(path + "/segments"));
  KVT_RETURN_IF_ERROR(dir->SyncNames());
  return dir;
}

DataDir::~DataDir() {
  for (const auto& [segment_idx, fd] : fds_) close(fd);
  if (probe_fd_ >= 0) close(probe_fd_);
  if (lock_fd_ >= 0) close(lock_fd_);
}

absl::Status DataDir::TakeLock() {
  const std::string lock_path = path_ + "/LOCK";
  KVT_ASSIGN_OR_RETURN(lock_fd_, storage_.Open(lock_path, O_RDWR | O_CREAT));
  char pid[24] = {};
  if (flock(lock_fd_, LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK) return ErrnoStatus(errno, "lock " + lock_path);
    const ssize_t got = pread(lock_fd_, pid, sizeof(pid) - 1, 0);
    return FailedPrecondition("%s is in use by another process (pid %s)", path_,
                              got > 0 ? pid : "unknown");
  }
  const int length = std::snprintf(pid, sizeof(pid), "%d", getpid());
  // The pid is for people; the lock holds without it, on a full disk too.
  if (ftruncate(lock_fd_, 0) == 0) {
    [[maybe_unused]] const ssize_t put = pwrite(lock_fd_, pid, static_cast<size_t>(length), 0);
  }
  return absl::OkStatus();
}

absl::Status DataDir::OpenProbe() {
  const std::string probe_path = path_ + "/probe";
  const PageMemory page(kPageBytes);
  std::memset(page.data(), 0, kPageBytes);
  for (const bool direct : {true, false}) {
    const auto opened = storage_.Open(probe_path, O_RDWR | O_CREAT | (direct ? O_DIRECT : 0));
    // EINVAL: the file system has no O_DIRECT.
    if (direct && absl::IsInvalidArgument(opened.status())) continue;
    KVT_RETURN_IF_ERROR(opened.status());
    probe_fd_ = *opened;
    is_direct_ = direct;
    // A full disk is no reason not to serve what is there.
    if (pwrite(probe_fd_, page.data(), kPageBytes, 0) >= 0 || errno != EINVAL) break;
    close(probe_fd_);
    probe_fd_ = -1;
  }
  if (probe_fd_ < 0) return Unavailable("%s cannot be written", probe_path);
  return absl::OkStatus();
}

std::string DataDir::SegmentPath(uint32_t segment_idx) const {
  char name[32];
  std::snprintf(name, sizeof(name), "/segments/%06u.seg", segment_idx);
  return path_ + name;
}

absl::StatusOr<int> DataDir::SegmentFd(uint32_t segment_idx) {
  if (const auto it = fds_.find(segment_idx); it != fds_.end()) return it->second;
  const std::string path = SegmentPath(segment_idx);
  const int flags = O_RDWR | (is_direct_ ? O_DIRECT : 0);
  auto fd = storage_.Open(path, flags);
  const bool is_new = absl::IsNotFound(fd.status());
  if (is_new) fd = storage_.Open(path, flags | O_CREAT);
  KVT_RETURN_IF_ERROR(fd.status());
  fds_.emplace(segment_idx, *fd);
  // fdatasync makes a file's bytes durable, not its name.
  if (is_new) KVT_RETURN_IF_ERROR(storage_.SyncFolder(path_ + "/segments"));
  return fd;
}

absl::StatusOr<std::map<uint32_t, DataDir::SegmentFile>> DataDir::LoadSegments() {
  std::map<uint32_t, SegmentFile> files;
  std::error_code error;
  fs::directory_iterator it(path_ + "/segments", error);
  std::vector<uint32_t> ours;
  std::vector<fs::path> foreign;
  for (; !error && it != fs::directory_iterator(); it.increment(error)) {
    const std::optional<uint32_t> segment_idx = NumberOf(it->path().stem().string());
    if (it->path().extension() != ".seg" || !segment_idx || *segment_idx > 999999) continue;
    if (!it->is_symlink() && it->is_regular_file()) {
      ours.push_back(*segment_idx);
    } else {
      foreign.push_back(it->path());
    }
  }
  if (error) return ErrnoStatus(error.value(), "list " + path_ + "/segments");
  for (const fs::path& path : foreign) {
    KVT_RETURN_IF_ERROR(storage_.Rename(path.string(), path.string() + ".foreign"));
    spdlog::warn("nvme: {} is no regular file; moved aside", path.string());
  }
  const PageMemory page(kPageBytes);
  for (const uint32_t segment_idx : ours) {
    KVT_ASSIGN_OR_RETURN(const int fd, SegmentFd(segment_idx));
    struct stat status = {};
    if (fstat(fd, &status) != 0) return ErrnoStatus(errno, "stat " + SegmentPath(segment_idx));
    SegmentFile& file = files[segment_idx];
    file.file_bytes = static_cast<uint64_t>(status.st_size);
    file.modified = absl::TimeFromTimespec(status.st_mtim);
    const ssize_t got = pread(fd, page.data(), kPageBytes, 0);
    if (got < 0) return ErrnoStatus(errno, "read " + SegmentPath(segment_idx));
    auto header = ParseSegmentHeader(page.bytes().first(static_cast<size_t>(got)));
    if (header.ok() && header->segment_idx != segment_idx) {
      header = DataLoss("the file is segment %d under another name", header->segment_idx);
    }
    if (header.ok()) {
      file.header = *header;
    } else {
      file.header_error = header.status();
    }
  }
  return files;
}

absl::Status DataDir::RemoveSegment(uint32_t segment_idx) {
  ForgetSegment(segment_idx);
  return storage_.Remove(SegmentPath(segment_idx));
}

void DataDir::ForgetSegment(uint32_t segment_idx) {
  const auto it = fds_.find(segment_idx);
  if (it == fds_.end()) return;
  close(it->second);
  fds_.erase(it);
}

bool DataDir::HasSegment(uint32_t segment_idx) const {
  struct stat status = {};
  return lstat(SegmentPath(segment_idx).c_str(), &status) == 0 || errno != ENOENT;
}

absl::StatusOr<int> DataDir::OpenGrowProbe() {
  return storage_.Open(path_ + "/grow", O_RDWR | O_CREAT | O_TRUNC);
}

void DataDir::RemoveGrowProbe(int fd) {
  storage_.Remove(path_ + "/grow").IgnoreError();  // else at the next start
  close(fd);
}

absl::StatusOr<WriteBudget::Spent> DataDir::LoadSpent() {
  KVT_ASSIGN_OR_RETURN(const int fd, storage_.Open(spent_path(), O_RDONLY | O_NONBLOCK));
  // One more than there should be, to see that there is not.
  std::array<std::byte, sizeof(RawSpentFile) + 1> bytes;
  const ssize_t got = pread(fd, bytes.data(), bytes.size(), 0);
  const int error = got < 0 ? errno : 0;
  close(fd);
  if (error != 0) return ErrnoStatus(error, "read " + spent_path());
  return ParseSpentFile(std::span(bytes).first(static_cast<size_t>(got)));
}

absl::Status DataDir::KeepSpent(const WriteBudget::Spent& spent) {
  const std::string new_path = spent_path() + kNewSuffix;
  KVT_ASSIGN_OR_RETURN(const int fd, storage_.Open(new_path, O_WRONLY | O_CREAT | O_TRUNC));
  const absl::Status written = storage_.WriteAndSync(fd, EncodeSpentFile(spent));
  close(fd);
  if (!written.ok()) {
    storage_.Remove(new_path).IgnoreError();  // else the next time
    return written;
  }
  KVT_RETURN_IF_ERROR(storage_.Rename(new_path, spent_path()));
  return SyncNames();
}

std::set<uint32_t> DataDir::AsideNumbers(std::error_code& error) const {
  std::set<uint32_t> numbers;
  fs::directory_iterator it(path_, error);
  for (; !error && it != fs::directory_iterator(); it.increment(error)) {
    const std::string name = it->path().filename().string();
    if (!name.starts_with(kDamagedPrefix)) continue;
    if (const auto number = NumberOf(name.substr(std::strlen(kDamagedPrefix)))) {
      numbers.insert(*number);
    }
  }
  return numbers;
}

std::string DataDir::AsidePath(uint32_t number) const {
  return path_ + "/" + kDamagedPrefix + std::to_string(number);
}

absl::StatusOr<std::string> DataDir::MoveIndexAside() {
  std::error_code error;
  const std::set<uint32_t> numbers = AsideNumbers(error);
  for (const uint32_t number : numbers) {
    if (!error) fs::remove_all(AsidePath(number), error);
  }
  std::string aside = AsidePath(numbers.empty() ? 1 : *numbers.rbegin() + 1);
  if (error) return ErrnoStatus(error.value(), "move " + index_path() + " aside");
  KVT_RETURN_IF_ERROR(storage_.Rename(index_path(), aside));
  KVT_RETURN_IF_ERROR(SyncNames());
  return aside;
}

bool DataDir::RemoveLargeAside(uint64_t bytes_max) {
  std::error_code error;
  uint64_t total_bytes = 0;
  const std::set<uint32_t> numbers = AsideNumbers(error);
  for (const uint32_t number : numbers) total_bytes += PhysicalBytesBelow(AsidePath(number));
  if (total_bytes <= bytes_max) return false;
  for (const uint32_t number : numbers) fs::remove_all(AsidePath(number), error);
  return !error;
}

absl::StatusOr<uint64_t> DataDir::FreeBytes() const {
  struct statvfs file_system = {};
  if (statvfs(path_.c_str(), &file_system) != 0) return ErrnoStatus(errno, "statvfs " + path_);
  return uint64_t{file_system.f_bavail} * file_system.f_frsize;
}

uint64_t DataDir::PhysicalBytesBelow(const std::string& path) {
  uint64_t total_bytes = 0;
  std::error_code error;
  fs::recursive_directory_iterator it(path, error);
  for (; !error && it != fs::recursive_directory_iterator(); it.increment(error)) {
    struct stat status = {};
    // Files may vanish meanwhile: RocksDB deletes its old ones.
    if (lstat(it->path().c_str(), &status) != 0) continue;
    total_bytes += static_cast<uint64_t>(status.st_blocks) * 512;
  }
  return total_bytes;
}

}  // namespace kvtier::nvme
