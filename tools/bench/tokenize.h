// The part of the benchmark that times a tokenizer.
#pragma once

#include <string>

#include "tools/bench/parts.h"

namespace tessera::tools {

/// Ids of the text at `path`, as one document and as one for each line, and of one letter many
/// times, by the tokenizer of --bench.tokenizer; next to those of the Python package tokenizers,
/// where there is --bench.python. Each by one thread, and by CPU time. Throws InvalidArgument
/// without a tokenizer, IoError when the package makes another number of ids.
void bench_tokenize(const std::string& path, const BenchConfig& config, BenchReport& report);

}  // namespace tessera::tools
