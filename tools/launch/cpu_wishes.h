// What people ask of the CPU as text: in variables of the environment, or over these in a program's
// own options.
#pragma once

#include <string>
#include <string_view>

#include "engine/cpu_choice.h"
#include "tools/machine/environment.h"

namespace tessera::tools {

/// A value, and who gave it. Empty or "auto" asks for nothing.
struct CpuWish {
  std::string value = {};
  std::string_view name = {};

  bool asks() const { return !value.empty() && value != "auto"; }
};

struct CpuWishes {
  CpuWish isa = {}, gemm = {}, threads = {};

  /// What is wished by TESSERA_CPU_ISA, TESSERA_CPU_GEMM and TESSERA_CPU_THREADS.
  static CpuWishes of(const Environment& environment);

  /// Throws InvalidArgument that names who asked for what nobody knows.
  engine::CpuChoice choice() const;
};

/// engine::choose_cpu() as the environment asks, for programs that have no options for it.
void choose_cpu_by_environment();

}  // namespace tessera::tools
