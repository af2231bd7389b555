// What a process uses of its CPU: which instructions, and who multiplies matrices. The one thing
// that a process has once: kernels are chosen by it, and libraries keep to it.
//
//   engine::choose_cpu({.isa = engine::Isa::kV3, .gemm = engine::CpuGemm::kEigen});
//
// Without a call all that computes takes the defaults below. Nothing in the environment changes
// them: a program that wants its users to choose reads their wishes itself.
#pragma once

#include <optional>
#include <string_view>

#include "engine/isa.h"

namespace tessera::engine {

/// See [Note: who multiplies] in engine/gemm/gemm.h.
enum class CpuGemm {
  kOneDnn,         ///< the library, however small the product
  kEigen,          ///< nobody else
  kSplit,          ///< f32 in parts of bf16, on the tiles of AMX
  kSplitPortable,  ///< f32 in parts of bf16, in plain C++: for tests, as it is slow
};
/// "onednn", "eigen", "split", "split-portable".
std::string_view name_of(CpuGemm gemm);

/// What has no value stays as it is, or is decided when something first computes with it.
struct CpuChoice {
  std::optional<Isa> isa = {};                  ///< default: the best that this CPU has
  std::optional<CpuGemm> gemm = {};             ///< default: oneDNN where it is installed
  std::optional<int> threads_per_product = {};  ///< default: 1; more take oneDNN

  /// What errors call each of them, such as a program's option.
  struct Names {
    std::string_view isa = "CpuChoice::isa", gemm = "CpuChoice::gemm",
                     threads_per_product = "CpuChoice::threads_per_product";
  };
  Names names = {};
};

/// Decides what `choice` has values for, for the whole process: products and their threads at once.
/// Before anything computes, or with what is in use already. Throws InvalidArgument that ends with
/// the name of what the CPU or the machine lacks, or of what is in use with another value.
void choose_cpu(const CpuChoice& choice);

}  // namespace tessera::engine
