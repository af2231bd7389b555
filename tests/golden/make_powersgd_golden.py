#!/usr/bin/env python3
"""Makes powersgd.json: how PyTorch's PowerSGD hook trains a small network. Development only: no build or test runs this.

    python3 -m venv env && env/bin/pip install torch numpy
    env/bin/python tests/golden/make_powersgd_golden.py          # rewrites the file beside this script

The file in the tree was made with torch 2.15.0 on the CPU, over gloo.

The run, in full:

    model      y = W3 relu(W2 relu(W1 x + b1) + b2) + b3, weights stored [out, in]; shapes below.
    loss       mean cross-entropy of y over the batch of a rank; gradients are averaged over ranks by the hook.
    data       POOL samples. Step s of rank r of N takes samples (s * N + r) * BATCH .. + BATCH - 1, modulo POOL.
    update     v = momentum * v + g;  p = p - lr * v;  v starts at 0.
    hook       PowerSGD in DistributedDataParallel with one bucket, error feedback and warm start on, plain all-reduce
               before step `start_step`.

Of every run the file holds the options, the random matrices that the hook started from (before they were made
orthonormal; rows of Q in turn, by parameter), the mean loss over the ranks of each step, before its update, and the
parameters after the last step.
"""
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd

HERE = Path(__file__).resolve().parent
IN, HIDDEN, OTHER, CLASSES = 10, 16, 12, 6
POOL, BATCH, STEPS = 48, 4, 30
LR, MOMENTUM = 0.05, 0.9
RUNS = [
    {"ranks": 2, "rank": 1, "start_step": 2, "eps": 0.0},
    {"ranks": 4, "rank": 2, "start_step": 2, "eps": 0.0},
    {"ranks": 4, "rank": 3, "start_step": 5, "eps": 0.0},
    {"ranks": 2, "rank": 2, "start_step": 2, "eps": 1e-3},
]


class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(IN, HIDDEN)
        self.b = torch.nn.Linear(HIDDEN, OTHER)
        self.c = torch.nn.Linear(OTHER, CLASSES)

    def forward(self, x):
        return self.c(torch.relu(self.b(torch.relu(self.a(x)))))


def make_model():
    generator = torch.Generator().manual_seed(20240607)
    model = Network()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_((0.5 if p.dim() > 1 else 0.1) * torch.randn(p.shape, generator=generator))
    return model


def make_data():
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(POOL, IN, generator=generator)
    w = torch.randn(IN, CLASSES, generator=generator)
    y = (x @ w + 0.5 * torch.randn(POOL, CLASSES, generator=generator)).argmax(1)
    return x, y


def train(rank, run, port, result):
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(port)
    torch.set_num_threads(1)
    n = run["ranks"]
    dist.init_process_group("gloo", rank=rank, world_size=n)
    model = make_model()
    ddp = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=25)
    state = powersgd.PowerSGDState(
        None, matrix_approximation_rank=run["rank"], start_powerSGD_iter=run["start_step"], min_compression_rate=1,
        use_error_feedback=True, warm_start=True, orthogonalization_epsilon=run["eps"], random_seed=0)
    ddp.register_comm_hook(state, powersgd.powerSGD_hook)

    # The first matrices that the hook makes orthonormal are the random ones, in the order of the bucket.
    starts = []
    orthogonalize = powersgd._orthogonalize

    def watch(matrices, epsilon=0):
        starts.append(matrices[0].clone())
        orthogonalize(matrices, epsilon)

    x, y = make_data()
    optimizer = torch.optim.SGD(ddp.parameters(), lr=LR, momentum=MOMENTUM)
    losses = []
    for step in range(STEPS):
        at = [(step * n + rank) * BATCH % POOL + i for i in range(BATCH)]
        optimizer.zero_grad()
        loss = F.cross_entropy(ddp(x[at]), y[at])
        powersgd._orthogonalize = watch if step == run["start_step"] else orthogonalize
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / n)
    if rank == 0:
        # Which is whose is known by its number of rows, as all weights differ in theirs.
        by_rows = {p.shape[1]: name for name, p in model.named_parameters() if p.dim() > 1}
        q = {by_rows[m.shape[0]]: m.flatten().tolist() for m in starts[:3]}
        assert len(q) == 3
        result.update(q=q, loss=losses, final={name: p.detach().flatten().tolist() for name, p in model.named_parameters()})
    dist.destroy_process_group()


def numbers(values):
    """Nine digits give back every float32."""
    return [float("%.9g" % v) for v in values]


def main():
    x, y = make_data()
    golden = {
        "versions": {"torch": torch.__version__, "python": sys.version.split()[0]},
        "steps": STEPS, "batch": BATCH, "pool": POOL, "lr": LR, "momentum": MOMENTUM,
        "shapes": {name: list(p.shape) for name, p in make_model().named_parameters()},
        "start": {name: numbers(p.detach().flatten().tolist()) for name, p in make_model().named_parameters()},
        "x": numbers(x.flatten().tolist()), "y": y.tolist(), "runs": [],
    }
    for number, run in enumerate(RUNS):
        with mp.Manager() as manager:
            result = manager.dict()
            mp.spawn(train, args=(run, 29600 + number, result), nprocs=run["ranks"])
            golden["runs"].append({
                **run, "q": {name: numbers(v) for name, v in result["q"].items()}, "loss": numbers(result["loss"]),
                "final": {name: numbers(v) for name, v in result["final"].items()}})
    with open(HERE / "powersgd.json", "w", encoding="utf-8") as file:
        json.dump(golden, file)
        file.write("\n")


if __name__ == "__main__":
    main()
