#include "shard/optimizer/adamw_rule.h"
#include "shard/optimizer/rule_kernels.cuh"
#include "shard/optimizer/sgd_rule.h"

template struct tessera::shard::RuleKernels<tessera::shard::SgdRule>;
template struct tessera::shard::RuleKernels<tessera::shard::AdamWRule>;
