#include "tools/train/step_guard.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <utility>

#include "engine/io/xxh3.h"

namespace tessera::tools {

using engine::Tensor;

namespace {

std::uint32_t bits_of(float x) { return std::bit_cast<std::uint32_t>(x); }

// A flat's gradient sums that this rank owns, without padding.
void add_to(engine::Xxh3& checksum, const shard::Flat& flat) {
  for (const shard::Segment& s : flat.segments) {
    const shard::SplitTensor part = flat.grad_sum.slice(s.shard_begin, s.numel);
    for (const Tensor* t : {&part.device(), &part.host()}) {
      if (!t->defined()) continue;
      std::vector<std::byte> bytes(static_cast<std::size_t>(t->nbytes()));
      t->copy_to_host(bytes.data());
      checksum.update(bytes);
    }
  }
}

}  // namespace

std::span<const float> StepOutcome::of(int rank) const {
  const std::size_t n = values.size() / static_cast<std::size_t>(num_ranks);
  return std::span(values).subspan(static_cast<std::size_t>(rank) * n, n);
}

double StepOutcome::mean_loss() const {
  const std::size_t accum = of(0).size() - 2;
  double sum = 0;
  for (std::size_t micro = 0; micro < accum; ++micro) {
    for (int rank = 0; rank < num_ranks; ++rank) sum += of(rank)[micro];
  }
  return sum / static_cast<double>(accum * static_cast<std::size_t>(num_ranks));
}

std::optional<int> StepOutcome::first_difference(const StepOutcome& other) const {
  for (int rank = 0; rank < num_ranks; ++rank) {
    if (!std::ranges::equal(of(rank), other.of(rank), {}, bits_of, bits_of)) return rank;
  }
  return std::nullopt;
}

std::vector<float> checksum_of_gradient(shard::Fsdp& fsdp) {
  fsdp.settle_values();
  engine::Xxh3 checksum;
  for (const auto& unit : fsdp.units()) {
    for (const shard::Flat& flat : unit->flats()) {
      if (flat.trainable) add_to(checksum, flat);
    }
  }
  const std::uint64_t value = checksum.value();
  return {std::bit_cast<float>(static_cast<std::uint32_t>(value)),
          std::bit_cast<float>(static_cast<std::uint32_t>(value >> 32))};
}

bool StepGuard::watches(std::int64_t step) const {
  return config_.spike_factor > 0 || is_due(step);
}

bool StepGuard::is_due(std::int64_t step) const {
  return config_.verify_every > 0 && step % config_.verify_every == 0;
}

bool StepGuard::doubts(std::int64_t step, const StepOutcome& outcome) const {
  return is_due(step) || !suspicion(outcome).empty();
}

void StepGuard::learn(double loss) {
  losses_.push_back(loss);
  if (losses_.size() > kHistory) losses_.erase(losses_.begin());
}

double StepGuard::median() const {
  std::vector<double> sorted = losses_;
  const auto middle = sorted.begin() + std::ssize(sorted) / 2;
  std::ranges::nth_element(sorted, middle);
  return *middle;
}

std::string StepGuard::suspicion(const StepOutcome& outcome) const {
  const double loss = outcome.mean_loss();
  if (!std::isfinite(loss)) return fmt::format("the loss is {}", loss);
  if (!outcome.not_finite.empty()) {
    return fmt::format("the gradient is not finite ({})", outcome.not_finite);
  }
  if (config_.spike_factor == 0 || losses_.size() < kFewest) return "";
  const double usual = median();
  if (loss <= config_.spike_factor * usual) return "";
  return fmt::format("the loss is {:.6g}, over {} times the median of the last {} steps, {:.6g}",
                     loss, config_.spike_factor, losses_.size(), usual);
}

StepGuard::Verdict StepGuard::judge(std::int64_t step, StepOutcome first,
                                    const std::function<StepOutcome()>& replay) {
  Verdict verdict{.outcome = std::move(first)};
  if (doubts(step, verdict.outcome)) {
    verdict.is_replayed = true;
    const StepOutcome second = replay();
    if (const std::optional<int> rank = verdict.outcome.first_difference(second)) {
      // Two against one.
      StepOutcome third = replay();
      const bool is_first_right = !verdict.outcome.first_difference(third);
      if (!is_first_right && second.first_difference(third)) {
        verdict.is_wrong = fmt::format(
            "made three times from the same state it came to three results, on rank {} first: this "
            "machine does not compute as it should",
            *rank);
        return verdict;
      }
      verdict.remark = fmt::format(
          "made again from the same state it came to another result on rank {} (loss {:.9g}, then "
          "{:.9g}, then {:.9g}): a transient fault of the machine; going on with what came twice",
          *rank, verdict.outcome.mean_loss(), second.mean_loss(), third.mean_loss());
      verdict.outcome = std::move(third);
    }
    verdict.is_wrong = suspicion(verdict.outcome);
  }
  if (!verdict.is_wrong.empty()) return verdict;
  learn(verdict.outcome.mean_loss());
  return verdict;
}

}  // namespace tessera::tools
