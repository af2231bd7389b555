// What ranks of a Trainer tell each other besides the steps, and what is read of its tensors.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <span>

#include "comm/host_gather.h"
#include "engine/copy.h"
#include "engine/elementwise.h"
#include "engine/error.h"
#include "tools/cli/stop.h"
#include "tools/io/sha256.h"
#include "tools/train/trainer.h"

namespace tessera::tools {

using engine::Category;
using engine::Tensor;

std::vector<float> Trainer::gather(const std::vector<float>& values) {
  return start_gather(values).wait<float>(compute_);
}

comm::HostGather Trainer::start_gather(const std::vector<float>& values) {
  const auto n = static_cast<std::int64_t>(values.size());
  Tensor in = Tensor::from<float>(memory_, {n}, values, "values", Category::kCommunication);
  return {world_, std::move(in), metrics_, pinned_, "values"};
}

double Trainer::mean_loss(std::int64_t num_batches,
                          const std::function<Tensor(std::int64_t batch)>& loss,
                          std::optional<std::int64_t> num_terms) {
  const std::int64_t ranks = world_.size();
  std::vector<float> mine;
  for (std::int64_t first = 0; first < num_batches; first += ranks) {
    if (stops()) throw Stopped();
    // All ranks run as many forwards, since each one gathers: the last round may repeat a batch.
    const std::int64_t batch = std::min(first + world_.rank(), num_batches - 1);
    mine.push_back(tape_.no_grad([&] { return loss(batch).item(); }));
  }
  const std::vector<float> all = gather(mine);
  double sum = 0;
  for (std::int64_t batch = 0; batch < num_batches; ++batch) {
    sum += all[static_cast<std::size_t>(batch % ranks) * mine.size() +
               static_cast<std::size_t>(batch / ranks)];
  }
  return sum / static_cast<double>(num_terms.value_or(num_batches));
}

bool Trainer::stops() {
  for (const float why : gather({static_cast<float>(stop_requested())})) {
    stop(static_cast<int>(why));
  }
  return stopped_by_ != 0;
}

std::string Trainer::params_sha256() {
  Sha256 sha;
  for (const engine::Parameter* p : fsdp_.parameters()) {
    const std::vector<float> values = fsdp_.full_parameter(*p);
    const auto bad = std::ranges::find_if_not(values, [](float x) { return std::isfinite(x); });
    engine::require(bad == values.end(),
                    "[train] expected finite parameters after training, got {} at element {} ({})",
                    bad == values.end() ? 0.0f : *bad, bad - values.begin(), p->name);
    sha.update(std::as_bytes(std::span(values)));
  }
  return sha.hex();
}

std::vector<float> to_floats(const Tensor& t) {
  std::vector<float> values(static_cast<std::size_t>(t.numel()));
  engine::dispatch_float(t.dtype(), "to_floats", [&](auto zero) {
    const auto stored = engine::to_vector<decltype(zero)>(t);
    engine::cast(values.data(), stored.data(), t.numel());
  });
  return values;
}

std::int64_t largest_divisor(std::int64_t n, std::int64_t most) {
  std::int64_t d = std::min(n, most);
  while (d > 1 && n % d != 0) --d;
  return d;
}

}  // namespace tessera::tools
