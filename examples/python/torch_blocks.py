"""A PyTorch model of one's own, sharded by Tessera: a module for each block, recomputed in backward.

    python3 torch_blocks.py                                             # four ranks, threads of this process
    torchrun --no-python --nproc-per-node=2 python3 torch_blocks.py     # two processes of one rank each
"""

import copy
import os

import tessera
import torch
from torch.func import functional_call


def make_blocks():
    torch.manual_seed(0)  # the same first values in every process
    return {"in": torch.nn.Sequential(torch.nn.Linear(2, 64), torch.nn.Tanh()),
            "middle": torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh()),
            "out": torch.nn.Linear(64, 1)}


def train(world, blocks, strategy="zero3", num_steps=200):
    blocks = copy.deepcopy(blocks)  # functional_call() changes modules while it computes: each thread has its own
    fsdp = tessera.Fsdp(world, {name: dict(module.named_parameters()) for name, module in blocks.items()}, strategy=strategy,
                        optimizer=tessera.AdamW(weight_decay=0), array=tessera.torch_array)
    for step in range(num_steps):
        generator = torch.Generator().manual_seed(step * world.size + world.rank)
        x = torch.rand(32, 2, generator=generator)
        inputs, h = {}, x
        fsdp.begin_step()
        for name, module in blocks.items():
            inputs[name] = h
            with torch.no_grad():
                h = fsdp.forward(name, lambda p: functional_call(module, dict(p), (inputs[name],)))
        error = h - (x[:, :1] - x[:, 1:]).abs()
        dh = 2 * error / len(error)
        for name, module in reversed(blocks.items()):
            def backward(p, grad):
                weights = {key: p[key].requires_grad_() for key in p}
                h = inputs[name].requires_grad_()
                y = functional_call(module, weights, (h,))
                dx, *dweights = torch.autograd.grad(y, [h, *weights.values()], dh)
                for key, dweight in zip(weights, dweights):
                    grad[key] += dweight
                return dx
            dh = fsdp.backward(name, backward)
        fsdp.step(lr=0.003, max_norm=1)
    return error.square().mean().item(), fsdp.full_parameters()


if __name__ == "__main__":
    made = make_blocks()  # once: threads share PyTorch's random numbers
    loss, parameters = tessera.run(lambda world: train(world, made), threads=1 if "WORLD_SIZE" in os.environ else 4)[0]
    print("loss %.5f, %d parameters" % (loss, sum(value.size for value in parameters.values())))
    assert loss < 0.01, "expected it to learn"
