// Ranks that run a function of Python, as threads of this process or as it was started by a
// launcher.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <vector>

#include "comm/process_group.h"

namespace tessera::python {

class Model;

/// This rank, until the function that it was given to returns: what Python keeps of it afterwards
/// can do nothing.
class World {
 public:
  World(comm::ProcessGroup& group, int num_threads) : num_threads(num_threads), group_(&group) {}

  /// Throws InvalidArgument once its function has returned.
  comm::ProcessGroup& group() const;
  void add(std::weak_ptr<Model> user) { users_.push_back(std::move(user)); }
  /// Keeps `model`, whose checkpoints may be written when nobody else has it any more.
  void keep(std::shared_ptr<Model> model) { saving_.push_back(std::move(model)); }
  /// Collective. Waits for what is being saved.
  void finish();
  /// Closes what uses the group.
  void end();

  const int num_threads;  // ranks of this process

 private:
  comm::ProcessGroup* group_;
  std::vector<std::weak_ptr<Model>> users_;
  std::vector<std::shared_ptr<Model>> saving_;
};

/// Calls `fn(world)` on `num_threads` ranks of this process, each in a thread of its own, and
/// returns their results in the order of ranks. Of processes that torchrun, an MPI or Slurm has
/// started, all ranks are one world. What is being saved when `fn` returns is waited for. Throws as
/// Ranks::choose() and find_launch() do, what the first failed rank has thrown, and what a handler
/// of a signal throws meanwhile: the ranks are interrupted by KeyboardInterrupt then.
pybind11::list run(const pybind11::function& fn, int num_threads, double deadline_s);

}  // namespace tessera::python
