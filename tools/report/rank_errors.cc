#include "tools/report/rank_errors.h"

#include <fmt/format.h>

#include <iterator>
#include <new>
#include <string_view>

#include "tools/cli/main.h"

namespace tessera::tools {
namespace {

bool names_a_rank(std::string_view message) {
  constexpr std::string_view kRank = "rank ";
  for (auto at = message.find(kRank); at != std::string_view::npos;
       at = message.find(kRank, at + 1)) {
    const std::string_view rest = message.substr(at + kRank.size());
    if (!rest.empty() && rest.front() >= '0' && rest.front() <= '9') return true;
  }
  return false;
}

// "rank 3", "ranks 0, 2-3"
std::string text_of(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank" : "ranks";
  for (std::size_t i = 0, last = 0; i < ranks.size(); i = last + 1) {
    last = i;
    while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) ++last;
    text += fmt::format("{} {}", i == 0 ? "" : ",", ranks[i]);
    if (last > i) text += fmt::format("-{}", ranks[last]);
  }
  return text;
}

}  // namespace

std::string RankErrors::named(const std::string& message) const {
  if (ranks_.world_size == 1 || names_a_rank(message)) return message;
  std::vector<int> ranks;
  for (const int rank : ranks_.all()) {
    const std::exception_ptr& error = errors_[ranks_.index(rank)];
    if (error && message_of(error) == message) ranks.push_back(rank);
  }
  if (ranks.empty()) return message;
  if (std::ssize(ranks) == ranks_.world_size) {
    return fmt::format("all {} ranks: {}", ranks.size(), message);
  }
  return fmt::format("{}: {}", text_of(ranks), message);
}

std::string message_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::bad_alloc&) {
    return kNoMemory;
  } catch (const std::exception& e) {
    return e.what();
  } catch (...) {
    return "an exception of unknown type";
  }
}

}  // namespace tessera::tools
