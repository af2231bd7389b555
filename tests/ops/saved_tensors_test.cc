// Ops save what the gradients that somebody wants need, and record nothing where none is wanted.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "engine/copy.h"
#include "engine/memory.h"
#include "engine/tape.h"
#include "ops/add.h"
#include "ops/attention.h"
#include "ops/bmm.h"
#include "ops/cross_entropy.h"
#include "ops/dims/broadcast.h"
#include "ops/dims/permute.h"
#include "ops/dims/reduce.h"
#include "ops/dims/slice.h"
#include "ops/dispatch.h"
#include "ops/dot_product_attention.h"
#include "ops/dropout.h"
#include "ops/elementwise/cast.h"
#include "ops/elementwise/div.h"
#include "ops/elementwise/sub.h"
#include "ops/elementwise/unary.h"
#include "ops/elementwise/where.h"
#include "ops/embedding.h"
#include "ops/gelu.h"
#include "ops/group_norm.h"
#include "ops/index/gather.h"
#include "ops/layernorm.h"
#include "ops/linear.h"
#include "ops/losses/losses.h"
#include "ops/losses/weighted_cross_entropy.h"
#include "ops/mul.h"
#include "ops/parameter.h"
#include "ops/relu.h"
#include "ops/rmsnorm.h"
#include "ops/rope.h"
#include "ops/route.h"
#include "ops/scale.h"
#include "ops/softmax/softmax.h"
#include "ops/sum.h"
#include "ops/swiglu.h"

namespace tessera::ops {
namespace {

using engine::Category;
using engine::DType;
using engine::Init;
using engine::Memory;
using engine::Parameter;
using engine::Shape;
using engine::Stream;
using engine::Tape;
using engine::Tensor;

constexpr std::int64_t kRows = 6, kWidth = 8, kVocab = 16;
constexpr std::int64_t kNbytes = kRows * kWidth * 4;  // of an activation
constexpr std::int64_t kStats = kRows * 4;            // of one f32 per row

struct Leaves {
  std::vector<Tensor> x;  // two activations (1, kRows, kWidth)
  Parameter w{"w", {kWidth, kWidth}, Init::normal(0.5f)};
  Parameter v{"v", {kWidth}, Init::normal(1)};
  Parameter bias{"bias", {kWidth}, Init::normal(1)};
  Parameter table{"table", {kVocab, kWidth}, Init::normal(1)};
  Tensor tokens;

  std::vector<Parameter*> parameters() { return {&w, &v, &bias, &table}; }
};

// What is wanted, and the bytes that the op then keeps for backward.
struct Want {
  std::vector<int> inputs;
  std::vector<std::string> parameters;
  std::int64_t saved_nbytes;
  std::size_t num_entries = 1;  // of the tape: more of an op that is made of others
};

struct Case {
  std::string name;
  std::function<Tensor(Tape&, Leaves&)> build;
  std::vector<Want> wants;
};

// Data, from 0 to 1.
Tensor probabilities(Tape& tape, const Tensor& x) {
  return tape.no_grad([&] { return sigmoid(tape, x); });
}

// Of `k` choices of each token the first has a place, that of its number.
Tensor slots(Tape& tape, std::int64_t k) {
  std::vector<std::int32_t> all(static_cast<std::size_t>(kRows * k), -1);
  for (std::int64_t n = 0; n < kRows; ++n)
    all[static_cast<std::size_t>(n * k)] = static_cast<std::int32_t>(n);
  return Tensor::from<std::int32_t>(tape.memory(), {kRows, k}, all, "slots");
}

std::vector<Case> cases() {
  const LinearCrossEntropyOptions again{.max_saved_numel = 0};
  constexpr std::int64_t kLogits = kRows * kVocab * 4;
  return {
      {"linear",
       [](Tape& t, Leaves& l) { return linear(t, l.x[0], l.w, &l.bias); },
       {{{0}, {"w", "bias"}, kNbytes},
        {{}, {"w"}, kNbytes},
        {{0}, {}, 0},
        {{0}, {"bias"}, 0},
        {{}, {"bias"}, 0}}},
      {"linear_gelu",
       [](Tape& t, Leaves& l) { return linear_gelu(t, l.x[0], l.w, l.bias); },
       {{{0}, {"w", "bias"}, 2 * kNbytes, 2}, {{0}, {}, kNbytes, 2}}},
      {"gelu_mlp",
       [](Tape& t, Leaves& l) { return gelu_mlp(t, l.x[0], l.w, l.bias, l.w, &l.bias); },
       {{{0}, {"w", "bias"}, 3 * kNbytes, 3}, {{0}, {}, kNbytes, 3}}},
      {"layernorm",
       [](Tape& t, Leaves& l) { return layernorm(t, l.x[0], l.v, &l.bias); },
       {{{0}, {}, kNbytes + 2 * kStats}, {{}, {"v"}, kNbytes + 2 * kStats}}},
      {"rmsnorm",
       [](Tape& t, Leaves& l) { return rmsnorm(t, l.x[0], l.v); },
       {{{0}, {}, kNbytes + kStats}, {{}, {"v"}, kNbytes + kStats}}},
      {"layernorm without parameters",
       [](Tape& t, Leaves& l) { return layernorm(t, l.x[0]); },
       {{{0}, {}, kNbytes + 2 * kStats + kWidth * 4}}},
      {"rmsnorm without parameters",
       [](Tape& t, Leaves& l) { return rmsnorm(t, l.x[0]); },
       {{{0}, {}, kNbytes + kStats + kWidth * 4}}},
      {"group_norm",  // x, the normalised x and w repeated, and the statistics and ones of 2 groups
       [](Tape& t, Leaves& l) {
         return group_norm(t, l.x[0].reshape({1, kWidth, kRows}), 2, l.v, &l.bias);
       },
       {{{0}, {"v"}, 3 * kNbytes + 2 * 2 * 4 + kWidth / 2 * kRows * 4, 5}, {{}, {"bias"}, 0, 3}}},
      {"mse",
       [](Tape& t, Leaves& l) { return mse(t, l.x[0], l.x[1]); },
       {{{0}, {}, 2 * kNbytes, 3}}},
      {"bce_with_logits",
       [](Tape& t, Leaves& l) { return bce_with_logits(t, l.x[0], probabilities(t, l.x[1])); },
       {{{0}, {}, 2 * kNbytes, 3}}},
      {"kl_divergence",
       [](Tape& t, Leaves& l) { return kl_divergence(t, l.x[0], probabilities(t, l.x[1])); },
       {{{0}, {}, kNbytes, 3}}},
      {"parameter", [](Tape& t, Leaves& l) { return parameter(t, l.v); }, {{{}, {"v"}, 0}}},
      {"add_layernorm",
       [](Tape& t, Leaves& l) {
         const NormOfSum n = add_layernorm(t, l.x[0], l.x[1], l.v, &l.bias);
         EXPECT_EQ(t.needs_grad(n.sum), t.needs_grad(l.x[0]) || t.needs_grad(l.x[1]));
         return n.y;
       },
       {{{0}, {}, kNbytes + 2 * kStats},
        {{1}, {"bias"}, kNbytes + 2 * kStats},
        {{}, {"v"}, kNbytes + 2 * kStats}}},
      {"embedding",
       [](Tape& t, Leaves& l) { return embedding(t, l.tokens, l.table); },
       {{{}, {"table"}, 0}}},
      {"token_position_embedding",
       [](Tape& t, Leaves& l) { return token_position_embedding(t, l.tokens, l.table, l.w); },
       {{{}, {"table"}, 0}, {{}, {"w"}, 0}}},
      {"cross_entropy",
       [](Tape& t, Leaves& l) { return cross_entropy(t, l.x[0], l.tokens); },
       {{{0}, {}, kNbytes + 2 * kStats}}},
      {"cross_entropy_rows",
       [](Tape& t, Leaves& l) { return cross_entropy_rows(t, l.x[0], l.tokens); },
       {{{0}, {}, kNbytes + 2 * kStats}}},
      {"weighted_cross_entropy",  // what rows save, a weight of each, and one over their sum
       [](Tape& t, Leaves& l) {
         const std::vector<float> weights = {1, 2, 3, 4, 5, 6, 7, 8};
         const Tensor of_class = Tensor::from<float>(t.memory(), {kWidth}, weights);
         return weighted_cross_entropy(t, l.x[0], l.tokens, of_class);
       },
       {{{0}, {}, kNbytes + 3 * kStats + 4, 4}}},
      {"linear_cross_entropy",
       [](Tape& t, Leaves& l) { return linear_cross_entropy(t, l.x[0], l.table, l.tokens); },
       {{{0}, {"table"}, kNbytes + kLogits + 2 * kStats},
        {{}, {"table"}, kNbytes + kLogits + 2 * kStats},
        {{0}, {}, kLogits + 2 * kStats}}},
      {"linear_cross_entropy, computed again",
       [again](Tape& t, Leaves& l) {
         return linear_cross_entropy(t, l.x[0], l.table, l.tokens, again);
       },
       {{{0}, {"table"}, kNbytes + 2 * kStats}, {{0}, {}, kNbytes + 2 * kStats}}},
      {"attention",
       [](Tape& t, Leaves& l) {  // one head of 2 channels, and so y of a third of qkv
         return attention(t, l.x[0].reshape({2, kRows * kWidth / 6 / 2, 6}), {.num_heads = 1});
       },
       {{{0}, {}, kNbytes + kNbytes / 3 + kNbytes / 6}}},
      {"attention with positions",  // which are the caller's
       [](Tape& t, Leaves& l) {
         const Shape shape{2, kRows * kWidth / 6 / 2};
         const Tensor at = Tensor::zeros(t.memory(), shape, DType::kI32);
         return attention(t, l.x[0].reshape({shape.dims()[0], shape.dims()[1], 6}),
                          {.num_heads = 1, .positions = at});
       },
       {{{0}, {}, kNbytes + kNbytes / 3 + kNbytes / 6 + kNbytes / 6}}},
      {"dot_product_attention",  // of one head, whose keys are its values: copies in another order
       [](Tape& t, Leaves& l) {
         const Shape heads{1, kRows, 1, kWidth};
         const Tensor k = l.x[1].reshape(heads);
         return dot_product_attention(t, l.x[0].reshape(heads), k, k);
       },
       {{{0, 1}, {}, 3 * kNbytes + kRows * kRows * 4, 8}}},
      {"rope",
       [](Tape& t, Leaves& l) { return rope(t, l.x[0]); },
       {{{0}, {}, kNbytes}}},  // the table, as large as x
      {"rope with positions",
       [](Tape& t, Leaves& l) {
         const Tensor at = Tensor::zeros(t.memory(), {kRows}, DType::kI32);
         return rope(t, l.x[0], {.positions = at});
       },
       {{{0}, {}, kNbytes}}},
      {"gelu", [](Tape& t, Leaves& l) { return gelu(t, l.x[0]); }, {{{0}, {}, kNbytes}}},
      {"relu", [](Tape& t, Leaves& l) { return relu(t, l.x[0]); }, {{{0}, {}, kNbytes}}},
      {"swiglu",
       [](Tape& t, Leaves& l) { return swiglu(t, l.x[0], l.x[1]); },
       {{{0, 1}, {}, 2 * kNbytes}, {{0}, {}, 2 * kNbytes}, {{1}, {}, kNbytes}}},
      {"add",
       [](Tape& t, Leaves& l) { return add(t, l.x[0], l.x[1]); },
       {{{0, 1}, {}, 0}, {{1}, {}, 0}}},
      {"mul",
       [](Tape& t, Leaves& l) { return mul(t, l.x[0], l.x[1]); },
       {{{0, 1}, {}, 2 * kNbytes}, {{0}, {}, kNbytes}, {{1}, {}, kNbytes}}},
      {"scale", [](Tape& t, Leaves& l) { return scale(t, l.x[0], 3); }, {{{0}, {}, 0}}},
      {"sum", [](Tape& t, Leaves& l) { return sum(t, l.x[0]); }, {{{0}, {}, 0}}},
      {"gather", [](Tape& t, Leaves& l) { return gather(t, l.x[0], l.tokens); }, {{{0}, {}, 0}}},
      {"rows",
       [](Tape& t, Leaves& l) {
         return rows(t, l.x[0].reshape({kRows, kWidth}), l.tokens);
       },
       {{{0}, {}, 0}}},
      {"bmm",
       [](Tape& t, Leaves& l) { return bmm(t, l.x[0], l.x[1], {.transpose_b = true}); },
       {{{0, 1}, {}, 2 * kNbytes}, {{0}, {}, kNbytes}, {{1}, {}, kNbytes}}},
      {"softmax", [](Tape& t, Leaves& l) { return softmax(t, l.x[0]); }, {{{0}, {}, kNbytes}}},
      {"log_softmax",
       [](Tape& t, Leaves& l) { return log_softmax(t, l.x[0]); },
       {{{0}, {}, kNbytes}}},
      {"tanh", [](Tape& t, Leaves& l) { return tanh(t, l.x[0]); }, {{{0}, {}, kNbytes}}},
      {"sigmoid", [](Tape& t, Leaves& l) { return sigmoid(t, l.x[0]); }, {{{0}, {}, kNbytes}}},
      {"silu", [](Tape& t, Leaves& l) { return silu(t, l.x[0]); }, {{{0}, {}, kNbytes}}},
      {"log",
       [](Tape& t, Leaves& l) { return log(t, exp(t, l.x[0])); },
       {{{0}, {}, 2 * kNbytes, 2}}},
      {"exp", [](Tape& t, Leaves& l) { return exp(t, l.x[0]); }, {{{0}, {}, kNbytes}}},
      {"softplus", [](Tape& t, Leaves& l) { return softplus(t, l.x[0]); }, {{{0}, {}, kNbytes}}},
      {"where",
       [](Tape& t, Leaves& l) {
         const Tensor condition = Tensor::zeros(t.memory(), l.x[0].shape(), DType::kF32);
         return where(t, condition, l.x[0], l.x[1]);
       },
       {{{0, 1}, {}, kNbytes}, {{1}, {}, kNbytes}}},
      {"cast",
       [](Tape& t, Leaves& l) { return cast(t, cast(t, l.x[0], DType::kBF16), DType::kF32); },
       {{{0}, {}, 0, 2}}},
      {"stop_gradient",  // a copy, which mul() saves
       [](Tape& t, Leaves& l) { return mul(t, l.x[0], stop_gradient(t, l.x[0])); },
       {{{0}, {}, kNbytes}}},
      {"clamp", [](Tape& t, Leaves& l) { return clamp(t, l.x[0], 0, 1); }, {{{0}, {}, kNbytes}}},
      {"sub",
       [](Tape& t, Leaves& l) { return sub(t, l.x[0], l.x[1]); },
       {{{0, 1}, {}, 0}, {{0}, {}, 0}, {{1}, {}, 0}}},
      {"div",
       [](Tape& t, Leaves& l) { return div(t, l.x[0], l.x[1]); },
       {{{0, 1}, {}, 2 * kNbytes}, {{0}, {}, kNbytes}, {{1}, {}, 2 * kNbytes}}},
      {"slice", [](Tape& t, Leaves& l) { return slice(t, l.x[0], 1, 1, 2); }, {{{0}, {}, 0}}},
      {"split",
       [](Tape& t, Leaves& l) {
         return split(t, l.x[0], 2, {3, kWidth - 3})[1];
       },
       {{{0}, {}, 0}}},
      {"concat",
       [](Tape& t, Leaves& l) {
         return concat(t, {l.x[0], l.x[1]}, 1);
       },
       {{{0, 1}, {}, 0}, {{1}, {}, 0}}},
      {"permute", [](Tape& t, Leaves& l) { return transpose(t, l.x[0], 1, 2); }, {{{0}, {}, 0}}},
      {"broadcast",
       [](Tape& t, Leaves& l) {
         return broadcast(t, l.x[0], {2, kRows, kWidth});
       },
       {{{0}, {}, 0}}},
      {"sum of a dimension", [](Tape& t, Leaves& l) { return sum(t, l.x[0], 1); }, {{{0}, {}, 0}}},
      {"mean", [](Tape& t, Leaves& l) { return mean(t, l.x[0], 1); }, {{{0}, {}, 0}}},
      {"max", [](Tape& t, Leaves& l) { return max(t, l.x[0], 2).y; }, {{{0}, {}, kStats}}},
      {"route",  // of 8 experts: probabilities, two gates and choices a row, and counts
       [](Tape& t, Leaves& l) {
         const RouteOptions options{.k = 2, .capacity = kRows};
         return route(t, l.x[0].reshape({kRows, kWidth}), options).gates;
       },
       {{{0}, {}, kNbytes + 4 * kStats + kWidth * 4}}},
      {"dispatch",
       [](Tape& t, Leaves& l) {
         return dispatch(t, l.x[0].reshape({kRows, kWidth}), slots(t, 1), 1, kRows)[0];
       },
       {{{0}, {}, kStats}}},
      {"combine",
       [](Tape& t, Leaves& l) {
         const Shape shape{kRows, kWidth};
         return combine(t, {l.x[0].reshape(shape)}, l.x[1].reshape(shape), slots(t, kWidth));
       },
       {{{0, 1}, {}, 3 * kNbytes}, {{0}, {}, 2 * kNbytes}, {{1}, {}, 2 * kNbytes}}},
      {"dropout",
       [](Tape& t, Leaves& l) {
         return dropout(t, l.x[0], 0.5f, {1, 2}, 0);
       },
       {{{0}, {}, 0}}},
  };
}

struct Outcome {
  std::vector<float> y;
  std::vector<std::vector<float>> grads;  // of x and of the parameters; empty: none
  std::int64_t saved_nbytes = 0;
  std::size_t num_entries = 0;
  bool needs_grad = false;
};

bool contains(const auto& all, const auto& one) {
  return std::find(all.begin(), all.end(), one) != all.end();
}

// Null: everything is wanted.
Outcome run(const Case& c, const Want* want) {
  const Memory memory;
  Tape tape(memory, Stream::inline_cpu("compute"));
  Leaves leaves;
  for (Parameter* p : leaves.parameters()) {
    p->trainable = want == nullptr || contains(want->parameters, p->name);
  }
  engine::materialize(leaves.parameters(), memory, 1);
  const Memory host;
  leaves.tokens = Tensor::from<std::int32_t>(host, {1, kRows}, std::vector{3, 1, 4, 1, 5, 2}, "t");
  std::vector<Tensor> names;  // of the inputs, without data
  for (int i = 0; i < 2; ++i) {
    const std::vector<float> values = engine::to_vector<float>(leaves.w.value);
    const Tensor x = Tensor::empty(memory, {1, kRows, kWidth}, DType::kF32, "x");
    Init::normal(1).write(x.data<float>(), 0, x.numel(), "x", static_cast<std::uint64_t>(i));
    if (want == nullptr || contains(want->inputs, i)) tape.watch(x);
    names.push_back(x.without_data());
    leaves.x.push_back(x);
  }
  Outcome result;
  const auto activations = [&] {
    return memory.stats().current_nbytes[static_cast<std::size_t>(Category::kActivation)];
  };
  Tensor y = c.build(tape, leaves);
  result.y = engine::to_vector<float>(y);
  result.num_entries = tape.num_entries();
  result.needs_grad = tape.needs_grad(y);
  const Tensor name = y.without_data();
  leaves.x.clear();
  y = Tensor();
  result.saved_nbytes = activations();
  if (!result.needs_grad) return result;

  const Tensor dy = Tensor::empty(memory, name.shape(), DType::kF32, "dy");
  Init::normal(1).write(dy.data<float>(), 0, dy.numel(), "dy", 7);
  const Tensor loss = tape.empty({}, DType::kF32, "loss");
  tape.record("loss", loss, [&](const Tensor&) { tape.pass_grad(name, dy); });
  tape.backward(loss);
  for (const Tensor& x : names) {
    const Tensor dx = tape.grad(x);
    result.grads.push_back(dx.defined() ? engine::to_vector<float>(dx) : std::vector<float>());
  }
  for (const Parameter* p : leaves.parameters()) {
    result.grads.push_back(p->grad_written ? engine::to_vector<float>(p->grad)
                                           : std::vector<float>());
  }
  return result;
}

TEST(Frozen, OpsSaveWhatTheWantedGradientsNeed) {
  for (const Case& c : cases()) {
    const Outcome all = run(c, nullptr);
    for (std::size_t i = 0; i < c.wants.size(); ++i) {
      SCOPED_TRACE(c.name + ", row " + std::to_string(i));
      const Want& want = c.wants[i];
      const Outcome some = run(c, &want);
      EXPECT_EQ(some.saved_nbytes, want.saved_nbytes);
      EXPECT_EQ(some.num_entries, want.num_entries);
      EXPECT_TRUE(some.needs_grad);
      EXPECT_EQ(some.y, all.y);
      std::vector<std::vector<float>> wanted = all.grads;
      const std::vector<std::string> names = {"w", "v", "bias", "table"};
      for (int x = 0; x < 2; ++x) {
        if (!contains(want.inputs, x)) wanted[static_cast<std::size_t>(x)].clear();
      }
      for (std::size_t p = 0; p < names.size(); ++p) {
        if (!contains(want.parameters, names[p])) wanted[2 + p].clear();
      }
      EXPECT_EQ(some.grads, wanted);
    }
  }
}

TEST(Frozen, OpsOfWhichNoGradientIsWantedRecordNothing) {
  for (const Case& c : cases()) {
    SCOPED_TRACE(c.name);
    const Want nothing{{}, {}, 0};
    const Outcome none = run(c, &nothing);
    EXPECT_EQ(none.num_entries, 0u);
    EXPECT_EQ(none.saved_nbytes, 0);
    EXPECT_FALSE(none.needs_grad);
    EXPECT_EQ(none.y, run(c, nullptr).y);
  }
}

// A recomputed region finds out in its first run, which saves nothing, whether it is run again.
TEST(Frozen, RecomputedRegionsRunAgainIfAnyGradientIsWanted) {
  for (const Case& c : cases()) {
    std::vector<Want> wants = c.wants;
    wants.push_back({{}, {}, 0});
    for (std::size_t i = 0; i < wants.size(); ++i) {
      SCOPED_TRACE(c.name + ", row " + std::to_string(i));
      int runs = 0;
      const engine::Block block{"block"};
      const Case region{c.name,
                        [&](Tape& tape, Leaves& leaves) {
                          Leaves* l = &leaves;
                          const std::vector<Tensor> x = leaves.x;
                          return tape.region(block,
                                             [&tape, &runs, &c, l, x] {
                                               ++runs;
                                               l->x = x;
                                               const Tensor y = c.build(tape, *l);
                                               l->x.clear();
                                               return y;
                                             },
                                             {.recompute = true});
                        },
                        {}};
      const Outcome plain = run(c, &wants[i]), again = run(region, &wants[i]);
      EXPECT_EQ(runs, plain.num_entries == 0 ? 1 : 2);
      EXPECT_EQ(again.needs_grad, plain.needs_grad);
      EXPECT_EQ(again.y, plain.y);
      EXPECT_EQ(again.grads, plain.grads);
    }
  }
}

}  // namespace
}  // namespace tessera::ops
