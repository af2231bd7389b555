#include "tools/probe/probe_record.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <charconv>
#include <cmath>
#include <iterator>
#include <span>
#include <system_error>

#include "engine/error.h"
#include "engine/io/json.h"
#include "engine/io/text.h"
#include "tools/io/jsonl.h"

namespace tessera::tools {

using engine::require;

namespace {

// Of values on one line.
constexpr std::size_t kMaxLineNumel = 1 << 16;

struct PhaseName {
  ProbePhase phase;
  std::string_view name, title;
};
constexpr std::array<PhaseName, 8> kPhases = {{
    {ProbePhase::kGatheredForward, "gathered_forward", "gathered parameter (forward)"},
    {ProbePhase::kOutput, "output", "activation"},
    {ProbePhase::kOutputGradient, "output_gradient", "gradient of an activation"},
    {ProbePhase::kGatheredBackward, "gathered_backward", "gathered parameter (backward)"},
    {ProbePhase::kGradient, "gradient", "gradient before reduction"},
    {ProbePhase::kReduced, "reduced", "gradient after reduction"},
    {ProbePhase::kUpdated, "updated", "parameter after the update"},
    {ProbePhase::kState, "state", "optimizer state after the update"},
}};

const PhaseName& names_of(ProbePhase phase) { return kPhases[static_cast<std::size_t>(phase)]; }

std::string hex_of(std::span<const float> values) {
  std::string text;
  text.reserve(8 * values.size());
  for (const float x : values) {
    fmt::format_to(std::back_inserter(text), "{:08x}", std::bit_cast<std::uint32_t>(x));
  }
  return text;
}

// JSON has no infinity, and it would come back as not a number.
std::string number_literal(double value) {
  if (!std::isinf(value)) return engine::json_literal(value);
  return engine::json_literal(std::string_view(value < 0 ? "-inf" : "inf"));
}

std::int64_t parse_count(std::string_view text, std::string_view whole) {
  std::int64_t n = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), n);
  require(error == std::errc() && end == text.data() + text.size() && n >= 0,
          "[probe] expected PHASE:MICRO_BATCH:VISIT:TENSOR, got {}", engine::excerpt(whole));
  return n;
}

}  // namespace

std::string_view name_of(ProbePhase phase) { return names_of(phase).name; }
std::string_view title_of(ProbePhase phase) { return names_of(phase).title; }

std::string header_text(const ProbeHeader& header) {
  const auto object = [](const std::map<std::string, std::string>& literals) {
    JsonRecord fields;
    for (const auto& [key, literal] : literals) fields.add_literal(key, literal);
    return fields.text();
  };
  JsonRecord record;
  record.add("probe", 1).add("ranks", header.ranks);
  if (header.local_ranks < header.ranks) {
    record.add("first_rank", header.first_rank)
        .add("local_ranks", header.local_ranks)
        .add("run", header.run);
  }
  record.add("accum", header.accum)
      .add("batch", header.batch)
      .add("first_step", header.first_step)
      .add("accum_comm", header.reduces_last ? "last" : "every")
      .add_literal("options", object(header.options));
  if (!header.data_digest.empty()) record.add("data_digest", header.data_digest);
  if (!header.arithmetic.empty()) record.add_literal("arithmetic", object(header.arithmetic));
  return record.line();
}

std::string part_text(const ProbePart& part) {
  std::string text = JsonRecord()
                         .add("step", part.key.step)
                         .add("micro_batch", part.key.micro_batch)
                         .add("phase", name_of(part.key.phase))
                         .add("tensor", part.key.tensor)
                         .add("visit", part.key.visit)
                         .add("unit", part.unit)
                         .add("rank", part.rank)
                         .add("order", part.order)
                         .add_literal("shape", fmt::format("[{}]", fmt::join(part.shape, ",")))
                         .add("begin", part.begin)
                         .add("dtype", part.dtype)
                         .add("hash", fmt::format("{:016x}", part.checksum.hash))
                         .add("numel", part.checksum.numel)
                         .add_literal("max_abs", number_literal(part.checksum.max_abs))
                         .add_literal("sum", number_literal(part.checksum.sum))
                         .line();
  for (std::size_t at = 0; at < part.values.size(); at += kMaxLineNumel) {
    const std::size_t n = std::min(kMaxLineNumel, part.values.size() - at);
    text += JsonRecord().add("values", hex_of(std::span(part.values).subspan(at, n))).line();
  }
  return text;
}

std::string end_text(std::int64_t last_step, std::int64_t num_parts, std::int64_t unfinished_step) {
  JsonRecord record;
  record.add("end", true).add("last_step", last_step).add("num_parts", num_parts);
  if (unfinished_step != 0) record.add("unfinished_step", unfinished_step);
  return record.line();
}

std::string target_text(const ProbeKey& key) {
  return fmt::format("{}:{}:{}:{}", name_of(key.phase), key.micro_batch, key.visit, key.tensor);
}

ProbeKey parse_target(std::string_view text) {
  std::array<std::string_view, 3> words;
  std::string_view rest = text;
  for (std::string_view& word : words) {
    const std::size_t colon = rest.find(':');
    require(colon != std::string_view::npos,
            "[probe] expected PHASE:MICRO_BATCH:VISIT:TENSOR, got {}", engine::excerpt(text));
    word = rest.substr(0, colon);
    rest.remove_prefix(colon + 1);
  }
  const auto phase = std::ranges::find(kPhases, words[0], &PhaseName::name);
  std::vector<std::string> names;
  for (const PhaseName& p : kPhases) names.emplace_back(p.name);
  require(phase != kPhases.end(), "[probe] expected a phase of {}, got {}",
          engine::join(names, ", "), engine::excerpt(words[0]));
  require(!rest.empty(), "[probe] expected PHASE:MICRO_BATCH:VISIT:TENSOR, got {}",
          engine::excerpt(text));
  return {.micro_batch = parse_count(words[1], text),
          .phase = phase->phase,
          .tensor = std::string(rest),
          .visit = parse_count(words[2], text)};
}

}  // namespace tessera::tools
