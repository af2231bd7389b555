// The router: choices, places, the balancing loss and gradients, against a naive reference.
#include "ops/route.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "engine/copy.h"
#include "ops/add.h"
#include "ops/mul.h"
#include "ops/scale.h"
#include "ops/sum.h"
#include "tests/testing/errors.h"
#include "tests/testing/gradcheck.h"

namespace tessera::ops {
namespace {

using namespace tessera::testing;  // NOLINT: the harness
using engine::InvalidArgument;
using engine::Memory;
using engine::Stream;

std::vector<float> logits_of(std::int64_t n, std::int64_t num_experts) {
  return engine::gradcheck::random_values(n * num_experts, 3);
}

// In double, from the definition.
struct Reference {
  Reference(const std::vector<float>& logits, std::size_t n, std::size_t num_experts,
            const RouteOptions& options) {
    const auto k = static_cast<std::size_t>(options.k);
    std::vector<std::int64_t> counts(num_experts, 0);
    std::vector<double> means(num_experts, 0);
    experts.resize(n * k);
    slots.resize(n * k);
    gates.resize(n * k);
    for (std::size_t i = 0; i < n; ++i) {
      std::vector<double> p(num_experts);
      double sum = 0;
      for (std::size_t e = 0; e < num_experts; ++e)
        sum += p[e] = std::exp(logits[i * num_experts + e]);
      for (std::size_t e = 0; e < num_experts; ++e) means[e] += (p[e] /= sum) / double(n);
      std::vector<std::size_t> order(num_experts);
      for (std::size_t e = 0; e < num_experts; ++e) order[e] = e;
      std::ranges::stable_sort(order, [&](std::size_t a, std::size_t b) { return p[a] > p[b]; });
      double chosen = 0;
      for (std::size_t j = 0; j < k; ++j) chosen += p[order[j]];
      for (std::size_t j = 0; j < k; ++j) {
        experts[i * k + j] = static_cast<std::int32_t>(order[j]);
        gates[i * k + j] = p[order[j]] / (options.renormalise ? chosen : 1);
      }
    }
    for (std::size_t j = 0; j < k; ++j) {
      for (std::size_t i = 0; i < n; ++i) {
        const auto e = static_cast<std::size_t>(experts[i * k + j]);
        const std::int64_t place = counts[e]++;
        slots[i * k + j] =
            place < options.capacity
                ? static_cast<std::int32_t>(std::int64_t(e) * options.capacity + place)
                : -1;
      }
    }
    for (std::size_t e = 0; e < num_experts; ++e) {
      aux += double(num_experts) * double(counts[e]) / double(n * k) * means[e];
    }
  }
  std::vector<std::int32_t> experts, slots;
  std::vector<double> gates;
  double aux = 0;
};

TEST(Route, ChoosesAsItsReference) {
  const Memory memory({.poison = true});
  Tape tape(memory, Stream::inline_cpu("compute"));
  for (const std::int64_t n : {1, 7, 40}) {
    for (const std::int64_t num_experts : {1, 4, 9}) {
      const std::vector<float> logits = logits_of(n, num_experts);
      const Tensor x = Tensor::from<float>(memory, {n, num_experts}, logits);
      for (const std::int64_t k : {std::int64_t{1}, std::min<std::int64_t>(3, num_experts)}) {
        for (const std::int64_t capacity : {1, 5, 1000}) {
          for (const bool renormalise : {false, true}) {
            const RouteOptions options{k, capacity, renormalise};
            const Routing r = route(tape, x, options);
            const Reference want(logits, std::size_t(n), std::size_t(num_experts), options);
            EXPECT_EQ(engine::to_vector<std::int32_t>(r.experts), want.experts);
            EXPECT_EQ(engine::to_vector<std::int32_t>(r.slots), want.slots);
            const std::vector<float> gates = engine::to_vector<float>(r.gates);
            for (std::size_t i = 0; i < gates.size(); ++i)
              EXPECT_NEAR(gates[i], want.gates[i], 1e-6);
            EXPECT_NEAR(r.aux.item(), want.aux, 1e-6);
          }
        }
      }
    }
  }
  EXPECT_EQ(tape.num_entries(), 0u) << "no gradient is wanted of data";
}

TEST(Route, OfEqualOnesTakesTheFirst) {
  const Memory memory;
  Tape tape(memory, Stream::inline_cpu("compute"));
  const Routing r =
      route(tape, Tensor::zeros(memory, {2, 4}, DType::kF32), {.k = 2, .capacity = 2});
  EXPECT_EQ(engine::to_vector<std::int32_t>(r.experts), (std::vector<std::int32_t>{0, 1, 0, 1}));
  EXPECT_EQ(engine::to_vector<float>(r.gates), (std::vector<float>{0.25f, 0.25f, 0.25f, 0.25f}));
  EXPECT_EQ(r.aux.item(), 1) << "probabilities are even";
}

// What a gradient is checked of: gates times fixed weights, plus the balancing loss.
OpCase route_case(std::int64_t n, std::int64_t num_experts, RouteOptions options, bool with_gates,
                  bool with_aux) {
  return {.inputs = {{n, num_experts}}, .build = [=](Tape& tape, const auto& x, auto&) {
            const Routing r = route(tape, x[0], options);
            const Tensor w = Tensor::empty(tape.memory(), r.gates.shape(), DType::kF32, "w");
            engine::copy_from_floats(w, engine::gradcheck::random_values(w.numel(), 9));
            const Tensor weighted = sum(tape, mul(tape, r.gates, w));
            const Tensor aux = scale(tape, r.aux, 3);
            return with_gates && with_aux ? add(tape, weighted, aux) : with_gates ? weighted : aux;
          }};
}

TEST(Route, GradientsAreThoseOfDifferences) {
  // Logits that lie apart, so that a difference changes no choice.
  for (const bool renormalise : {false, true}) {
    for (const std::int64_t k : {1, 2, 4}) {
      for (const int what : {1, 2, 3}) {
        OpCase op = route_case(5, 4, {k, 3, renormalise}, (what & 1) != 0, (what & 2) != 0);
        op.scale = 2;
        check_gradients(op, {.eps = 1e-3f, .tolerance = 1e-2, .max_samples = 20});
      }
    }
  }
}

TEST(Route, RefusesWhatDoesNotFit) {
  const Memory memory;
  Tape tape(memory, Stream::inline_cpu("compute"));
  const Tensor x = Tensor::zeros(memory, {2, 4}, DType::kF32, "logits");
  const auto error = [&](const Tensor& t, RouteOptions options) {
    return error_of<InvalidArgument>([&] { route(tape, t, options); });
  };
  EXPECT_TRUE(has(error(x, {.k = 5, .capacity = 1}), {"[route]", "k in [1, 4]", "got 5"}));
  EXPECT_TRUE(has(error(x, {.k = 0, .capacity = 1}), {"got 0"}));
  EXPECT_TRUE(has(error(x, {.k = 1}), {"capacity", "got 0", "logits"}));
  EXPECT_TRUE(has(error(x.reshape({8}), {.capacity = 1}), {"(tokens, experts)", "(8)"}));
}

}  // namespace
}  // namespace tessera::ops
