#include "shard/adamw.h"
#include "shard/rule_optimizer.cuh"
#include "shard/sgd.h"

template struct tessera::shard::RuleKernels<tessera::shard::SgdRule>;
template struct tessera::shard::RuleKernels<tessera::shard::AdamWRule>;
