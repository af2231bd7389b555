#include "shard/cut_values.h"

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "engine/copy.h"
#include "engine/elementwise.h"
#include "engine/error.h"

namespace tessera::shard {

using engine::Category;
using engine::DType;
using engine::Parameter;
using engine::require;
using engine::Tensor;

Tensor CutValues::whole(const Location& at, const SplitTensor& owned) {
  const UnitContext& context = fsdp_.context_;
  const engine::Stream& compute = fsdp_.compute_;
  const auto& [flat, index] = at;
  const Parameter& p = *flat.parameters[index];
  const auto workspace = [&](const engine::Shape& shape, DType dtype) {
    return Tensor::empty(context.memory, shape, dtype, p.name, Category::kWorkspace);
  };
  const Tensor whole = workspace(p.shape, DType::kF32);
  if (context.offload != nullptr) context.offload->synchronize();  // the host may still write
  for (const Segment& s : flat.segments) {
    if (s.parameter != index) continue;
    const SplitTensor home = owned.slice(s.shard_begin, s.numel);
    Tensor part = home.device();
    if (home.has_host()) {
      part = workspace({s.numel}, owned.dtype());
      copy(part, home, compute, "copy");
    }
    engine::launch_assign_or_add(compute, whole.slice(s.parameter_begin, {s.numel}), part, false,
                                 "copy", p.name);
  }
  if (comm::ProcessGroup* group = context.mesh.group_of(flat.owner)) {
    fsdp_.within(compute, [&, &flat = flat, index = index] {
      for (int part = 0; part < group->size(); ++part) {
        for (const Segment& s : flat.layout.segments(flat.layout.part(part, group->size()))) {
          if (s.parameter != index) continue;
          group->broadcast(whole.slice(s.parameter_begin, {s.numel}),
                           context.mesh.owner(flat.owner, part), context.gather, p.name);
        }
      }
    });
  }
  return whole;
}

std::vector<float> CutValues::full(const Location& at, const SplitTensor& owned) {
  const Tensor all = whole(at, owned);
  fsdp_.compute_.synchronize();
  std::vector<float> values = engine::to_vector<float>(all);
  // An aborted broadcast ends without an error.
  if (fsdp_.compute_.device().is_cuda()) fsdp_.group_.check();
  return values;
}

void CutValues::load(const Location& at, const SplitTensor& owned, std::span<const float> values) {
  const SplitTensor& master = at.flat.master;
  const bool is_master = owned.device().buffer() == master.device().buffer() &&
                         owned.host().buffer() == master.host().buffer();
  const Part part = part_of(*at.flat.parameters[at.index], values);
  is_master ? load_master(at, part) : write(at, owned, part);
}

CutValues::Part CutValues::part_of(const Parameter& p, std::span<const float> values) {
  check_numel(p, values);
  return [values](Range elements) {
    return values.subspan(static_cast<std::size_t>(elements.begin),
                          static_cast<std::size_t>(elements.numel));
  };
}

void CutValues::load_master(const Location& at, const Part& part) {
  check_at_rest("load");
  for (const auto& unit : fsdp_.units_) {  // first, as `part` may throw when some is written
    for (const Flat& flat : unit->flats()) {
      if (&flat == &at.flat) mark_stale(*unit);
    }
  }
  write(at, at.flat.master, part);
}

void CutValues::write(const Location& at, const SplitTensor& owned, const Part& part) {
  settle();
  for (const Segment& s : at.flat.segments) {
    if (s.parameter != at.index) continue;
    copy_from_floats(owned.slice(s.shard_begin, s.numel), part({s.parameter_begin, s.numel}));
  }
}

void CutValues::for_each_owned(const Parameter& p, const OnPiece& fn) {
  check_at_rest("for_each_owned");
  const Location at = fsdp_.location_of(p);
  if (fsdp_.context_.offload != nullptr) fsdp_.context_.offload->synchronize();
  for_each_owned(at, at.flat.master, fn);
}

void CutValues::for_each_owned(const Location& at, const SplitTensor& owned, const OnPiece& fn) {
  for (const Segment& s : at.flat.segments) {
    if (s.parameter != at.index) continue;
    const SplitTensor piece = owned.slice(s.shard_begin, s.numel);
    std::int64_t begin = s.parameter_begin;
    for (const Tensor* values : {&piece.device(), &piece.host()}) {
      if (!values->defined() || values->numel() == 0) continue;
      fn({begin, values->numel()}, *values);
      begin += values->numel();
    }
  }
}

void CutValues::wait_until_read() { fsdp_.wait_for_readers(); }

void CutValues::settle() {
  fsdp_.context_.gather.synchronize();
  fsdp_.compute_.synchronize();
  if (fsdp_.context_.offload != nullptr) fsdp_.context_.offload->synchronize();
  for (const engine::Event& read : fsdp_.values_read_) read.wait();
}

void CutValues::check_at_rest(std::string_view caller) {
  fsdp_.check_whole(caller);
  require(fsdp_.phase_ != Fsdp::Phase::kStep,
          "[{}] expected finish_step() or cancel_step() before, got a step", caller);
  fsdp_.check_not_held(caller);
  fsdp_.schedule_.close_visits(fsdp_.compute_);
  for (const auto& unit : fsdp_.units_) {
    require(!unit->in_use(),
            "[{}] expected no open region, got one whose parameters are in use ({})", caller,
            unit->name());
  }
}

std::shared_ptr<const void> CutValues::hold(std::string_view holder) {
  fsdp_.holder_ = holder;
  return {&fsdp_, [&fsdp = fsdp_](const void*) { fsdp.holder_.clear(); }};
}

void CutValues::check_numel(const Parameter& p, std::span<const float> values) {
  require(static_cast<std::int64_t>(values.size()) == p.shape.numel(),
          "[fsdp] expected {} values for {}, got {} ({})", p.shape.numel(), p.shape, values.size(),
          p.name);
}

void CutValues::keep_until(engine::Event read) {
  std::erase_if(fsdp_.values_read_, [](const engine::Event& other) { return other.reached(); });
  fsdp_.values_read_.push_back(std::move(read));
}

void CutValues::mark_stale(Unit& unit) { fsdp_.schedule_.mark_stale(unit); }

}  // namespace tessera::shard
