#include "tools/train/step_guard.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <utility>

#include "engine/io/xxh3.h"
#include "shard/cut_values.h"

namespace tessera::tools {

using engine::Tensor;

namespace {

std::uint32_t bits_of(float x) { return std::bit_cast<std::uint32_t>(x); }

bool equal(std::span<const float> a, std::span<const float> b) {
  return std::ranges::equal(a, b, {}, bits_of, bits_of);
}

// What of a flat this rank owns, without padding.
void add_to(engine::Xxh3& checksum, const shard::Flat& flat, const shard::SplitTensor& owned) {
  for (const shard::Segment& s : flat.segments) {
    const shard::SplitTensor part = owned.slice(s.shard_begin, s.numel);
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
  const std::size_t accum = of(0).size() - kNumChecksumFloats;
  double sum = 0;
  for (std::size_t micro = 0; micro < accum; ++micro) {
    for (int rank = 0; rank < num_ranks; ++rank) sum += of(rank)[micro];
  }
  return sum / num_loss_terms;
}

std::string StepOutcome::difference(const StepOutcome& other) const {
  const std::size_t num_losses = of(0).size() - kNumChecksumFloats;
  for (int rank = 0; rank < num_ranks; ++rank) {
    const auto mine = of(rank).first(num_losses), others = other.of(rank).first(num_losses);
    if (!equal(mine, others)) return fmt::format("loss on rank {}", rank);
  }
  for (int rank = 0; rank < num_ranks; ++rank) {
    if (!equal(of(rank).subspan(num_losses, 2), other.of(rank).subspan(num_losses, 2))) {
      return fmt::format("gradient of any rank, seen in the sums of rank {}", rank);
    }
  }
  return "";
}

std::string StepOutcome::damage(const StepOutcome& other) const {
  for (int rank = 0; rank < num_ranks; ++rank) {
    if (!equal(of(rank).last(2), other.of(rank).last(2))) {
      return fmt::format("the parameters of rank {} have changed while nobody wrote them", rank);
    }
    const int copy = copies_apart == 0 ? rank : rank % copies_apart;
    if (!equal(of(rank).last(2), of(copy).last(2))) {
      return fmt::format("the parameters of ranks {} and {} differ, which are to be the same", copy,
                         rank);
    }
  }
  return "";
}

std::vector<float> checksums_of(shard::Fsdp& fsdp) {
  shard::CutValues(fsdp).settle();
  engine::Xxh3 gradient, parameters;
  for (const auto& unit : fsdp.units()) {
    for (const shard::Flat& flat : unit->flats()) {
      if (flat.trainable) add_to(gradient, flat, flat.grad_sum);
      add_to(parameters, flat, flat.master);
    }
  }
  std::vector<float> floats;
  for (const std::uint64_t value : {gradient.value(), parameters.value()}) {
    floats.push_back(std::bit_cast<float>(static_cast<std::uint32_t>(value)));
    floats.push_back(std::bit_cast<float>(static_cast<std::uint32_t>(value >> 32)));
  }
  return floats;
}

int copies_apart(const shard::Fsdp& fsdp) {
  for (const auto& unit : fsdp.units()) {
    for (const shard::Flat& flat : unit->flats()) {
      if (flat.owner == shard::Place::kWorld) return 0;
    }
  }
  return fsdp.mesh().shard_ranks();
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
  const auto is_damaged = [&](const StepOutcome& now) {
    verdict.is_wrong = now.damage(verdict.outcome);
    return verdict.is_damaged = !verdict.is_wrong.empty();
  };
  if (doubts(step, verdict.outcome)) {
    if (is_damaged(verdict.outcome)) return verdict;
    verdict.is_replayed = true;
    const StepOutcome second = replay();
    if (is_damaged(second)) return verdict;
    const std::string difference = verdict.outcome.difference(second);
    if (!difference.empty()) {
      // Two against one.
      StepOutcome third = replay();
      if (is_damaged(third)) return verdict;
      const bool is_first_right = verdict.outcome.difference(third).empty();
      if (!is_first_right && !second.difference(third).empty()) {
        verdict.is_wrong = fmt::format(
            "made three times from the same state it came to three results, first to another {}: "
            "this machine does not compute as it should",
            difference);
        return verdict;
      }
      verdict.remark = fmt::format(
          "made again from the same state it came to another {} (loss {:.9g}, then {:.9g}, then "
          "{:.9g}): a transient fault of the machine; going on with what came twice",
          difference, verdict.outcome.mean_loss(), second.mean_loss(), third.mean_loss());
      verdict.outcome = std::move(third);
    }
    verdict.is_wrong = suspicion(verdict.outcome);
  }
  if (!verdict.is_wrong.empty()) return verdict;
  learn(verdict.outcome.mean_loss());
  return verdict;
}

}  // namespace tessera::tools
