#include "shard/parameter_store.h"

#include <fmt/format.h>

#include "engine/copy.h"
#include "engine/elementwise.h"

namespace tessera::shard {

using engine::Category;
using engine::DType;
using engine::Tensor;

namespace {

// Among whom the owned parts of one wire copy are cut.
comm::ProcessGroup* update_group(const Mesh& mesh, const Flat& flat) {
  if (flat.owned == flat.parameter_range) return nullptr;
  const bool whole = flat.parameter_range.numel == flat.layout.flat_numel();
  return whole ? mesh.group_of(flat.owner) : mesh.gather().replicate;
}

}  // namespace

ParameterStore::ParameterStore(const StoreContext& context, const Flat& flat,
                               const std::shared_ptr<engine::Buffer>& gathered,
                               std::int64_t offset_nbytes)
    : name_(context.name),
      mesh_(context.mesh),
      gather_(context.gather),
      is_cut_(context.placement.parameters != Place::kWhole),
      update_(update_group(context.mesh, flat)) {
  const engine::Shape whole{flat.layout.flat_numel()};
  wire_ = Tensor::empty(context.memory, {flat.parameter_range.numel}, context.dtype,
                        name_ + ".wire", Category::kParameterShard);
  own_wire_ = wire_.slice(flat.owned.begin - flat.parameter_range.begin, {flat.owned.numel});
  const bool is_wire = context.dtype == DType::kF32 || !flat.trainable;
  master_ = is_wire ? own_wire_
                    : Tensor::empty(context.memory, {flat.owned.numel}, DType::kF32,
                                    name_ + ".master", Category::kParameterShard);
  whole_ = is_cut_ ? Tensor(gathered, offset_nbytes, whole, context.dtype) : wire_;
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
  const Tensor& part = has_kept_ ? kept_ : wire_;
  gather_.wait(updated_);
  if (group == nullptr) {
    engine::copy(whole_, part, gather_, "unshard");
  } else {
    group->all_gather(part, whole_, gather_, fmt::format("{} {}", name_, why));
  }
  ready_ = gather_.record("gathered");
}

void ParameterStore::keep(const engine::Stream& compute,
                          const std::shared_ptr<engine::Buffer>& slot) {
  if (!kept_.defined() || has_kept_) return;
  const Tensor in_slot(slot, whole_.key().offset_nbytes, whole_.shape(), whole_.dtype());
  engine::copy(kept_, in_slot.slice(kept_begin_, kept_.shape()), compute, "keep");
  has_kept_ = true;
  updated_ = compute.record("kept");
}

void ParameterStore::renew(const engine::Stream& stream) {
  drop_kept();
  if (own_wire_.dtype() != master_.dtype()) {
    engine::launch_assign_or_add(stream, own_wire_, master_, false, "cast", name_);
  }
  updated_ = stream.record("updated");
  if (!is_cut_) ready_ = updated_;
}

void ParameterStore::gather_renewed() {
  if (update_ == nullptr) return;
  gather_.wait(updated_);
  update_->all_gather(own_wire_, wire_, gather_, name_ + " update");
  updated_ = gather_.record("refreshed");
  if (!is_cut_) ready_ = updated_;
}

}  // namespace tessera::shard
