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

using engine::DeviceError;
using engine::InvalidArgument;
using engine::IoError;

namespace {

using Kind = Report::Kind;

Report failed(Kind kind, const std::exception& e) noexcept {
  try {
    return {kind, *e.what() == '\0' ? "unknown error" : e.what()};
  } catch (const std::bad_alloc&) {
    return {Kind::kDevice};
  }
}

}  // namespace

Report report_of_error() noexcept {
  try {
    throw;
  } catch (const InvalidArgument& e) {
    return failed(Kind::kInvalidArgument, e);
  } catch (const DeviceError& e) {
    return failed(Kind::kDevice, e);
  } catch (const std::bad_alloc&) {
    return {Kind::kDevice};
  } catch (const std::exception& e) {
    return failed(Kind::kIo, e);
  }
}

std::vector<std::string> exchange(const Meeting& meeting, const Report& mine,
                                  std::string_view label) {
  const std::string message = fmt::format("{}{}", static_cast<char>(mine.kind), mine.text);
  std::vector<std::string> texts =
      comm::gather_texts(meeting.world, message, meeting.memory, meeting.stream, label);
  // Ranks that fail alike are told of once.
  std::vector<std::pair<std::string, std::string>> errors;
  bool is_invalid_argument = true, is_device = false;
  for (std::size_t rank = 0; rank < texts.size(); ++rank) {
    const auto kind = static_cast<Kind>(texts[rank].front());
    texts[rank].erase(0, 1);
    if (kind == Kind::kText) continue;
    is_invalid_argument = is_invalid_argument && kind == Kind::kInvalidArgument;
    is_device = is_device || kind == Kind::kDevice;
    if (texts[rank].empty()) {
      texts[rank] =
          fmt::format("[checkpoint] expected memory from the system, got none ({})", label);
    }
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
  if (is_device) throw DeviceError(all);
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
