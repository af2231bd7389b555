#include "ops/add.h"

#include "ops/pointwise.h"

namespace tessera::ops {

using engine::Tape;
using engine::Tensor;
using engine::to_f32;

Tensor add(Tape& tape, const Tensor& a, const Tensor& b) {
  engine::require(a.shape() == b.shape() && a.dtype() == b.dtype(),
                  "[add] expected two tensors alike, got {} {} and {} {} ({}, {})",
                  name_of(a.dtype()), a.shape().str(), name_of(b.dtype()), b.shape().str(),
                  a.name(), b.name());
  const bool wants_da = tape.needs_grad(a), wants_db = tape.needs_grad(b);
  const Tensor y = tape.empty(a.shape(), a.dtype(), "add");
  tape.stream().launch(
      {.name = "add.forward",
       .flops = static_cast<double>(y.numel()),
       .bytes_read = a.nbytes() + b.nbytes(),
       .bytes_written = y.nbytes()},
      [=] {
        engine::dispatch_float(y.dtype(), "add", [&](auto t) {
          using T = decltype(t);
          write_elements(y.data<T>(), y.numel(), false,
                         [a = a.data<T>(), b = b.data<T>()](std::int64_t i) {
                           return to_f32(a[i]) + to_f32(b[i]);
                         });
        });
      },
      [=](const auto& stream) { add_cuda(stream, y, a, b); });
  if (!wants_da && !wants_db) return y;
  tape.record("add", y, [&tape, a = a.without_data(), b = b.without_data()](const Tensor& dy) {
    tape.pass_grad(a, dy);
    tape.pass_grad(b, dy);
  });
  return y;
}

}  // namespace tessera::ops
