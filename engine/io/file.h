// Files as the tools use them: input that is distrusted, output that appears whole or not at all.
// Every failure is an IoError that names the path and the system's reason.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::engine {

/// Owns a file descriptor.
class FileDescriptor {
 public:
  explicit FileDescriptor(int fd = -1) : fd_(fd) {}
  ~FileDescriptor();
  FileDescriptor(FileDescriptor&& other) noexcept;
  FileDescriptor& operator=(FileDescriptor&& other) noexcept;

  int get() const { return fd_; }
  bool is_open() const { return fd_ >= 0; }
  /// Closes and returns the system's error number, 0 if none.
  int close();

 private:
  int fd_;
};

enum class Lock { kTaken, kHeldByAnother, kUnsupported };

/// Takes the lock of an open file (flock), without waiting. It lasts as long as a descriptor of
/// that opening does, so never longer than the process; kUnsupported: this file system has no
/// locks.
Lock try_lock(const FileDescriptor& file);
/// For a file that one run alone may write: throws IoError naming `path` when another has the lock.
/// Where there are no locks, says so on stderr.
void lock_for_run(const FileDescriptor& file, std::string_view path);

/// Writes all of `bytes`, through interruptions and short writes. Throws IoError naming `path`.
void write_all(const FileDescriptor& file, std::string_view path, std::span<const std::byte> bytes);

/// Makes its bytes last through a power cut. Returns the system's error number, 0 if none.
int flush(const FileDescriptor& file);

/// A regular file open for reading at any offset. Reads by copying, not by mapping: a file that
/// another process cuts short is then an error and not a SIGBUS. Reading is thread-safe.
class InputFile {
 public:
  /// Throws IoError unless `path` is a readable regular file (folders, pipes and devices are not).
  explicit InputFile(std::string path);

  const std::string& path() const { return path_; }
  std::int64_t nbytes() const { return nbytes_; }  ///< at the time of opening
  /// Fills `out` from `offset`. Throws IoError when the file does not hold that many bytes.
  void read(std::int64_t offset, std::span<std::byte> out) const;

 private:
  std::string path_;
  FileDescriptor file_;
  std::int64_t nbytes_ = 0;
};

/// The whole of a small file. Throws IoError as InputFile does, or when it has over `max_nbytes`.
std::string read_text_file(const std::string& path, std::int64_t max_nbytes);
/// Whether there is a regular file at `path` that holds `text` and no more.
bool holds_text(const std::string& path, std::string_view text);

/// The names in a folder; none if it cannot be read. (std::filesystem ends the process when there
/// is no memory for its iterator.)
std::vector<std::string> names_in_folder(const std::string& folder);

/// Makes the names in the folder of `path` last through a power cut. Throws IoError.
void flush_folder_of(const std::string& path);

/// A file that takes its place only when it is complete: written under a temporary name in the same
/// folder, flushed to the disk, renamed. Until then what was at `path` is untouched; without
/// replace() or commit() the temporary file is removed, and when the process is killed, by the next
/// AtomicFile of that path: see [Note: temporary files].
class AtomicFile {
 public:
  /// Throws IoError when `path` is something other than a regular file, cannot be created, or
  /// cannot be replaced: immutable, another user's in a sticky folder, a mount point, in a folder
  /// that only grows.
  explicit AtomicFile(std::string path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  const std::string& path() const { return path_; }
  void write(std::span<const std::byte> bytes);
  /// Makes the bytes durable, under the temporary name. Once only. Throws IoError.
  void flush();
  /// After flush(): gives the file its name. Throws IoError; the old file then remains.
  void replace();
  /// flush(), replace(), flush_folder_of(). Throws IoError; the old file then remains, unless it is
  /// the folder that failed.
  void commit();

 private:
  std::string path_;
  std::string temporary_;  // empty once renamed
  FileDescriptor file_;
  FileDescriptor lock_;  // a copy of file_: holds the lock from flush() to the new name
};

}  // namespace tessera::engine
