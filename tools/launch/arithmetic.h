// What decides the bits of a training besides its configuration: who multiplies, and where.
#pragma once

#include <map>
#include <string>

#include "engine/gemm/gemm_algorithms.h"
#include "tools/launch/ranks.h"

namespace tessera::tools {

/// Of a GPU of this process its kind, and cublasLt; empty on the CPU. May wait for what lies on
/// that GPU: to be called before there are ranks, as one would wait for another's. Throws
/// DeviceError.
std::string gpu_text(const Ranks& ranks);

/// A line each, NAME = VALUE as in TOML: the CPU, its instruction set, the library of products with
/// its version and threads, the C library; of GPUs gpu_text(), the `algorithms` of cublasLt (null:
/// those proposed first), NCCL. In one process always the same. Throws DeviceError.
std::string arithmetic_text(const Ranks& ranks, const std::string& gpu,
                            const engine::GemmAlgorithms* algorithms);

/// Name to value of the lines of an arithmetic_text(); what is no such line is left out.
std::map<std::string, std::string> arithmetic_values(const std::string& text);

}  // namespace tessera::tools
