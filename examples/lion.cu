#include "lion.h"

#include "shard/optimizer/rule_kernels.cuh"

template struct tessera::shard::RuleKernels<Lion>;
