#include "tools/bench/tokenize.h"

#include <fmt/format.h>

#include <cstddef>
#include <cstdint>
#include <ctime>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <string_view>
#include <vector>

#include "engine/error.h"
#include "engine/io/file.h"
#include "engine/io/json.h"
#include "tools/bench/training/peer.h"
#include "tools/rates/timing.h"
#include "tools/tokenizer/tokenizer.h"

namespace tessera::tools {
namespace {

using engine::IoError;
using engine::require;

// Of one letter: were time to grow with the square of a word's length, MB/s of the second would be
// a quarter of the first.
constexpr std::size_t kRuns[] = {std::size_t{1} << 18, std::size_t{1} << 20};
constexpr std::int64_t kMostNbytes = std::int64_t{1} << 30;

struct Row {
  std::string name;
  std::vector<std::string_view> documents;
  std::size_t nbytes = 0, num_ids = 0;
  std::vector<double> s = {}, peer_s = {};  // of each round

  double mb_per_s(const std::vector<double>& seconds) const {
    return static_cast<double>(nbytes) * 1e-6 / median(seconds);
  }
};

std::vector<std::string_view> lines_of(std::string_view text) {
  std::vector<std::string_view> lines;
  for (std::size_t end = 0; (end = text.find('\n')) != std::string_view::npos;) {
    lines.push_back(text.substr(0, end));
    text.remove_prefix(end + 1);
  }
  lines.push_back(text);
  return lines;
}

void run_ours(const Tokenizer& tokenizer, Row& row) {
  std::vector<std::int32_t> ids;
  const std::clock_t begin = std::clock();
  Encoder encoder(tokenizer);
  row.num_ids = 0;
  for (const std::string_view document : row.documents) {
    ids.clear();
    encoder.encode(document, /*add_special_tokens=*/false, ids);
    row.num_ids += ids.size();
  }
  row.s.push_back(static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC);
}

/// One round of each row. Returns the version of the package.
std::string run_package(const std::string& path, const BenchConfig& config,
                        std::vector<Row>& rows) {
  const std::string script =
      std::filesystem::path(config.peer).parent_path() / "tokenizers_texts.py";
  std::vector<std::string> command = {config.python, script, config.tokenizer, path};
  for (const std::size_t run : kRuns) command.push_back(std::to_string(run));
  const std::string output = run_program(command);
  const nlohmann::json record = engine::parse_json(output, script);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const nlohmann::json& theirs = record.at("rows").at(i);
    const auto num_ids = theirs.at("ids").get<std::size_t>();
    require<IoError>(num_ids == rows[i].num_ids,
                     "[bench] expected {} ids of '{}' as ours, got {} ({})", rows[i].num_ids,
                     rows[i].name, num_ids, script);
    rows[i].peer_s.push_back(theirs.at("s").get<double>());
  }
  return record.at("version").get<std::string>();
}

}  // namespace

void bench_tokenize(const std::string& path, const BenchConfig& config, BenchReport& report) {
  require(!config.tokenizer.empty(),
          "[bench] expected a folder with tokenizer.json for the part tokenize, got none "
          "(bench.tokenizer)");
  const Tokenizer tokenizer = Tokenizer::read(config.tokenizer + "/tokenizer.json");
  const std::string text = engine::read_text_file(path, kMostNbytes);
  const std::string letters(kRuns[1], 'a');
  std::vector<Row> rows = {{"a text, one document", {text}},
                           {"a text, a document a line", lines_of(text)}};
  for (const std::size_t run : kRuns) {
    rows.push_back(
        {fmt::format("one letter, {} KB", run >> 10), {std::string_view(letters).substr(0, run)}});
  }
  for (Row& row : rows) {
    for (const std::string_view document : row.documents) row.nbytes += document.size();
  }
  std::string version;
  for (std::int64_t round = 0; round < config.rounds; ++round) {
    for (Row& row : rows) run_ours(tokenizer, row);
    if (!config.python.empty()) version = run_package(path, config, rows);
  }
  report.begin_table(
      "tokenize",
      fmt::format("{}, one thread each, CPU time, median of {} rounds; theirs: the Python "
                  "package tokenizers{}{}",
                  std::filesystem::path(path).filename().string(), config.rounds,
                  version.empty() ? "" : " ", version),
      {"row", "mb", "ids", "mb_per_s", "theirs_mb_per_s", "ratio"});
  for (const Row& row : rows) {
    if (!config.wants("tokenize " + row.name)) continue;
    const double ours = row.mb_per_s(row.s);
    const double theirs =
        row.peer_s.empty() ? std::numeric_limits<double>::quiet_NaN() : row.mb_per_s(row.peer_s);
    report.row({row.name, Cell(static_cast<double>(row.nbytes) * 1e-6, 2), row.num_ids, ours,
                Cell(theirs, 2), Cell(ours / theirs, 1)});
  }
  if (config.python.empty()) report.note("give --bench.python for the package tokenizers, too");
}

}  // namespace tessera::tools
