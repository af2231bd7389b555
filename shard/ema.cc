#include "shard/ema.h"

#include <algorithm>
#include <cstdint>
#include <exception>
#include <string>

#include "engine/copy.h"
#include "engine/error.h"
#include "shard/cut_values.h"
#include "shard/ema_cuda.h"

namespace tessera::shard {

using engine::Category;
using engine::DType;
using engine::Parameter;
using engine::require;
using engine::Stream;
using engine::Tensor;

namespace {

// Padding too, which nobody reads.
void launch_lerp(const Stream& stream, const Tensor& average, const Tensor& master, float weight,
                 const std::string& unit) {
  if (!average.defined()) return;
  const std::int64_t nbytes = average.nbytes();
  stream.launch(
      {.name = "ema",
       .flops = 3 * static_cast<double>(average.numel()),
       .bytes_read = 2 * nbytes,
       .bytes_written = nbytes,
       .detail = unit},
      [average, master, weight] {
        float* const a = average.data<float>();
        const float* const p = master.data<float>();
        for (std::int64_t i = 0; i < average.numel(); ++i) a[i] = lerp(a[i], p[i], weight);
      },
      [&](const auto& cuda_stream) { lerp_cuda(cuda_stream, average, master, weight); });
}

}  // namespace

Ema::Ema(Fsdp& fsdp) : fsdp_(fsdp) {
  for (const auto& unit : fsdp.units()) create(*unit);
  reset();
  fsdp.add_user(*this);
}

Ema::~Ema() { fsdp_.remove_user(*this); }

void Ema::create(const Unit& unit) {
  const Flat* flat = unit.trainable();
  if (flat == nullptr) return;
  averages_[&unit] = SplitTensor::empty_like(flat->master, fsdp_.memory(), fsdp_.host_memory(),
                                             unit.name() + ".ema", Category::kOptimizer);
}

void Ema::update(double decay) {
  require(decay >= 0 && decay <= 1, "[ema] expected a decay from 0 to 1, got {}", decay);
  CutValues cut(fsdp_);
  cut.check_at_rest("ema");
  fsdp_.offload() != nullptr ? cut.settle() : cut.wait_until_read();  // the host may still write
  const Stream& compute = fsdp_.compute();
  const Stream host = compute.device().is_cuda() ? Stream::inline_cpu("ema") : compute;
  const auto weight = static_cast<float>(1 - decay);
  for (const auto& [unit, average] : averages_) {
    const SplitTensor& master = unit->trainable()->master;
    launch_lerp(compute, average.device(), master.device(), weight, unit->name());
    if (average.has_host()) launch_lerp(host, average.host(), master.host(), weight, unit->name());
  }
}

void Ema::reset() {
  CutValues cut(fsdp_);
  cut.check_at_rest("ema");
  cut.settle();
  for (const auto& [unit, average] : averages_) {
    const SplitTensor& master = unit->trainable()->master;
    if (average.device().defined()) {
      engine::copy(average.device(), master.device(), fsdp_.compute(), "ema");
    }
    if (average.has_host())
      std::ranges::copy(master.host().span<float>(), average.host().span<float>().begin());
  }
}

void Ema::exchange(const Tensor& workspace) {
  CutValues cut(fsdp_);
  cut.settle();
  const auto on_host = [](const Tensor& a, const Tensor& b) {
    std::ranges::swap_ranges(a.span<float>(), b.span<float>());
  };
  for (const auto& [unit, average] : averages_) {
    const SplitTensor& master = unit->trainable()->master;
    if (average.has_host()) on_host(average.host(), master.host());
    const Tensor &a = average.device(), &b = master.device();
    if (!a.defined()) continue;
    if (!workspace.defined()) {
      on_host(a, b);
      continue;
    }
    const Tensor kept = workspace.slice(0, a.shape());
    engine::copy(kept, a, fsdp_.compute(), "ema");
    engine::copy(a, b, fsdp_.compute(), "ema");
    engine::copy(b, kept, fsdp_.compute(), "ema");
  }
  for (const auto& unit : fsdp_.units())
    if (averages_.contains(unit.get())) cut.mark_stale(*unit);
}

void Ema::swap_in(const std::function<void()>& fn) {
  CutValues cut(fsdp_);
  cut.check_at_rest("ema");
  fsdp_.mesh().world().declare("ema");
  Tensor workspace;  // on the host elements change places one by one
  if (!fsdp_.compute().device().is_host()) {
    std::int64_t numel = 0;
    for (const auto& [unit, average] : averages_) numel = std::max(numel, average.split());
    workspace = Tensor::empty(fsdp_.memory(), {numel}, DType::kF32, "ema", Category::kWorkspace);
  }
  exchange(workspace);
  std::exception_ptr error;
  try {
    const auto held = cut.hold("Ema::swap_in()");
    fn();
  } catch (...) {
    error = std::current_exception();
  }
  exchange(workspace);
  if (error != nullptr) std::rethrow_exception(error);
}

const SplitTensor& Ema::average(const Location& at) const {
  const auto found = std::ranges::find_if(
      averages_, [&](const auto& entry) { return entry.first->trainable() == &at.flat; });
  require(found != averages_.end(), "[ema] expected a trainable parameter, got a frozen one ({})",
          at.flat.parameters[at.index]->name);
  return found->second;
}

std::vector<float> Ema::full_average(const Parameter& p) {
  const Location at = fsdp_.location_of(p);
  return CutValues(fsdp_).full(at, average(at));
}

void Ema::before_recut(const Unit& unit) {
  const Flat* flat = unit.trainable();
  if (flat == nullptr) return;
  for (std::size_t i = 0; i < flat->parameters.size(); ++i) {
    const Location at{*flat, i};
    kept_[flat->parameters[i]] = CutValues(fsdp_).full(at, average(at));
  }
  averages_.erase(&unit);
}

void Ema::after_recut(const Unit& unit) {
  create(unit);
  const Flat* flat = unit.trainable();
  for (std::size_t i = 0; flat != nullptr && i < flat->parameters.size(); ++i) {
    const Location at{*flat, i};
    const auto kept = kept_.find(flat->parameters[i]);
    CutValues cut(fsdp_);
    // What is set free has its value on every rank.
    cut.load(at, average(at), kept != kept_.end() ? kept->second : cut.full(at, flat->master));
  }
  kept_.clear();
}

}  // namespace tessera::shard
