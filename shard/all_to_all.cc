#include "shard/all_to_all.h"

#include <string>

namespace tessera::shard {

using comm::ProcessGroup;
using engine::Tape;
using engine::Tensor;

namespace {

// The group keeps no tensor alive until its work is done, so work that does follows it.
Tensor exchange(Tape& tape, ProcessGroup& group, const Tensor& x, const std::string& label) {
  const Tensor y = tape.empty(x.shape(), x.dtype(), "all_to_all");
  group.all_to_all(x, y, tape.stream(), label);
  tape.stream().launch({.name = "all_to_all.done", .detail = label}, [x, y] {});
  return y;
}

}  // namespace

Tensor all_to_all(Tape& tape, ProcessGroup& group, const Tensor& x, std::string_view label) {
  if (group.size() == 1) return x;
  const std::string name(label);
  const Tensor y = exchange(tape, group, x, name);
  if (!tape.needs_grad(x)) return y;
  tape.record("all_to_all", y, [&tape, &group, x = x.without_data(), name](const Tensor& dy) {
    tape.pass_grad(x, exchange(tape, group, dy, name + " backward"));
  });
  return y;
}

}  // namespace tessera::shard
