// A model small enough to follow by hand: y = w * x + b per block, elementwise; the root owns one
// scale that is used first and last, like a tied embedding. Runs on inline and worker streams and,
// with the same bits, on GPUs.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "engine/tape.h"
#include "tests/shard/toy_model_cuda.h"

namespace tessera::testing {

/// What a kernel takes: an address, since the view may be released before the stream comes to it.
struct Elements {
  explicit Elements(const engine::Tensor& t)
      : data(t.defined() ? t.raw() : nullptr), dtype(t.dtype()) {}

  float get(std::int64_t i) const {
    return engine::dispatch_float(dtype, "toy", [&](auto type) {
      return engine::to_f32(reinterpret_cast<const decltype(type)*>(data)[i]);
    });
  }
  void set(std::int64_t i, float value) const {
    engine::dispatch_float(dtype, "toy", [&](auto type) {
      engine::store_f32(reinterpret_cast<decltype(type)*>(data)[i], value);
    });
  }
  void write(std::int64_t i, float value, bool accumulate) const {
    if (data != nullptr) set(i, accumulate ? get(i) + value : value);
  }

  ToyElements on_gpu(bool accumulate = false) const { return {data, dtype, accumulate}; }

  std::byte* data;
  engine::DType dtype;
};

/// w * x + b; `b` may be null.
inline engine::Tensor affine(engine::Tape& tape, const engine::Tensor& x, engine::Parameter& w,
                             engine::Parameter* b) {
  const Elements wv(tape.use(w)), bv(b == nullptr ? engine::Tensor() : tape.use(*b));
  const engine::Tensor y = tape.empty(x.shape(), x.dtype(), "affine");
  tape.stream().launch(
      {.name = "affine"},
      [=] {
        for (std::int64_t i = 0; i < x.numel(); ++i) {
          y.data<float>()[i] =
              wv.get(i) * x.data<float>()[i] + (bv.data == nullptr ? 0.0f : bv.get(i));
        }
      },
      [=](const auto& stream) {
        toy_affine_cuda(stream, y.data<float>(), x.data<float>(), wv.on_gpu(), bv.on_gpu(),
                        x.numel());
      });
  tape.record("affine", y, [=, &tape, &w](const engine::Tensor& dy) {
    const engine::GradTarget dw = tape.grad_target(w);
    const engine::GradTarget db = b == nullptr ? engine::GradTarget{} : tape.grad_target(*b);
    const engine::GradTarget dx = tape.grad_target(x);
    const Elements wv(w.value), dwv(dw.dst), dbv(db.dst);
    const bool add_dw = dw.accumulate, add_db = db.accumulate;
    tape.stream().launch(
        {.name = "affine backward"},
        [=] {
          const Elements dxv(dx.dst);
          for (std::int64_t i = 0; i < x.numel(); ++i) {
            const float d = dy.data<float>()[i];
            dwv.write(i, d * x.data<float>()[i], add_dw);
            dbv.write(i, d, add_db);
            dxv.write(i, d * wv.get(i), dx.accumulate);
          }
        },
        [=](const auto& stream) {
          toy_affine_backward_cuda(stream, dwv.on_gpu(add_dw), dbv.on_gpu(add_db),
                                   Elements(dx.dst).on_gpu(dx.accumulate), dy.data<float>(),
                                   x.data<float>(), wv.on_gpu(), x.numel());
        });
  });
  return y;
}

/// (n) -> scalar f32.
inline engine::Tensor sum(engine::Tape& tape, const engine::Tensor& x) {
  const engine::Tensor y = tape.empty({}, x.dtype(), "sum");
  tape.stream().launch(
      {.name = "sum"},
      [=] {
        *y.data<float>() = 0;
        for (const float v : x.span<float>()) *y.data<float>() += v;
      },
      [=](const auto& stream) {
        toy_sum_cuda(stream, y.data<float>(), x.data<float>(), x.numel());
      });
  tape.record("sum", y, [=, &tape](const engine::Tensor& dy) {
    if (const auto dx = tape.grad_target(x)) {
      tape.stream().launch(
          {.name = "sum backward"},
          [=] {
            for (float& v : dx.dst.span<float>()) v = (dx.accumulate ? v : 0) + dy.item();
          },
          [=](const auto& stream) {
            toy_sum_backward_cuda(stream, Elements(dx.dst).on_gpu(dx.accumulate), dy.data<float>(),
                                  x.numel());
          });
    }
  });
  return y;
}

class ToyModel {
 public:
  ToyModel(int num_blocks, std::int64_t numel)
      : scale{.name = "scale", .shape = {numel}, .init = engine::Init::normal(1)},
        root{"root", {&scale}} {
    for (int i = 0; i < num_blocks; ++i) {
      layers.push_back(std::make_unique<Layer>("h." + std::to_string(i), numel));
    }
  }

  std::vector<engine::Block*> blocks() {
    std::vector<engine::Block*> all;
    for (const auto& l : layers) all.push_back(&l->block);
    return all;
  }

  /// `rounds`: how often the layers run one after the other.
  engine::Tensor loss(engine::Tape& tape, const engine::Tensor& input, bool recompute = false,
                      int rounds = 1) {
    return tape.region(root, [&] {
      engine::Tensor x = affine(tape, input, scale, nullptr);
      for (std::size_t i = 0; i < layers.size() * static_cast<std::size_t>(rounds); ++i) {
        Layer& layer = *layers[i % layers.size()];
        x = tape.region(layer.block,
                        [x, &tape, &layer] { return affine(tape, x, layer.weight, &layer.bias); },
                        {.recompute = recompute});
      }
      return sum(tape, affine(tape, x, scale, nullptr));
    });
  }

  struct Layer {
    Layer(const std::string& name, std::int64_t numel)
        : weight{.name = name + ".weight", .shape = {numel}, .init = engine::Init::normal(1)},
          bias{.name = name + ".bias", .shape = {numel}, .init = engine::Init::uniform(1)},
          block{name, {&weight, &bias}} {}

    engine::Parameter weight, bias;
    engine::Block block;
  };
  engine::Parameter scale;
  engine::Block root;
  std::vector<std::unique_ptr<Layer>> layers;
  bool recomputes = false;  ///< its blocks, in usage_patterns.h
};

}  // namespace tessera::testing
