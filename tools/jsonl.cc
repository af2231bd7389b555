#include "tools/jsonl.h"

#include <fcntl.h>

#include <cerrno>
#include <system_error>
#include <utility>

#include "engine/error.h"

namespace tessera::tools {

JsonRecord& JsonRecord::add_literal(std::string_view name, std::string_view literal) {
  if (!fields_.empty()) fields_ += ',';
  fields_ += json_literal(name);
  fields_ += ':';
  fields_ += literal;
  return *this;
}

JsonRecord& JsonRecord::add_all(const JsonRecord& other) {
  if (!fields_.empty() && !other.fields_.empty()) fields_ += ',';
  fields_ += other.fields_;
  return *this;
}

JsonlWriter::JsonlWriter(std::string path, Mode mode)
    : path_(std::move(path)),
      file_(
          ::open(path_.c_str(),
                 O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | (mode == Mode::kReplace ? O_TRUNC : 0),
                 0666)) {
  engine::require<engine::IoError>(file_.is_open(), "[jsonl] expected to open a log, got {} ({})",
                                   std::generic_category().message(errno), path_);
}

void JsonlWriter::write(const JsonRecord& record) {
  const std::string line = record.line();
  write_all(file_, path_, std::as_bytes(std::span(line)));
}

}  // namespace tessera::tools
