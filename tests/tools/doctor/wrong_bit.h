// A wrong value in what ranks send each other.
#pragma once

#include <functional>
#include <memory>

#include "comm/forwarding_group.h"
#include "comm/process_group.h"
#include "engine/stream.h"
#include "tools/doctor/self_test.h"

namespace tessera::tools {

/// Changes the last element, an f32, that rank 1 sends in collectives of one kind. On the CPU and
/// on GPUs.
class WrongBit final : public comm::ForwardingGroup {
 public:
  /// `inner` outlives this.
  WrongBit(comm::ProcessGroup& inner, comm::Collective::Op op) : ForwardingGroup(inner), op_(op) {}

 private:
  void before(const comm::Collective& c, const engine::Stream& stream) override {
    if (c.op != op_ || rank() != 1) return;
    stream.synchronize();
    const float wrong = 100;  // no value of the test
    c.in.slice(c.in.numel() - 1, {1}).copy_from_host(&wrong, 1);
  }
  std::unique_ptr<ProcessGroup> make_part(int, int) override { return nullptr; }

  const comm::Collective::Op op_;
};

/// Lets every rank run between WrongBits.
inline Wrap with_wrong_bit(comm::Collective::Op op) {
  return [op](comm::ProcessGroup& world, const std::function<void(comm::ProcessGroup&)>& run) {
    WrongBit wrong(world, op);
    run(wrong);
  };
}

}  // namespace tessera::tools
