#include "tools/doctor/self_test.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "comm/nccl.h"
#include "comm/threads.h"
#include "engine/copy.h"
#include "engine/cuda.h"
#include "engine/error.h"
#include "engine/memory.h"
#include "engine/stream.h"
#include "engine/tensor.h"
#include "tools/doctor/rate_lines.h"
#include "tools/rates/machine_rates.h"
#include "tools/rates/peak.h"
#include "tools/rates/timing.h"

namespace tessera::tools {
namespace {

using comm::ProcessGroup;
using engine::DType;
using engine::MatrixView;
using engine::Memory;
using engine::Stream;
using engine::Tensor;

constexpr std::int64_t kShardNumel = 1'000'003;  // that collectives move; no multiple of anything

// Small whole numbers, whose sums are exact: neighbours differ, and so do ranks.
float value_at(int rank, std::int64_t i) {
  return static_cast<float>((i * 7 + rank * 13 + 3) % 31 - 15);
}

std::vector<float> pattern(std::int64_t numel, int seed) {
  std::vector<float> values(static_cast<std::size_t>(numel));
  for (std::int64_t i = 0; i < numel; ++i) {
    values[static_cast<std::size_t>(i)] = value_at(seed, i) / 7.0f;
  }
  return values;
}

}  // namespace

std::string wrong_product(const Product& product, DType dtype, double unit) {
  constexpr std::int64_t kRows = 193, kInner = 257, kCols = 129;
  std::vector<float> a = pattern(kRows * kInner, 1), b = pattern(kInner * kCols, 2);
  for (std::vector<float>* values : {&a, &b}) {
    if (dtype == DType::kF32) continue;
    for (float& x : *values) x = engine::BFloat16::from_float(x).to_float();
  }
  std::vector<float> c(static_cast<std::size_t>(kRows * kCols),
                       std::numeric_limits<float>::quiet_NaN());
  product(MatrixView<const float>{a.data(), kRows, kInner, kInner},
          MatrixView<const float>{b.data(), kInner, kCols, kCols},
          MatrixView<float>{c.data(), kRows, kCols, kCols});
  for (std::int64_t row = 0; row < kRows; ++row) {
    for (std::int64_t col = 0; col < kCols; ++col) {
      double sum = 0, magnitude = 0;
      for (std::int64_t k = 0; k < kInner; ++k) {
        const double term = static_cast<double>(a[static_cast<std::size_t>(row * kInner + k)]) *
                            static_cast<double>(b[static_cast<std::size_t>(k * kCols + col)]);
        sum += term;
        magnitude += std::abs(term);
      }
      // A bound of sums in any order: Higham, "Accuracy and Stability", 3.5.
      const double bound = kInner * unit * magnitude;
      const double got = c[static_cast<std::size_t>(row * kCols + col)];
      if (std::abs(got - sum) <= bound) continue;
      return fmt::format("element ({}, {}) of a product is {}, not {}", row, col, got, sum);
    }
  }
  return "";
}

namespace {

struct RankTimes {
  std::vector<double> gather_ms, scatter_ms, copy_ms;
  std::string wrong_gather, wrong_scatter;
};

// The first element that is not what expected(i) says.
std::string first_wrong(const Tensor& tensor, int rank,
                        const std::function<float(std::int64_t)>& expected) {
  const std::vector<float> values = engine::to_vector<float>(tensor);
  for (std::int64_t i = 0; i < tensor.numel(); ++i) {
    const float got = values[static_cast<std::size_t>(i)];
    if (got == expected(i)) continue;
    return fmt::format("element {} on rank {} is {}, not {}", i, rank, got, expected(i));
  }
  return "";
}

// `numel`: of a shard. The stream is another than that of the tensors.
RankTimes run_rank(ProcessGroup& world, std::int64_t numel, const Memory& memory,
                   const Stream& stream) {
  constexpr int kNumSamples = 10;
  const int rank = world.rank(), size = world.size();
  const auto tensor = [&](std::int64_t n) {
    return Tensor::zeros(memory, {n}, DType::kF32, "self test");
  };
  const auto values = [&](std::int64_t n) {
    std::vector<float> all(static_cast<std::size_t>(n));
    for (std::int64_t i = 0; i < n; ++i) all[static_cast<std::size_t>(i)] = value_at(rank, i);
    return Tensor::from<float>(memory, {n}, all, "self test");
  };
  const Tensor shard = values(numel), gathered = tensor(numel * size);
  const Tensor whole = values(numel * size), sum = tensor(numel), copy = tensor(numel * size);
  stream.wait(memory.allocated());
  const auto timed = [&](const std::function<void()>& fn) {
    world.barrier("self test");
    const Timer timer;
    fn();
    return timer.ms();
  };
  RankTimes times;
  for (int sample = -2; sample < kNumSamples; ++sample) {  // two that do not count
    const double gather_ms = timed([&] {
      world.all_gather(shard, gathered, stream, "self test");
      stream.synchronize();
    });
    const double scatter_ms = timed([&] {
      world.reduce_scatter(whole, sum, comm::Accumulate::kNo, stream, "self test");
      stream.synchronize();
    });
    const double copy_ms = timed([&] {
      if (!memory.device().is_host()) {
        engine::copy(copy, whole, stream);
        return stream.synchronize();
      }
      std::memcpy(copy.raw(), whole.raw(), static_cast<std::size_t>(whole.nbytes()));
    });
    if (sample < 0) continue;
    times.gather_ms.push_back(gather_ms);
    times.scatter_ms.push_back(scatter_ms);
    times.copy_ms.push_back(copy_ms);
  }
  times.wrong_gather = first_wrong(gathered, rank, [&](std::int64_t i) {
    return value_at(static_cast<int>(i / numel), i % numel);
  });
  times.wrong_scatter = first_wrong(sum, rank, [&](std::int64_t i) {
    float expected = 0;
    for (int r = 0; r < size; ++r) expected += value_at(r, rank * numel + i);
    return expected;
  });
  return times;
}

Check collective_check(const char* name, bool on_gpus, const std::vector<RankTimes>& ranks,
                       std::vector<double> RankTimes::*samples, std::string RankTimes::*wrong,
                       double nbytes) {
  Check check = collective_line({.name = name,
                                 .num_ranks = ranks.size(),
                                 .nbytes = nbytes,
                                 .ms = median_of_slowest(ranks, samples),
                                 .copy_ms = median_of_slowest(ranks, &RankTimes::copy_ms)},
                                on_gpus);
  for (const RankTimes& rank : ranks) {
    if ((rank.*wrong).empty()) continue;
    return {.name = check.name,
            .verdict = Verdict::kFail,
            .found = "wrong values: " + rank.*wrong,
            .fix = on_gpus ? "do not train over NCCL here; NCCL_P2P_DISABLE=1, then "
                             "NCCL_SHM_DISABLE=1, tell whether a link between GPUs is broken; "
                             "dmesg and nvidia-smi nvlink -e count its errors"
                           : "do not train on this machine: its memory or its build is broken; "
                             "memtest, and a build from scratch, tell which"};
  }
  return check;
}

Checks collective_checks(bool on_gpus, const std::vector<RankTimes>& ranks, std::int64_t numel) {
  const double nbytes =
      sizeof(float) * static_cast<double>(numel) * static_cast<double>(ranks.size());
  return {collective_check("all_gather", on_gpus, ranks, &RankTimes::gather_ms,
                           &RankTimes::wrong_gather, nbytes),
          collective_check("reduce_scatter", on_gpus, ranks, &RankTimes::scatter_ms,
                           &RankTimes::wrong_scatter, nbytes)};
}

void run_wrapped(ProcessGroup& world, const Wrap& wrap,
                 const std::function<void(ProcessGroup&)>& run) {
  if (wrap) return wrap(world, run);
  run(world);
}

}  // namespace

Product engine_product() {
  return [](MatrixView<const float> a, MatrixView<const float> b, MatrixView<float> c) {
    engine::Products products(engine::Stream::inline_cpu("compute"));
    engine::gemm(products, engine::Memory(), a, b, c, /*accumulate=*/false);
  };
}

Check check_product(const Product& product) {
  constexpr std::int64_t kNumSamples = 5;
  Check check{.name = "product"};
  if (const std::string wrong = wrong_product(product); !wrong.empty()) {
    check.verdict = Verdict::kFail;
    check.found = "wrong values: " + wrong;
    check.fix =
        "do not train on this machine as it is; doctor with TESSERA_CPU_GEMM=eigen, or with "
        "TESSERA_CPU_ISA=v2, tells whether the library or the processor is broken";
    return check;
  }
  const double f32 = product_gflop_per_s(DType::kF32, kNumSamples);
  const double peak = settled_peak(f32, [] { return peak_gflop_per_s(kNumSamples); });
  return product_line(f32, peak, product_gflop_per_s(DType::kBF16, kNumSamples));
}

Checks check_collectives(int num_ranks, const Wrap& wrap) {
  std::vector<RankTimes> ranks(static_cast<std::size_t>(num_ranks));
  comm::run_ranks(num_ranks, {}, [&](ProcessGroup& world) {
    run_wrapped(world, wrap, [&](ProcessGroup& group) {
      ranks[static_cast<std::size_t>(world.rank())] =
          run_rank(group, kShardNumel, Memory(), Stream::worker_cpu("comm"));
    });
  });
  return collective_checks(/*on_gpus=*/false, ranks, kShardNumel);
}

Checks check_gpu_collectives(int num_gpus, std::int64_t numel, const Wrap& wrap) {
  std::vector<RankTimes> ranks(static_cast<std::size_t>(num_gpus));
  if constexpr (engine::kCudaBuilt) {
    const auto run = [&](ProcessGroup& world) {
      const Stream compute = Stream::cuda("compute", world.rank());
      run_wrapped(world, wrap, [&](ProcessGroup& group) {
        ranks[static_cast<std::size_t>(world.rank())] =
            run_rank(group, numel, Memory(compute), compute.sibling("comm"));
      });
    };
    comm::run_nccl_ranks(num_gpus, {.deadline = std::chrono::seconds(30)}, run);
  } else {
    engine::fail<engine::DeviceError>("[doctor] expected a build with CUDA, got one without");
  }
  return collective_checks(/*on_gpus=*/true, ranks, numel);
}

namespace {

constexpr std::size_t kCopyNbytes = std::size_t{64} << 20;

// What run_rank() holds on all ranks, twice: the ranks' own memory comes on top.
std::int64_t needed_nbytes(int num_ranks) {
  return 2 * num_ranks * (2 + 3 * num_ranks) * kShardNumel * 4;
}

Check check_copy() {
  const double gb_per_s = copy_gb_per_s(kCopyNbytes);
  Check check{.name = "memcpy"};
  check.found = fmt::format("one thread reads and writes {:.1f} GB/s", gb_per_s);
  check.facts.add("gb_per_s", gb_per_s);
  return check;
}

}  // namespace

Checks self_test(int num_cores, std::int64_t usable_nbytes) {
  constexpr int kLeastRanks = 2, kMostRanks = 8;
  int num_ranks = std::clamp(num_cores, kLeastRanks, kMostRanks);
  while (num_ranks > kLeastRanks && needed_nbytes(num_ranks) > usable_nbytes) --num_ranks;
  const auto has_room = [&](std::int64_t nbytes) { return usable_nbytes > nbytes; };
  if (!has_room(std::max<std::int64_t>(needed_nbytes(num_ranks), 2 * kCopyNbytes))) {
    return {{.name = "self test",
             .verdict = Verdict::kWarn,
             .found = "left out, as too little memory is free",
             .fix = "see memory above"}};
  }
  Checks checks;
  try {
    checks.push_back(check_product(engine_product()));
    checks.push_back(check_copy());
    for (Check& check : check_collectives(num_ranks)) checks.push_back(std::move(check));
    checks.push_back(rates_line(num_ranks, measure_rates(num_ranks, DType::kF32)));
  } catch (const std::exception& e) {
    checks.push_back({.name = "self test",
                      .verdict = Verdict::kFail,
                      .found = e.what(),
                      .fix = "trainings would fail in the same way"});
  }
  return checks;
}

}  // namespace tessera::tools
