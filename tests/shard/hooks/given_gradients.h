// A model whose gradients are whatever a test gives: parameters of any shape, one block each.
#pragma once

#include <fmt/format.h>

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "engine/elementwise.h"
#include "engine/tape.h"

namespace tessera::testing {

class GivenGradients {
 public:
  /// Parameter i is called "p<i>", of block i; the last is the root's.
  explicit GivenGradients(const std::vector<engine::Shape>& shapes) : root{"root", {}} {
    for (std::size_t i = 0; i < shapes.size(); ++i) {
      const std::string name = fmt::format("p{}", i);
      parameters.emplace_back(
          new engine::Parameter{.name = name, .shape = shapes[i], .init = engine::Init::normal(1)});
      if (i + 1 == shapes.size()) {
        root.parameters = {parameters.back().get()};
      } else {
        own.emplace_back(new engine::Block{fmt::format("b{}", i), {parameters.back().get()}});
      }
    }
  }

  std::vector<engine::Block*> blocks() {
    std::vector<engine::Block*> all;
    for (const auto& block : own) all.push_back(block.get());
    return all;
  }

  /// Runs a forward and a backward after which the gradient of parameter i is `gradient(i)`.
  void run(engine::Tape& tape, const std::function<std::vector<float>(std::size_t)>& gradient) {
    const engine::Memory& memory = tape.memory();
    const auto zero = engine::Tensor::zeros(memory, {}, engine::DType::kF32, "zero");
    tape.backward(tape.region(root, [&] {
      engine::Tensor x = give(tape, zero, *parameters.back(), gradient(own.size()));
      for (std::size_t i = 0; i < own.size(); ++i) {
        x = tape.region(*own[i], [&, i] { return give(tape, x, *parameters[i], gradient(i)); });
      }
      return x;
    }));
  }

  std::vector<std::unique_ptr<engine::Parameter>> parameters;
  engine::Block root;
  std::vector<std::unique_ptr<engine::Block>> own;

 private:
  // x, unchanged; backward gives `p` the gradient `values`.
  static engine::Tensor give(engine::Tape& tape, const engine::Tensor& x, engine::Parameter& p,
                             const std::vector<float>& values) {
    static_cast<void>(tape.use(p));
    const auto given = engine::Tensor::from<float>(tape.memory(), p.shape, values, "given");
    const engine::Tensor y = tape.empty({}, engine::DType::kF32, "given");
    engine::launch_assign_or_add(tape.stream(), y, x, false, "given");
    tape.record("given", y, [x, &tape, &p, given](const engine::Tensor& dy) {
      const engine::GradTarget dp = tape.grad_target(p);
      engine::launch_assign_or_add(tape.stream(), dp.dst, given, dp.accumulate, "given");
      if (const auto dx = tape.grad_target(x)) {
        engine::launch_assign_or_add(tape.stream(), dx.dst, dy, dx.accumulate, "given");
      }
    });
    return y;
  }
};

}  // namespace tessera::testing
