"""A PyTorch model of one's own, sharded by Tessera: a module for each block, recomputed in backward.

    python3 torch_blocks.py                                             # four ranks, threads of this process
    torchrun --no-python --nproc-per-node=2 python3 torch_blocks.py     # two processes of one rank each
"""

import os

import tessera
import tessera.pytorch
import torch


def make_modules():
    torch.manual_seed(0)  # the same first values in every process
    return {"in": torch.nn.Sequential(torch.nn.Linear(2, 64), torch.nn.Tanh()),
            "middle": torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh()),
            "out": torch.nn.Linear(64, 1)}


def train(world, modules, strategy="zero3", num_steps=200):
    model = tessera.pytorch.Modules(world, modules, strategy=strategy, optimizer=tessera.AdamW(weight_decay=0))
    for step in range(num_steps):
        generator = torch.Generator().manual_seed(step * world.size + world.rank)
        x = h = torch.rand(32, 2, generator=generator)
        model.begin_step()
        for block in modules:
            h = model(block, h)
        loss = (h - (x[:, :1] - x[:, 1:]).abs()).square().mean()
        loss.backward()
        model.step(lr=0.003, max_norm=1)
    return loss.item(), model.full_parameters()


if __name__ == "__main__":
    made = make_modules()  # once: threads share PyTorch's random numbers
    loss, parameters = tessera.run(lambda world: train(world, made), threads=1 if "WORLD_SIZE" in os.environ else 4)[0]
    print("loss %.5f, %d parameters" % (loss, sum(value.size for value in parameters.values())))
    assert loss < 0.01, "expected it to learn"
