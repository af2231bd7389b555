// What decides the bits of a training besides its configuration: who multiplies, and where.
#pragma once

#include <string>

#include "engine/gemm/gemm_algorithms.h"
#include "tools/launch/ranks.h"

namespace tessera::tools {

/// A line each, NAME = VALUE as in TOML: the CPU, its instruction set, the library of products with
/// its version and threads, the C library; of GPUs their kind, cublasLt and its `algorithms` (null:
/// those proposed first), NCCL. In one process always the same. Throws DeviceError.
std::string arithmetic_text(const Ranks& ranks, const engine::GemmAlgorithms* algorithms);

}  // namespace tessera::tools
