"""A model written with NumPy, forward and backward by hand, sharded by Tessera: python3 numpy_blocks.py [STRATEGY] [THREADS]"""

import sys

import numpy as np
import tessera


def train(world, strategy):
    random = np.random.default_rng(0)  # the same first values on every rank
    fsdp = tessera.Fsdp(world, {"first": {"w": random.standard_normal((2, 16))}, "second": {"w": 0.3 * random.standard_normal((16, 1))}},
                        optimizer=tessera.Sgd(momentum=0.9), strategy=strategy)
    for step in range(500):
        x = np.random.default_rng([step, world.rank]).random((32, 2), np.float32)
        fsdp.begin_step()
        h = fsdp.forward("first", lambda p: np.maximum(x @ p["w"], 0))
        error = fsdp.forward("second", lambda p: h @ p["w"]) - abs(x[:, :1] - x[:, 1:])

        def second(p, grad):
            grad["w"] += h.T @ error / 16
            return error / 16 @ p["w"].T * (h > 0)

        def first(p, grad):
            grad["w"] += x.T @ dh

        dh = fsdp.backward("second", second)
        fsdp.backward("first", first)
        fsdp.step(lr=0.05, max_norm=1)
    losses = world.all_gather([np.square(error).mean()])
    return np.mean(losses)


if __name__ == "__main__":
    strategy, threads = (sys.argv[1:] + ["zero3", "4"][len(sys.argv) - 1:])[:2]
    loss = tessera.run(lambda world: train(world, strategy), threads=int(threads))[0]
    print("loss %.5f" % loss)
    assert loss < 1e-3, "expected it to learn"
