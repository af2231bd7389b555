#include "tools/io/jsonl.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <system_error>
#include <thread>
#include <utility>

#include "engine/error.h"
#include "engine/io/text.h"

namespace tessera::tools {
namespace {

/// The standard stream that goes to the file of `status`, or -1.
int standard_stream(const struct stat& status) {
  for (const int fd : {STDOUT_FILENO, STDERR_FILENO}) {
    struct stat stream {};
    if (::fstat(fd, &stream) == 0 && stream.st_dev == status.st_dev &&
        stream.st_ino == status.st_ino) {
      return fd;
    }
  }
  return -1;
}

engine::FileDescriptor open_log(const std::string& path, int flags,
                                std::chrono::milliseconds patience) {
  const auto open = [&](int more) {
    return engine::FileDescriptor(
        ::open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | flags | more, 0666));
  };
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0 || !S_ISFIFO(status.st_mode)) return open(0);
  engine::FileDescriptor pipe = open(O_NONBLOCK);
  if (!pipe.is_open() && errno == ENXIO) {
    std::fprintf(stderr, "warning: waiting for a reader of the pipe %s\n",
                 engine::escaped(path).c_str());
    constexpr std::chrono::milliseconds kSleep(20);
    for (; !pipe.is_open() && errno == ENXIO && patience.count() > 0; patience -= kSleep) {
      std::this_thread::sleep_for(kSleep);
      pipe = open(O_NONBLOCK);
    }
    engine::require<engine::IoError>(pipe.is_open() || errno != ENXIO,
                                     "[jsonl] expected a reader of the pipe, got none ({})", path);
  }
  if (pipe.is_open()) (void)::fcntl(pipe.get(), F_SETFL, flags);  // from here on it blocks
  return pipe;
}

}  // namespace

JsonRecord& JsonRecord::add_literal(std::string_view name, std::string_view literal) {
  if (!fields_.empty()) fields_ += ',';
  fields_ += engine::json_literal(name);
  fields_ += ':';
  fields_ += literal;
  return *this;
}

JsonRecord& JsonRecord::add_all(const JsonRecord& other) {
  if (!fields_.empty() && !other.fields_.empty()) fields_ += ',';
  fields_ += other.fields_;
  return *this;
}

JsonlWriter::JsonlWriter(std::string path, Mode mode, std::chrono::milliseconds patience)
    : path_(std::move(path)),
      file_(open_log(path_, O_APPEND | (mode == Mode::kReplace ? O_TRUNC : 0), patience)) {
  engine::require<engine::IoError>(file_.is_open(), "[jsonl] expected to open a log, got {} ({})",
                                   std::generic_category().message(errno), path_);
  struct stat status {};
  if (mode != Mode::kReplaceLater || ::fstat(file_.get(), &status) != 0 ||
      !S_ISREG(status.st_mode)) {
    return;
  }
  if (const int stream = standard_stream(status); stream >= 0) {
    file_ = engine::FileDescriptor(::fcntl(stream, F_DUPFD_CLOEXEC, 0));
  } else {
    engine::lock_for_run(file_, path_);
    is_own_file_ = true;
  }
}

void JsonlWriter::keep_while(const std::function<bool(const nlohmann::json& record)>& keeps) {
  if (!is_own_file_) return;
  std::ifstream records(path_, std::ios::binary);
  std::int64_t nbytes = 0;
  for (std::string line; std::getline(records, line) && !records.eof();) {
    try {
      if (!keeps(engine::parse_json(line, path_))) break;
    } catch (const engine::IoError&) {
      break;
    }
    nbytes += std::ssize(line) + 1;
  }
  const int error = ::ftruncate(file_.get(), nbytes) == 0 ? 0 : errno;
  engine::require<engine::IoError>(error == 0, "[jsonl] expected to cut a log, got {} ({})",
                                   std::generic_category().message(error), path_);
}

void JsonlWriter::write(const JsonRecord& record) {
  const std::string line = record.line();
  engine::write_all(file_, path_, std::as_bytes(std::span(line)));
}

}  // namespace tessera::tools
