// A log of JSON lines: one record a line, each line in the file when write() returns.
//
//   JsonlWriter log("run.jsonl");
//   log.write(JsonRecord().add("step", 3).add("loss", 2.5));    // {"step":3,"loss":2.5}
#pragma once

#include <chrono>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

#include "engine/io/file.h"
#include "engine/io/json.h"

namespace tessera::tools {

/// One flat JSON object, fields in the order they were added. Values as json_literal() takes them.
class JsonRecord {
 public:
  template <class T>
  JsonRecord& add(std::string_view name, const T& value) {
    return add_literal(name, engine::json_literal(value));
  }
  /// `literal` is JSON already, such as another record's text().
  JsonRecord& add_literal(std::string_view name, std::string_view literal);

  /// The fields of another record, after those that are here.
  JsonRecord& add_all(const JsonRecord& other);

  std::string text() const { return "{" + fields_ + "}"; }
  std::string line() const { return text() + "\n"; }

 private:
  std::string fields_;
};

class JsonlWriter {
 public:
  enum class Mode {
    kReplace,
    kAppend,
    kReplaceLater,  ///< what is there stays until keep_while(); no two such writers at once
  };

  /// Throws IoError naming the path. A path that is where stdout or stderr goes, such as
  /// /dev/stdout, shares their position: nothing is written over. A pipe that nobody reads is
  /// waited for, which stderr says, for `patience` at most.
  explicit JsonlWriter(std::string path, Mode mode = Mode::kReplace,
                       std::chrono::milliseconds patience = std::chrono::minutes(1));

  /// For kReplaceLater: cuts a regular file, unless stdout or stderr goes there, after the first
  /// records for which `keeps` is true; what is no record is not kept. Throws IoError.
  void keep_while(const std::function<bool(const nlohmann::json& record)>& keeps);

  /// One write of one line, so that a reader or a second writer never sees half of one. Throws
  /// IoError naming the path, when the disk is full for example.
  void write(const JsonRecord& record);
  /// For whoever writes lines in another way.
  int fd() const { return file_.get(); }

 private:
  std::string path_;
  engine::FileDescriptor file_;
  bool is_own_file_ = false;  // a regular file, and not a standard stream
};

}  // namespace tessera::tools
