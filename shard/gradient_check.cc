#include "shard/gradient_check.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <limits>
#include <utility>

#include "engine/elementwise.h"
#include "shard/gradient_check_cuda.h"

namespace tessera::shard {

using engine::Category;
using engine::Parameter;
using engine::Stream;
using engine::Tensor;

namespace {

template <class T>
bool all_finite(const T* x, std::int64_t numel) {
  constexpr std::uint32_t kExponent = 0x7F800000u;
  std::uint32_t bad = 0;
  for (std::int64_t i = 0; i < numel; ++i) {
    const auto bits = std::bit_cast<std::uint32_t>(engine::to_f32(x[i]));
    bad |= (bits & kExponent) == kExponent ? 1u : 0u;
  }
  return bad == 0;
}

}  // namespace

GradientCheck::GradientCheck(const engine::Memory& memory, std::vector<const Parameter*> parameters)
    : memory_(memory), parameters_(std::move(parameters)) {
  for (const Parameter* p : parameters_) {
    numbers_.emplace(p, static_cast<std::int64_t>(numbers_.size()));
  }
}

// Larger for what comes first, and never 0.
std::int64_t GradientCheck::code_of(const Parameter& p) const {
  const auto count = static_cast<std::int64_t>(parameters_.size());
  return std::numeric_limits<std::int64_t>::max() - (micro_step_ * count + numbers_.at(&p));
}

// The last step's may still be gathered.
void GradientCheck::begin_step(const Stream& compute) {
  found_ =
      Tensor::empty(memory_, {1}, engine::DType::kI64, "gradient_check", Category::kCommunication);
  engine::launch_fill(compute, found_, 0, "gradient_check.clear");
}

void GradientCheck::look(const Stream& compute, const Parameter& p, const Tensor& grad) {
  const std::int64_t code = code_of(p);
  compute.launch(
      {.name = "gradient_check", .bytes_read = grad.nbytes(), .detail = p.name},
      [found = found_, grad, code] {
        engine::dispatch_float(grad.dtype(), "gradient_check", [&](auto type) {
          if (all_finite(grad.data<decltype(type)>(), grad.numel())) return;
          std::int64_t& first = *found.data<std::int64_t>();
          first = std::max(first, code);
        });
      },
      [&](const auto& stream) { check_gradient_cuda(stream, found_, grad, code); });
}

comm::HostGather GradientCheck::gather(comm::ProcessGroup& group, const Stream& stream,
                                       const engine::Memory& pinned) const {
  return {group, found_, stream, pinned, "gradient_check"};
}

std::string GradientCheck::describe(const comm::HostGather& findings) const {
  const std::vector<std::int64_t> found = findings.wait<std::int64_t>();
  const auto first = std::ranges::max_element(found);
  if (*first == 0) return {};
  const std::int64_t at = std::numeric_limits<std::int64_t>::max() - *first;
  const auto count = static_cast<std::int64_t>(parameters_.size());
  return fmt::format("{}, rank {}, micro-step {}",
                     parameters_[static_cast<std::size_t>(at % count)]->name, first - found.begin(),
                     at / count + 1);
}

}  // namespace tessera::shard
