#include "lion.h"

#include "shard/rule_kernels.cuh"

template struct tessera::shard::RuleKernels<Lion>;
