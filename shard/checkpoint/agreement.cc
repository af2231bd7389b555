#include "shard/checkpoint/agreement.h"

#include <fmt/format.h>

#include <exception>
#include <new>
#include <sstream>
#include <utility>

#include "comm/host_gather.h"
#include "engine/error.h"
#include "shard/checkpoint/folder.h"

namespace tessera::shard {

using engine::InvalidArgument;
using engine::IoError;

namespace {

// The first letter says what the rest is.
constexpr char kText = '+', kInvalidArgument = 'i', kError = 'e';

}  // namespace

Report report_of(const std::function<std::string()>& fn) noexcept {
  Report report;
  try {
    report.text = fn();
  } catch (const InvalidArgument& e) {
    report.error = e.what();
    report.is_invalid_argument = true;
  } catch (const std::bad_alloc&) {
    report.error = "no memory";  // fits without any
  } catch (const std::exception& e) {
    report.error = *e.what() == '\0' ? "unknown error" : e.what();
  }
  return report;
}

std::vector<std::string> exchange(const Meeting& meeting, const Report& mine,
                                  std::string_view label) {
  const char first = mine.error.empty()         ? kText
                     : mine.is_invalid_argument ? kInvalidArgument
                                                : kError;
  const std::string message =
      fmt::format("{}{}", first, mine.error.empty() ? mine.text : mine.error);
  std::vector<std::string> texts =
      comm::gather_texts(meeting.world, message, meeting.memory, meeting.stream, label);
  // Ranks that fail alike are told of once.
  std::vector<std::pair<std::string, std::string>> errors;
  bool is_invalid_argument = true;
  for (std::size_t rank = 0; rank < texts.size(); ++rank) {
    const char kind = texts[rank].front();
    texts[rank].erase(0, 1);
    if (kind == kText) continue;
    is_invalid_argument = is_invalid_argument && kind == kInvalidArgument;
    if (!errors.empty() && errors.back().first == texts[rank]) {
      errors.back().second += fmt::format(", {}", rank);
    } else {
      errors.emplace_back(texts[rank], fmt::format("{}", rank));
    }
  }
  if (errors.empty()) return texts;
  std::string all;
  for (const auto& [error, ranks] : errors) {
    if (!all.empty()) all += "\n  ";
    all += fmt::format("{} (rank {})", error, ranks);
  }
  if (is_invalid_argument) throw InvalidArgument(all);
  throw IoError(all);
}

std::vector<std::int64_t> agreed_steps(const Meeting& meeting, const std::string& folder) {
  const Report seen = report_of([&]() -> std::string {
    return meeting.world.rank() == 0 ? fmt::format("{}", fmt::join(steps_in(folder), " ")) : "";
  });
  std::istringstream numbers(exchange(meeting, seen, "checkpoints seen").front());
  std::vector<std::int64_t> steps;
  for (std::int64_t step = 0; numbers >> step;) steps.push_back(step);
  return steps;
}

}  // namespace tessera::shard
