#include "comm/control/gathering.h"

#include <algorithm>
#include <utility>

#include "engine/error.h"

namespace tessera::comm::control {

void Gathering::add(int process, Gather gather) {
  engine::require<engine::CommError>(gather.sequence == sequence_ && !has(process),
                                     "[control] expected all_gather #{}, got #{}", sequence_,
                                     gather.sequence);
  if (!has_begun()) {
    first_ = process;
    label_ = std::move(gather.label);
  }
  nbytes_ += gather.text.size();
  texts_[static_cast<std::size_t>(process)] = std::move(gather.text);
}

bool Gathering::is_complete() const {
  return std::ranges::all_of(texts_, &std::optional<std::string>::has_value);
}

Gathered Gathering::take() {
  Gathered gathered{.sequence = sequence_++, .texts = {}};
  for (auto& text : texts_) gathered.texts.push_back(*std::exchange(text, std::nullopt));
  first_ = -1;
  nbytes_ = 0;
  return gathered;
}

}  // namespace tessera::comm::control
