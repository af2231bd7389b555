#include "model.h"

#include <fmt/format.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <functional>
#include <span>
#include <string_view>

#include "comm/meta.h"
#include "engine/error.h"
#include "engine/meta.h"

namespace tessera::python {

namespace py = pybind11;
using engine::Block;
using engine::DType;
using engine::Parameter;
using engine::require;
using shard::Raw;

namespace {

DType dtype_of(std::string_view name) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    if (engine::name_of(dtype) == name) return dtype;
  }
  engine::fail("expected f32 or bf16, got {}", name);
}

template <class T>
std::function<void(py::handle)> into(T& value, std::int64_t min) {
  return [&value, min](py::handle given) {
    const auto whole = given.cast<std::int64_t>();
    require(whole >= min, "expected at least {}, got {}", min, whole);
    value = static_cast<T>(whole);
  };
}

}  // namespace

shard::FsdpOptions options_of(const py::kwargs& named) {
  shard::FsdpOptions options;
  int shard_ranks = 0;
  const auto dtype = [](DType& value) {
    return [&value](py::handle given) { value = dtype_of(given.cast<std::string>()); };
  };
  const std::map<std::string, std::function<void(py::handle)>> known = {
      {"strategy",
       [&](py::handle given) {
         options.placement = shard::Placement::preset(given.cast<std::string>());
       }},
      {"shard_ranks", into(shard_ranks, 1)},
      {"prefetch", into(options.prefetch, 0)},
      {"reductions_in_flight", into(options.reductions_in_flight, 0)},
      {"unit_min_numel", into(options.unit_min_numel, 0)},
      {"bucket_nbytes", into(options.bucket_nbytes, 0)},
      {"param_dtype", dtype(options.precision.param)},
      {"reduce_dtype", dtype(options.precision.reduce)},
      {"grad_dtype", dtype(options.precision.accumulate)},
  };
  for (const auto& [key, value] : named) {
    const auto name = key.cast<std::string>();
    const auto found = known.find(name);
    if (found == known.end()) {
      std::vector<std::string_view> names;
      for (const auto& entry : known) names.push_back(entry.first);
      engine::fail("[python] expected one of {}, got {}", fmt::join(names, ", "), name);
    }
    const std::string text = py::repr(value);
    try {
      found->second(value);
    } catch (const py::cast_error&) {
      engine::fail("[python] expected a value of the kind of {}, got {}", name, text);
    } catch (const engine::InvalidArgument& error) {
      engine::fail("[python] {} ({}={})", error.what(), name, text);
    }
  }
  if (shard_ranks > 0) options.placement.shard_ranks = shard_ranks;
  return options;
}

Model::Model(comm::ProcessGroup& group, const engine::Memory& memory, const engine::Stream& compute,
             const ModelSpec& spec)
    : group_(group), memory_(memory), has_root_(spec.root.has_value()) {
  std::vector<Block*> blocks;
  for (const BlockSpec& block : spec.blocks) blocks.push_back(&add(block));
  Block* root = has_root_ ? &add(*spec.root) : nullptr;
  fsdp_ = std::make_unique<shard::Fsdp>(group, memory, compute, blocks, root, spec.options);
  if (const auto* sgd = std::get_if<shard::SgdOptions>(&spec.optimizer)) {
    optimizer_ = std::make_unique<shard::Sgd>(*fsdp_, *sgd);
  } else {
    optimizer_ =
        std::make_unique<shard::AdamW>(*fsdp_, std::get<shard::AdamWOptions>(spec.optimizer));
  }
  raw_ = std::make_unique<Raw>(*fsdp_);
}

Block& Model::add(const BlockSpec& spec) {
  Block& block = *blocks_.emplace_back(std::make_unique<Block>());
  block.name = spec.first;
  for (const auto& [name, shape, trainable] : spec.second) {
    Parameter& parameter = *parameters_.emplace_back(std::make_unique<Parameter>());
    parameter.name = spec.first + "." + name;
    parameter.shape = engine::Shape(std::span<const std::int64_t>(shape));
    parameter.trainable = trainable;
    by_name_[parameter.name] = &parameter;
    block.parameters.push_back(&parameter);
  }
  return block;
}

std::shared_ptr<Model> Model::make(const std::shared_ptr<World>& world, const ModelSpec& spec) {
  const py::gil_scoped_release released;
  // Its end may wait for other ranks, which may wait for the interpreter.
  const auto destroy = [](Model* model) {
    if (PyGILState_Check() == 0) return delete model;
    const py::gil_scoped_release no_python;
    delete model;
  };
  std::shared_ptr<Model> model(
      new Model(world->group(), engine::Memory(), engine::Stream::inline_cpu("compute"), spec),
      destroy);
  world->add(model);
  return model;
}

shard::Fsdp& Model::fsdp() {
  require(fsdp_ != nullptr,
          "[python] expected a model inside the function that run() calls, got one whose function "
          "has returned");
  return *fsdp_;
}

Block& Model::block(const std::string& name) {
  static_cast<void>(fsdp());  // or throws
  return **std::ranges::find(blocks_, name, [](const auto& b) { return b->name; });
}

void Model::gather(const std::string& block, Raw::For what) {
  Block& b = this->block(block);
  require(!leases_.contains(block),
          "[python] expected a block whose function has returned, and of which nothing was kept, "
          "got {} again",
          block);
  raw_->gather(b, what);
  leases_[block] = std::make_shared<const int>(0);
}

void Model::release(const std::string& block, Raw::For what) {
  Block& b = this->block(block);
  require(is_returned(block),
          "[python] expected no array of a parameter or gradient after the function of its block, "
          "as that memory is used for others; got one that was kept: copy what you need later "
          "({})",
          block);
  leases_.erase(block);
  if (what == Raw::For::kBackward) return raw_->grad_ready(b);
  raw_->release(b);
}

py::array Model::array(const std::string& block, const std::string& name, bool is_grad) {
  Parameter& p = parameter(name);
  const auto lent = leases_.find(block);
  require(fsdp_ != nullptr && lent != leases_.end(),
          "[python] expected {} in the function of its block", name);
  engine::Tensor tensor = p.value;
  if (is_grad) {
    const engine::GradTarget target = raw_->grad(p);
    require(bool(target), "[python] expected a parameter that is trained, got {}", name);
    tensor = target.dst;
    if (!target.accumulate) std::memset(tensor.raw(), 0, std::size_t(tensor.nbytes()));
  }
  // What is made of the array keeps it, it keeps its base, and that the lease and the memory.
  using Lent = std::pair<std::shared_ptr<const int>, engine::Tensor>;
  const py::capsule base(new Lent(lent->second, tensor),
                         [](void* kept) { delete static_cast<Lent*>(kept); });
  std::vector<std::int64_t> shape;
  for (int i = 0; i < tensor.shape().rank(); ++i) shape.push_back(tensor.dim(i));
  const bool is_f32 = tensor.dtype() == DType::kF32;
  return {is_f32 ? py::dtype::of<float>() : py::dtype::of<std::int16_t>(), shape, tensor.raw(),
          base};
}

float Model::step(double lr, double max_norm) {
  static_cast<void>(fsdp());  // or throws
  return raw_->step(*optimizer_, lr, max_norm).value();
}

void Model::open_checkpoints(World& world, const std::string& folder, int keep, bool async) {
  std::vector<shard::CheckpointPart> parts = {{&fsdp(), optimizer_.get()}};
  require(checkpoints_ == nullptr, "[python] expected one Checkpointer of an Fsdp, got another");
  const auto warn = [](std::string_view text) { fmt::print(stderr, "warning: {}\n", text); };
  checkpoints_ = std::make_unique<shard::Checkpointer>(
      group_, std::move(parts),
      shard::CheckpointerOptions{.folder = folder, .keep = keep, .async = async, .warn = warn});
  world.keep(shared_from_this());
}

shard::Checkpointer& Model::checkpoints() {
  static_cast<void>(fsdp());  // or throws
  require(checkpoints_ != nullptr, "[python] expected a Checkpointer that could be made, got none");
  return *checkpoints_;
}

void Model::run_empty_step() {
  Block* const root = has_root_ ? blocks_.back().get() : nullptr;
  const std::size_t num_inner = blocks_.size() - (has_root_ ? 1 : 0);
  const auto end_backward = [&](Block& block) {
    for (Parameter* p : block.parameters) static_cast<void>(raw_->grad(*p));
    raw_->grad_ready(block);
  };
  fsdp_->begin_step();
  if (root != nullptr) raw_->gather(*root, Raw::For::kForward);
  for (std::size_t i = 0; i < num_inner; ++i) {
    raw_->gather(*blocks_[i], Raw::For::kForward);
    raw_->release(*blocks_[i]);
  }
  if (root != nullptr) {
    raw_->release(*root);
    raw_->gather(*root, Raw::For::kBackward);
  }
  for (std::size_t i = num_inner; i-- > 0;) {
    raw_->gather(*blocks_[i], Raw::For::kBackward);
    end_backward(*blocks_[i]);
  }
  if (root != nullptr) end_backward(*root);
  optimizer_->step(/*lr=*/1, fsdp_->finish_step(), /*max_norm=*/1);
}

void Model::close() {
  checkpoints_.reset();
  raw_.reset();
  optimizer_.reset();
  fsdp_.reset();
}

py::dict plan(const ModelSpec& spec, int rank, int num_ranks) {
  const auto world = comm::make_meta_rank(rank, num_ranks);
  const auto compute = engine::Stream::meta("compute", engine::DeviceKind::kCpu, {});
  Model model(*world, engine::Memory(compute), compute, spec);
  model.run_empty_step();  // the first has no gathers ahead
  const comm::Traffic before = world->traffic();
  model.run_empty_step();
  const engine::MemoryStats stats = model.memory().stats();
  py::dict by_category;
  for (int c = 0; c < engine::kNumCategories; ++c) {
    const std::string name(engine::name_of(static_cast<engine::Category>(c)));
    by_category[py::str(name)] = stats.peak_nbytes[std::size_t(c)];
  }
  const comm::Traffic after = world->traffic();
  return py::dict(py::arg("peak_nbytes") = stats.peak_total_nbytes,
                  py::arg("peak_nbytes_by_category") = by_category,
                  py::arg("sent_nbytes") = after.bytes_sent - before.bytes_sent,
                  py::arg("num_collectives") = after.num_collectives - before.num_collectives,
                  py::arg("plan") = model.fsdp().plan());
}

}  // namespace tessera::python
