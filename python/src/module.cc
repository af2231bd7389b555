// The extension module: what the package `tessera` is made of.
#include <fmt/format.h>
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "comm/host_gather.h"
#include "engine/error.h"
#include "model.h"
#include "run.h"

namespace tessera::python {
namespace {

namespace py = pybind11;
using released = py::call_guard<py::gil_scoped_release>;
using Optimizer = std::variant<shard::SgdOptions, shard::AdamWOptions>;

std::vector<std::vector<double>> all_gather(World& world, const std::vector<double>& values) {
  // By their bits, as there are no tensors of f64.
  const std::span<const std::int64_t> bits(reinterpret_cast<const std::int64_t*>(values.data()),
                                           values.size());
  const auto all = comm::gather_to_host<std::int64_t>(
      world.group(), bits, engine::Memory(), engine::Stream::inline_cpu("values"), "values");
  std::vector<std::vector<double>> result;
  const auto* begin = reinterpret_cast<const double*>(all.data());
  for (int r = 0; r < world.group().size(); ++r, begin += values.size()) {
    result.emplace_back(begin, begin + values.size());
  }
  return result;
}

void define_errors(py::module_& m) {
  const auto error = py::register_exception<engine::Error>(m, "Error", PyExc_RuntimeError);
  py::register_exception<engine::InvalidArgument>(m, "InvalidArgument", error);
  py::register_exception<engine::DeviceError>(m, "DeviceError", error);
  py::register_exception<engine::CommError>(m, "CommError", error);
  py::register_exception<engine::IoError>(m, "IoError", error);
}

void define_options(py::module_& m) {
  py::class_<shard::SgdOptions>(m, "Sgd", "Stochastic gradient descent.")
      .def(py::init([](double momentum) {
             return shard::SgdOptions{.momentum = momentum, .groups = {}, .updates = {}};
           }),
           py::kw_only(), py::arg("momentum") = 0.0)
      .def("__repr__",
           [](const shard::SgdOptions& o) { return fmt::format("Sgd(momentum={})", o.momentum); });
  const shard::AdamWOptions defaults;
  py::class_<shard::AdamWOptions>(
      m, "AdamW", "AdamW; weight_decay is of parameters with two or more dimensions.")
      .def(py::init([](double beta1, double beta2, double eps, double weight_decay) {
             return shard::AdamWOptions{.beta1 = beta1,
                                        .beta2 = beta2,
                                        .eps = eps,
                                        .weight_decay = weight_decay,
                                        .groups = {},
                                        .updates = {}};
           }),
           py::kw_only(), py::arg("beta1") = defaults.beta1, py::arg("beta2") = defaults.beta2,
           py::arg("eps") = defaults.eps, py::arg("weight_decay") = defaults.weight_decay)
      .def("__repr__", [](const shard::AdamWOptions& o) {
        return fmt::format("AdamW(beta1={}, beta2={}, eps={}, weight_decay={})", o.beta1, o.beta2,
                           o.eps, o.weight_decay);
      });
  m.attr("STRATEGIES") = py::tuple(py::cast(shard::Placement::preset_names()));
}

void define_model(py::module_& m) {
  using shard::Raw;
  py::enum_<Raw::For>(m, "For")
      .value("forward", Raw::For::kForward)
      .value("backward", Raw::For::kBackward)
      .value("evaluation", Raw::For::kEvaluation);
  py::class_<Model, std::shared_ptr<Model>>(m, "Model")
      .def(py::init([](const std::shared_ptr<World>& world, std::vector<BlockSpec> blocks,
                       std::optional<BlockSpec> root, const Optimizer& optimizer,
                       const py::kwargs& options) {
        return Model::make(world,
                           {std::move(blocks), std::move(root), optimizer, options_of(options)});
      }))
      .def(
          "begin_step",
          [](Model& s, int n, std::optional<std::int64_t> weight) {
            s.fsdp().begin_step(n, {.weight = weight});
          },
          released())
      .def(
          "next_micro_step",
          [](Model& s, std::optional<std::int64_t> weight) {
            s.fsdp().next_micro_step({.weight = weight});
          },
          released())
      .def("gather", &Model::gather, released())
      .def("release", &Model::release, released())
      .def("is_returned", &Model::is_returned)
      .def("array", &Model::array)
      .def("step", &Model::step, released())
      .def("load",
           [](Model& s, const std::string& name,
              const py::array_t<float, py::array::c_style>& values) {
             const std::span<const float> all(values.data(), std::size_t(values.size()));
             const py::gil_scoped_release no_python;
             s.fsdp().load(s.parameter(name), all);
           })
      .def("full_parameter",
           [](Model& s, const std::string& name) {
             const std::vector<float> values = [&] {
               const py::gil_scoped_release no_python;
               return s.fsdp().full_parameter(s.parameter(name));
             }();
             return py::array_t<float>(static_cast<py::ssize_t>(values.size()), values.data());
           })
      .def("keep_gathered",
           [](Model& s, const py::function& fn) {
             const py::gil_scoped_release no_python;
             s.fsdp().keep_gathered([&] {
               const py::gil_scoped_acquire python;
               fn();
             });
           })
      .def("plan", [](Model& s) { return s.fsdp().plan(); })
      .def("peak_nbytes", [](Model& s) { return s.memory().stats().peak_total_nbytes; })
      .def("open_checkpoints", &Model::open_checkpoints, released())
      .def(
          "save",
          [](Model& s, std::int64_t step, const std::map<std::string, std::string>& values) {
            s.checkpoints().save(step, values);
          },
          released())
      .def(
          "poll", [](Model& s) { return s.checkpoints().poll(); }, released())
      .def(
          "wait", [](Model& s) { return s.checkpoints().wait(); }, released())
      .def("load_checkpoint", [](Model& s, const std::string& path) -> py::object {
        std::optional<shard::LoadedCheckpoint> loaded;
        {
          const py::gil_scoped_release no_python;
          loaded = path.empty() ? s.checkpoints().load_newest() : s.checkpoints().load(path);
        }
        if (!loaded) return py::none();
        return py::dict(py::arg("path") = loaded->path, py::arg("step") = loaded->step,
                        py::arg("values") = loaded->values);
      });
  m.def("plan",
        [](int rank, int num_ranks, std::vector<BlockSpec> blocks, std::optional<BlockSpec> root,
           const Optimizer& optimizer, const py::kwargs& options) {
          return plan({std::move(blocks), std::move(root), optimizer, options_of(options)}, rank,
                      num_ranks);
        });
}

PYBIND11_MODULE(_engine, m) {
  static_cast<void>(py::dtype::of<float>());  // loads NumPy here, and not in ranks at once
  define_errors(m);
  define_options(m);
  py::class_<World, std::shared_ptr<World>>(m, "World", "The ranks that run() has started.")
      .def_property_readonly("rank", [](const World& w) { return w.group().rank(); })
      .def_property_readonly("size", [](const World& w) { return w.group().size(); })
      .def_readonly("threads", &World::num_threads, "How many ranks are threads of this process.")
      .def_property_readonly("sent_nbytes",
                             [](const World& w) { return w.group().traffic().bytes_sent; })
      .def("all_gather", &all_gather, released(), py::arg("values"),
           "Every rank's list of numbers, rank by rank. Collective: each gives as many.")
      .def(
          "barrier", [](const World& w) { w.group().barrier("barrier"); }, released(),
          "Returns once every rank is here.");
  define_model(m);
  m.def("run", &run);
  m.attr("knows_numpy_2") = PYBIND11_VERSION_HEX >= 0x020C0000;
}

}  // namespace
}  // namespace tessera::python
