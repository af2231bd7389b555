#include "ops/route.h"

#include <limits>
#include <tuple>
#include <vector>

#include "ops/route_cuda.h"

namespace tessera::ops {

using engine::DType;
using engine::GradTarget;
using engine::require;
using engine::Tape;
using engine::Tensor;

namespace {

void check(const Tensor& logits, const RouteOptions& options) {
  require(logits.shape().rank() == 2 && logits.dim(0) > 0,
          "[route] expected logits (tokens, experts), got {} ({})", logits.shape(), logits.name());
  require(options.k >= 1 && options.k <= logits.dim(1),
          "[route] expected k in [1, {}], got {} ({})", logits.dim(1), options.k, logits.name());
  const std::int64_t most = std::numeric_limits<std::int32_t>::max() / logits.dim(1);
  require(options.capacity >= 1 && options.capacity <= most,
          "[route] expected a capacity in [1, {}], got {} ({})", most, options.capacity,
          logits.name());
}

}  // namespace

Routing route(Tape& tape, const Tensor& logits, const RouteOptions& options) {
  check(logits, options);
  const std::int64_t n = logits.dim(0), num_experts = logits.dim(1), k = options.k;
  const Routing routing{.gates = tape.empty({n, k}, DType::kF32, "route.gates"),
                        .experts = tape.empty({n, k}, DType::kI32, "route.experts"),
                        .slots = tape.empty({n, k}, DType::kI32, "route.slots"),
                        .aux = tape.empty({}, DType::kF32, "route.aux")};
  const Tensor probs = tape.empty({n, num_experts}, DType::kF32, "route.probs");
  const Tensor counts = tape.empty({num_experts}, DType::kI32, "route.counts");
  const Tensor means = tape.empty({num_experts}, DType::kF32, "route.means");
  const auto view = [=](const Routing& r) {
    return RouteView{.num_tokens = n,
                     .num_experts = num_experts,
                     .k = k,
                     .capacity = options.capacity,
                     .renormalise = options.renormalise,
                     .probs = probs.data<float>(),
                     .gates = r.gates.data<float>(),
                     .experts = r.experts.data<std::int32_t>(),
                     .slots = r.slots.defined() ? r.slots.data<std::int32_t>() : nullptr,
                     .counts = counts.data<std::int32_t>()};
  };
  RouteView forward = view(routing);
  forward.means = means.data<float>();
  forward.aux = routing.aux.data<float>();
  tape.stream().launch(
      {.name = "route.forward",
       .flops = kExpFlops * static_cast<double>(logits.numel()),
       .bytes_read = logits.nbytes(),
       .bytes_written = probs.nbytes() + routing.gates.nbytes() + 2 * routing.slots.nbytes()},
      [=, keep = std::vector{probs, counts, means, routing.gates, routing.experts, routing.slots,
                             routing.aux}] {
        engine::dispatch_float(logits.dtype(), "route", [&](auto t) {
          const auto* x = logits.data<decltype(t)>();
          for (std::int64_t i = 0; i < n; ++i) forward.choose(x, i);
        });
        for (std::int64_t e = 0; e < num_experts; ++e) forward.place(e);
        forward.balance();
      },
      [=](const auto& stream) { route_forward_cuda(stream, forward, logits); });
  if (!tape.needs_grad(logits)) return routing;

  const Tensor x = logits.without_data();
  const Routing saved{.gates = routing.gates, .experts = routing.experts, .slots = {}, .aux = {}};
  tape.record(
      "route", {routing.gates, routing.aux}, [&tape, x, view, saved](const std::vector<Tensor>& d) {
        const GradTarget dx = tape.grad_target(x);
        if (!dx) return;
        const RouteView backward = view(saved);
        const float* dgates = d[0].defined() ? d[0].data<float>() : nullptr;
        const float* daux = d[1].defined() ? d[1].data<float>() : nullptr;
        tape.stream().launch(
            {.name = "route.backward",
             .flops = 6.0 * static_cast<double>(x.numel()),
             .bytes_read = 4 * x.numel(),
             .bytes_written = x.nbytes()},
            [=, keep = std::tuple(view, saved, d)] {
              engine::dispatch_float(dx.dst.dtype(), "route", [&](auto t) {
                auto* dst = dx.dst.data<decltype(t)>();
                for (std::int64_t i = 0; i < backward.num_tokens; ++i)
                  backward.backward(dst, dx.accumulate, dgates, daux, i);
              });
            },
            [&](const auto& stream) { route_backward_cuda(stream, backward, dx, dgates, daux); });
      });
  return routing;
}

}  // namespace tessera::ops
