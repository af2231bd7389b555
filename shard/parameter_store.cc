#include "shard/parameter_store.h"

#include <fmt/format.h>

#include "engine/copy.h"
#include "engine/elementwise.h"

namespace tessera::shard {

using engine::Category;
using engine::DType;
using engine::Event;
using engine::Stream;
using engine::Tensor;

namespace {

// Among whom the owned parts of one wire copy are cut, in the order in which gathers make it whole.
std::vector<comm::ProcessGroup*> update_groups(const Mesh& mesh, const Flat& flat) {
  if (flat.owned == flat.parameter_range) return {};
  const bool is_whole = flat.parameter_range.numel == flat.layout.flat_numel();
  return is_whole ? mesh.gathers_of(flat.owner) : std::vector{mesh.gather().replicate};
}

}  // namespace

ParameterStore::ParameterStore(const StoreContext& context, const Flat& flat,
                               const std::shared_ptr<engine::Buffer>& gathered,
                               std::int64_t offset_nbytes)
    : name_(context.name),
      mesh_(context.mesh),
      gather_(context.gather),
      is_cut_(context.placement.parameters != Place::kWhole),
      updates_(update_groups(context.mesh, flat)),
      offload_(context.offload),
      own_begin_(flat.parameter_range.begin),
      own_{flat.owned.begin - flat.parameter_range.begin, flat.owned.numel} {
  const engine::Shape whole{flat.layout.flat_numel()};
  // What peers renew, or compute reads, stays on the device.
  const bool is_only_gathered = is_cut_ && flat.owned == flat.parameter_range;
  const auto make = [&](std::int64_t numel, bool offloads, DType dtype, const char* what) {
    return SplitTensor::empty(context.memory, context.host_memory, numel,
                              offloads ? context.host_fraction : 0, dtype, name_ + what,
                              Category::kParameterShard);
  };
  wire_ = make(flat.parameter_range.numel, is_only_gathered, context.dtype, ".wire");
  own_wire_ = wire_.slice(own_.begin, own_.numel);
  const bool is_wire = context.dtype == DType::kF32 || !flat.trainable;
  master_ = is_wire ? own_wire_ : make(flat.owned.numel, true, DType::kF32, ".master");
  if (master_.has_host() && !own_wire_.has_host()) {
    sent_up_ = Tensor::empty(context.host_memory, master_.host().shape(), context.dtype,
                             name_ + ".sent_up", Category::kParameterShard);
  }
  whole_ = is_cut_ ? Tensor(gathered, offset_nbytes, whole, context.dtype) : wire_.device();
  if (const comm::ProcessGroup* group = mesh_.reshard(); group != nullptr && context.keeps) {
    const Range kept = flat.layout.part(group->rank(), group->size());
    kept_begin_ = kept.begin;
    kept_ = Tensor::empty(context.memory, {kept.numel}, context.dtype, name_ + ".kept",
                          Category::kGatheredParameter);
  }
}

void ParameterStore::unshard(std::string_view why) {
  if (!is_cut_) return;
  comm::ProcessGroup* group = has_kept_ ? mesh_.reshard() : mesh_.gather().shard;
  Tensor part = has_kept_ ? kept_ : wire_.device();
  if (!has_kept_ && wire_.has_host()) {
    part = whole_.slice(own_begin_, {wire_.numel()});
    for (const Event& event : updated_) offload_->fetch().wait(event);
    copy(part, wire_, offload_->fetch(), "fetch");
    gather_.wait(offload_->fetch().record("fetched"));
  } else {
    for (const Event& event : updated_) gather_.wait(event);
    if (group == nullptr) engine::copy(whole_, part, gather_, "unshard");
  }
  if (group != nullptr) group->all_gather(part, whole_, gather_, fmt::format("{} {}", name_, why));
  ready_ = {gather_.record("gathered")};
}

void ParameterStore::wait(const Stream& compute) const {
  for (const Event& event : ready_) compute.wait(event);
}

void ParameterStore::keep(const Stream& compute, const std::shared_ptr<engine::Buffer>& slot) {
  if (!kept_.defined() || has_kept_) return;
  const Tensor in_slot(slot, whole_.key().offset_nbytes, whole_.shape(), whole_.dtype());
  engine::copy(kept_, in_slot.slice(kept_begin_, kept_.shape()), compute, "keep");
  has_kept_ = true;
  updated_ = {compute.record("kept")};
}

void ParameterStore::renew(const Stream& stream, const std::vector<WrittenOnHost>& on_host) {
  drop_kept();
  updated_.clear();
  const bool casts = wire_.dtype() != master_.dtype();
  if (casts && master_.device().defined()) {
    const Tensor& master = master_.device();
    engine::launch_assign_or_add(stream, own_wire_.device().slice(0, master.shape()), master, false,
                                 "cast", name_);
  }
  if (casts && master_.has_host()) {
    renew_on_host(on_host);
  } else {
    for (const WrittenOnHost& written : on_host) updated_.push_back(written.when);
  }
  updated_.push_back(stream.record("updated"));
  if (!is_cut_) ready_ = updated_;
}

// Casts where the masters lie, and sends up what the device holds.
void ParameterStore::renew_on_host(const std::vector<WrittenOnHost>& written) {
  const Tensor& cast = sent_up_.defined() ? sent_up_ : own_wire_.host();
  for (const auto& [range, when, index] : written) {
    const Stream& host = offload_->hosts()[index];
    const std::int64_t begin = range.begin - master_.split();
    host.wait(when);
    host.wait(sent_);
    engine::launch_assign_or_add(host, cast.slice(begin, {range.numel}),
                                 master_.host().slice(begin, {range.numel}), false, "cast", name_);
    updated_.push_back(host.record("cast"));
  }
  if (!sent_up_.defined()) return;
  const Stream& up = offload_->up();
  for (const Event& event : updated_) up.wait(event);
  engine::copy(own_wire_.device().slice(master_.split(), sent_up_.shape()), sent_up_, up,
               "send up");
  sent_ = up.record("sent up");
  updated_ = {sent_};
}

void ParameterStore::gather_renewed() {
  if (updates_.empty()) return;
  for (const Event& event : updated_) gather_.wait(event);
  gather_parts(updates_, wire_.device(), own_, gather_, name_ + " update");
  updated_ = {gather_.record("refreshed")};
  if (!is_cut_) ready_ = updated_;
}

}  // namespace tessera::shard
