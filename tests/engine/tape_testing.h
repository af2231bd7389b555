// Small ops and hooks for tests of the tape. The ops record whatever they are given, as an op of a
// user's own may.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "engine/elementwise.h"
#include "engine/tape.h"
#include "tests/testing/errors.h"

namespace tessera::engine {

using tessera::testing::error_of;
using tessera::testing::has;

// y = a * x, elementwise: the smallest op with a parameter-free backward.
inline Tensor scale(Tape& tape, const Tensor& x, float a) {
  const Tensor y = tape.empty(x.shape(), x.dtype(), "scale");
  for (std::int64_t i = 0; i < x.numel(); ++i) y.data<float>()[i] = a * x.data<float>()[i];
  tape.record("scale", y, [&tape, x, a](const Tensor& dy) {
    if (const GradTarget dx = tape.grad_target(x)) {
      for (std::int64_t i = 0; i < x.numel(); ++i) {
        float& d = dx.dst.data<float>()[i];
        d = (dx.accumulate ? d : 0) + a * dy.data<float>()[i];
      }
    }
  });
  return y;
}

// y = x + w.
inline Tensor add_parameter(Tape& tape, const Tensor& x, Parameter& w) {
  const Tensor value = tape.use(w);
  const Tensor y = tape.empty(x.shape(), x.dtype(), "add_parameter");
  for (std::int64_t i = 0; i < x.numel(); ++i)
    y.data<float>()[i] = x.data<float>()[i] + value.data<float>()[i];
  tape.record("add_parameter", y, [&tape, x, &w](const Tensor& dy) {
    if (const GradTarget dw = tape.grad_target(w)) assign_or_add(dw.dst, dy, dw.accumulate);
    tape.pass_grad(x, dy);
  });
  return y;
}

inline Tensor add(Tape& tape, const Tensor& a, const Tensor& b) {
  const Tensor y = tape.empty(a.shape(), a.dtype(), "add");
  for (std::int64_t i = 0; i < a.numel(); ++i)
    y.data<float>()[i] = a.data<float>()[i] + b.data<float>()[i];
  tape.record("add", y, [&tape, a, b](const Tensor& dy) {
    tape.pass_grad(a, dy);
    tape.pass_grad(b, dy);
  });
  return y;
}

struct LoggingHooks : RegionHooks {
  std::vector<std::string>* log;
  explicit LoggingHooks(std::vector<std::string>* l) : log(l) {}
  void before_forward(const Block& b, const Tape&) override { log->push_back("+f " + b.name); }
  void after_forward(const Block& b, const Tape&, bool has_ops) override {
    log->push_back((has_ops ? "-f " : "-f, no op: ") + b.name);
  }
  void before_backward(const Block& b, const Tape&) override { log->push_back("+b " + b.name); }
  void after_backward(const Block& b, const Tape&) override { log->push_back("-b " + b.name); }
};

class TapeTest : public ::testing::Test {
 protected:
  Tensor input(std::vector<float> values) {
    return Tensor::from<float>(memory, {static_cast<std::int64_t>(values.size())}, values, "x");
  }
  Memory memory;
  Tape tape{memory, Stream::inline_cpu("compute")};
};

}  // namespace tessera::engine
