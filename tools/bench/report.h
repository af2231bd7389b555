// What the benchmarks print: tables for people, and each row as a line of JSON with the table's
// columns as keys.
#pragma once

#include <concepts>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tools/io/jsonl.h"

namespace tessera::tools {

/// One value of a row. A NaN prints as "-" and is null in JSON.
class Cell {
 public:
  // NOLINTBEGIN(google-explicit-constructor): rows are lists of plain values
  Cell(const char* text) : Cell(std::string(text)) {}
  Cell(std::string text);
  Cell(double value, int decimals = 1);
  template <std::integral T>
  Cell(T value) : text_(std::to_string(value)), literal_(text_) {}
  // NOLINTEND(google-explicit-constructor)

  const std::string& text() const { return text_; }
  const std::string& literal() const { return literal_; }

 private:
  std::string text_, literal_;
};

class BenchReport {
 public:
  /// `jsonl_path` may be empty: no file. Throws IoError naming the path.
  explicit BenchReport(const std::string& jsonl_path);

  /// Starts a table; `part` is every record's "part". The first column is the row's name.
  void begin_table(std::string part, const std::string& title, std::vector<std::string> columns);
  /// As many cells as columns.
  void row(const std::vector<Cell>& cells);
  std::int64_t num_rows() const { return num_rows_; }
  /// A line between or below tables.
  void note(const std::string& text);

 private:
  std::optional<JsonlWriter> jsonl_;
  std::string part_;
  std::vector<std::string> columns_;
  std::int64_t num_rows_ = 0;
};

}  // namespace tessera::tools
