#include "run.h"

#include <chrono>
#include <exception>
#include <future>
#include <map>
#include <mutex>
#include <utility>

#include "comm/threads.h"
#include "engine/error.h"
#include "model.h"
#include "tools/config/train_config.h"
#include "tools/launch/cpu_wishes.h"
#include "tools/launch/launcher.h"
#include "tools/launch/processes.h"
#include "tools/launch/ranks.h"
#include "tools/machine/environment.h"

namespace tessera::python {

namespace py = pybind11;

comm::ProcessGroup& World::group() const {
  engine::require(group_ != nullptr,
                  "[python] expected a world inside the function that run() calls, got one whose "
                  "function has returned");
  return *group_;
}

void World::finish() {
  for (const auto& model : saving_) model->checkpoints().wait();
}

void World::end() {
  for (const std::weak_ptr<Model>& user : users_) {
    if (const auto model = user.lock()) model->close();
  }
  users_.clear();
  saving_.clear();
  group_ = nullptr;
}

namespace {

// Ranks at work, for who interrupts them.
class Running {
 public:
  void enter(comm::ProcessGroup& group) {
    const std::lock_guard lock(mutex_);
    threads_[&group] = PyThread_get_thread_ident();
    if (interrupted_) group.abort(kInterrupted);
  }
  void leave(comm::ProcessGroup& group) {
    const std::lock_guard lock(mutex_);
    threads_.erase(&group);
  }
  /// With the interpreter's lock.
  void interrupt() {
    const std::lock_guard lock(mutex_);
    interrupted_ = true;
    for (const auto& [group, thread] : threads_) {
      group->abort(kInterrupted);
      PyThreadState_SetAsyncExc(thread, PyExc_KeyboardInterrupt);
    }
  }

 private:
  static constexpr const char* kInterrupted = "[python] interrupted";

  std::mutex mutex_;
  std::map<comm::ProcessGroup*, unsigned long> threads_;
  bool interrupted_ = false;
};

// One rank: without the interpreter's lock, but for the function.
void run_rank(comm::ProcessGroup& group, int num_threads, Running& running, const py::function& fn,
              py::object& result) {
  // Ends, too, when something throws.
  const auto end = [&](World* ended) {
    ended->end();
    running.leave(group);
  };
  const auto world = std::make_shared<World>(group, num_threads);
  const std::unique_ptr<World, decltype(end)> entered(world.get(), end);
  running.enter(group);
  {
    const py::gil_scoped_acquire python;
    try {
      result = fn(world);
    } catch (const py::error_already_set& error) {
      // The engine tells echoes of an abort from its cause by this type and its text.
      if (error.matches(py::module_::import("tessera._engine").attr("CommError"))) {
        throw engine::CommError(py::str(error.value()));
      }
      group.abort(error.what());  // before what uses the group ends, with words of its own
      throw;
    }
  }
  world->finish();
}

}  // namespace

py::list run(const py::function& fn, int num_threads, double deadline_s) {
  engine::require(num_threads >= 1, "[python] expected at least 1 thread, got {}", num_threads);
  engine::require(deadline_s > 0 && deadline_s <= 1e9,
                  "[python] expected deadline_s above 0 and at most 1e9, got {}", deadline_s);
  tools::TrainConfig config;
  config.device = tools::DeviceChoice::kCpu;
  config.parallel.threads = num_threads;
  config.parallel.deadline_s = deadline_s;
  tools::choose_cpu_by_environment();
  const auto launch = tools::find_launch(tools::environment(), tools::LauncherChoice::kAuto);
  const auto ranks = tools::Ranks::choose(config, launch);
  std::vector<py::object> results(std::size_t(ranks.local.count));
  Running running;
  std::exception_ptr signal;
  {
    const py::gil_scoped_release released;
    std::future<void> ended = std::async(std::launch::async, [&] {
      const auto rank = [&](comm::ProcessGroup& group) {
        run_rank(group, ranks.local.count, running, fn, results[ranks.local.index(group.rank())]);
      };
      if (ranks.are_processes()) {
        tools::run_processes(config, launch, ranks.local.count, /*gpus=*/{}, {}, nullptr, rank);
      } else {
        comm::run_ranks(ranks.size, {.deadline = config.deadline()}, rank);
      }
    });
    while (ended.wait_for(std::chrono::milliseconds(50)) != std::future_status::ready) {
      if (signal) continue;
      const py::gil_scoped_acquire python;
      if (PyErr_CheckSignals() == 0) continue;
      signal = std::make_exception_ptr(py::error_already_set());
      running.interrupt();
    }
    if (!signal) ended.get();
  }
  if (signal) std::rethrow_exception(signal);
  py::list list;
  for (py::object& result : results) list.append(std::move(result));
  return list;
}

}  // namespace tessera::python
