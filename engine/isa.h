// The instruction set that kernels on the CPU use, chosen once in a process by what its CPU has.
//
//   with_isa([&] { for (i...) y[i] = exp(x[i]); });   // compiled for each level, run at one
//
// [Note: one source, several instruction sets] A loop that the compiler vectorises is compiled once
// for each level and called at the level of this process, so one binary is fast on any CPU and runs
// on all. with_isa() gives its function, and all that it calls and the compiler can see, to one
// function template with a target attribute a level; nothing compiled for a higher level is ever
// shared with code for a lower one, as it would be if whole files were compiled with other flags.
// Stream::launch() does it for the kernels of ops. Arithmetic is spelled out (no contraction, lanes
// of fixed number), so own kernels have the same bits at every level.
#pragma once

#include <string_view>

#include "engine/sanitizers.h"

namespace tessera::engine {

/// Levels of x86-64, each with all before it; other CPUs are at the first.
enum class Isa {
  kV2,      ///< SSE4.2: what the build is for
  kV3,      ///< AVX2, FMA
  kV4,      ///< AVX-512
  kV4Bf16,  ///< products of bf16
  kV4Amx,   ///< matrices of bf16
};
/// "v2", "v3", "v4", "v4+bf16", "v4+amx".
std::string_view name_of(Isa isa);

/// What this CPU has.
Isa best_isa();
/// What this process uses: decided at the first call, unless choose_cpu() has
/// (engine/cpu_choice.h), and then for good.
Isa isa();

namespace internal {

/// isa(), which is `isa` if this is the first call.
Isa decide_isa(Isa isa);

// Sanitizers look at one level, as each has the same source.
#if defined(__x86_64__) && !defined(__CUDACC__) && !defined(TESSERA_ASAN) && \
    !defined(TESSERA_TSAN) && !defined(TESSERA_UBSAN)
#define TESSERA_ISA_LEVELS
#define TESSERA_V3 "avx2,fma,bmi,bmi2,f16c,lzcnt,movbe"
#define TESSERA_AVX512 TESSERA_V3 ",avx512f,avx512bw,avx512cd,avx512dq,avx512vl"
#if defined(__clang__)  // which ignores an attribute with a word that it does not know
#define TESSERA_V4 TESSERA_AVX512
#else
#define TESSERA_V4 TESSERA_AVX512 ",prefer-vector-width=512"
#endif
template <class F>
[[gnu::flatten, gnu::target(TESSERA_V3)]] decltype(auto) run_v3(F& fn) {
  return fn();
}
template <class F>
[[gnu::flatten, gnu::target(TESSERA_V4)]] decltype(auto) run_v4(F& fn) {
  return fn();
}
#undef TESSERA_V3
#undef TESSERA_V4
#undef TESSERA_AVX512
#endif

}  // namespace internal

/// fn(), compiled for the level of this process.
template <class F>
decltype(auto) with_isa(F&& fn) {
#if defined(TESSERA_ISA_LEVELS)
  const Isa level = isa();
  if (level >= Isa::kV4) return internal::run_v4(fn);
  if (level == Isa::kV3) return internal::run_v3(fn);
#endif
  return fn();
}

}  // namespace tessera::engine
