#include "tools/bench/report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <utility>

#include "engine/error.h"

namespace tessera::tools {
namespace {

constexpr std::size_t kNameWidth = 36;
constexpr std::size_t kMinWidth = 9;

void print_line(const std::string& line) {
  fmt::print("{}\n", line);
  std::fflush(stdout);  // a long run is watched
}

}  // namespace

Cell::Cell(std::string text) : text_(std::move(text)), literal_(engine::json_literal(text_)) {}

Cell::Cell(double value, int decimals)
    : text_(std::isnan(value) ? "-" : fmt::format("{:.{}f}", value, decimals)),
      literal_(engine::json_literal(value)) {}

BenchReport::BenchReport(const std::string& jsonl_path) {
  if (!jsonl_path.empty()) jsonl_.emplace(jsonl_path);
}

void BenchReport::begin_table(std::string part, const std::string& title,
                              std::vector<std::string> columns) {
  part_ = std::move(part);
  columns_ = std::move(columns);
  print_line("");
  print_line(title);
  std::string line;
  for (std::size_t i = 0; i < columns_.size(); ++i) {
    line += i == 0 ? fmt::format("{:<{}}", columns_[i], kNameWidth)
                   : fmt::format("  {:>{}}", columns_[i], kMinWidth);
  }
  print_line(line);
}

void BenchReport::row(const std::vector<Cell>& cells) {
  engine::require(cells.size() == columns_.size(), "[bench] expected {} cells, got {} ({})",
                  columns_.size(), cells.size(), part_);
  ++num_rows_;
  std::string line;
  JsonRecord record;
  record.add("part", part_);
  for (std::size_t i = 0; i < cells.size(); ++i) {
    line += i == 0
                ? fmt::format("{:<{}}", cells[i].text(), kNameWidth)
                : fmt::format("  {:>{}}", cells[i].text(), std::max(kMinWidth, columns_[i].size()));
    record.add_literal(columns_[i], cells[i].literal());
  }
  print_line(line);
  if (jsonl_) jsonl_->write(record);
}

void BenchReport::note(const std::string& text) { print_line(text); }

}  // namespace tessera::tools
