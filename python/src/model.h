// A model of Python's own, as parameters by block, sharded by shard::Fsdp without a tape.
#pragma once

#include <pybind11/numpy.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "engine/memory.h"
#include "run.h"
#include "shard/checkpoint/checkpointer.h"
#include "shard/fsdp.h"
#include "shard/optimizer/adamw.h"
#include "shard/optimizer/sgd.h"
#include "shard/raw.h"

namespace tessera::python {

/// Name, shape, and whether it is trained.
using ParameterSpec = std::tuple<std::string, std::vector<std::int64_t>, bool>;
using BlockSpec = std::pair<std::string, std::vector<ParameterSpec>>;

struct ModelSpec {
  std::vector<BlockSpec> blocks;
  std::optional<BlockSpec> root;
  std::variant<shard::SgdOptions, shard::AdamWOptions> optimizer;
  shard::FsdpOptions options;
};

/// Named as Python names them. Throws InvalidArgument for a name or value that there is not.
shard::FsdpOptions options_of(const pybind11::kwargs& named);

class Model : public std::enable_shared_from_this<Model> {
 public:
  /// Collective. `group` may be one of ranks that are not there.
  Model(comm::ProcessGroup& group, const engine::Memory& memory, const engine::Stream& compute,
        const ModelSpec& spec);
  /// On the CPU, until `world` ends: then close() is called.
  static std::shared_ptr<Model> make(const std::shared_ptr<World>& world, const ModelSpec& spec);

  // All throw InvalidArgument once the model is closed.

  shard::Fsdp& fsdp();
  engine::Parameter& parameter(const std::string& name) { return *by_name_.at(name); }
  /// Throws InvalidArgument also for a block that release() has not returned from.
  void gather(const std::string& block, shard::Raw::For what);
  /// Whether nobody has what array() gave of a block that is gathered.
  bool is_returned(const std::string& block) const { return leases_.at(block).use_count() == 1; }
  /// Ends what gather() began. Throws InvalidArgument unless is_returned().
  void release(const std::string& block, shard::Raw::For what);
  /// The memory of a parameter, "block.parameter", of a gathered block, or of its gradient: f32, or
  /// the bits of bf16 as int16. A gradient is zeros, or what earlier passes of the step have added
  /// up. Throws InvalidArgument for the gradient of a frozen parameter.
  pybind11::array array(const std::string& block, const std::string& parameter, bool is_grad);
  /// The norm of the mean gradient over ranks and micro-steps, with which the update was made.
  float step(double lr, double max_norm);
  /// Collective, once.
  void open_checkpoints(World& world, const std::string& folder, int keep, bool async);
  shard::Checkpointer& checkpoints();
  /// A step as a plan makes it, which computes nothing.
  void run_empty_step();

  const engine::Memory& memory() const { return memory_; }
  void close();

 private:
  engine::Block& add(const BlockSpec& spec);
  engine::Block& block(const std::string& name);

  comm::ProcessGroup& group_;
  engine::Memory memory_;
  std::vector<std::unique_ptr<engine::Parameter>> parameters_;
  std::vector<std::unique_ptr<engine::Block>> blocks_;  // the root last
  std::map<std::string, engine::Parameter*> by_name_;
  bool has_root_ = false;
  std::unique_ptr<shard::Fsdp> fsdp_;
  std::unique_ptr<shard::Optimizer> optimizer_;
  std::unique_ptr<shard::Raw> raw_;
  std::unique_ptr<shard::Checkpointer> checkpoints_;
  std::map<std::string, std::shared_ptr<const int>> leases_;  // of arrays of blocks at work
};

/// What a step takes of rank `rank` of `num_ranks` that are not there: bytes, by category, sent and
/// kept, collectives, and Fsdp::plan().
pybind11::dict plan(const ModelSpec& spec, int rank, int num_ranks);

}  // namespace tessera::python
