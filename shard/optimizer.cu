#include "shard/adamw_rule.h"
#include "shard/rule_kernels.cuh"
#include "shard/sgd_rule.h"

template struct tessera::shard::RuleKernels<tessera::shard::SgdRule>;
template struct tessera::shard::RuleKernels<tessera::shard::AdamWRule>;
