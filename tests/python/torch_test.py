"""Modules of PyTorch as blocks of the package `tessera`. Development only, as it needs PyTorch: env/bin/python3 tests/python/torch_test.py"""

import copy
import unittest

import numpy as np
import tessera
import torch
from tessera.pytorch import Modules
from tessera_test import message


class OfTorch(unittest.TestCase):
    def modules(self, *more):
        torch.manual_seed(3)
        return {"in": torch.nn.Sequential(torch.nn.Linear(3, 8), *more), "twice": torch.nn.Bilinear(8, 8, 8), "out": torch.nn.Linear(8, 2)}

    def inputs(self, rank, step):
        return torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * rank + step))

    def alone(self, modules, ranks, steps=3):
        """What PyTorch makes of the batches of all ranks, as {"block.parameter": values}."""
        values = {"%s.%s" % (block, name): p for block, module in modules.items() for name, p in module.named_parameters()}
        optimizer = torch.optim.SGD([p for p in values.values() if p.requires_grad], lr=0.1, momentum=0.9)
        for step in range(steps):
            optimizer.zero_grad()
            for rank in range(ranks):
                h = modules["in"](self.inputs(rank, step))
                (modules["out"](torch.tanh(modules["twice"](h, h))).square().mean() / ranks).backward()
            optimizer.step()
        return {name: p.detach().numpy() for name, p in values.items()}

    def train(self, world, modules, steps=3, **options):
        model = Modules(world, modules, optimizer=tessera.Sgd(momentum=0.9), **options)
        for step in range(steps):
            model.begin_step()
            h = model("in", self.inputs(world.rank, step))
            model("out", torch.tanh(model("twice", h, h))).square().mean().backward()
            model.step(0.1)
        with torch.no_grad():  # between steps
            h = model("in", self.inputs(0, 0))
            assert not model("twice", h, h).requires_grad
        return model.full_parameters()

    def check(self, got, want, **tolerance):
        self.assertEqual(got.keys(), want.keys())
        for name in want:
            np.testing.assert_allclose(got[name], want[name], err_msg=name, **tolerance)

    def test_modules_train_as_in_pytorch(self):
        modules = self.modules(torch.nn.Tanh())
        modules["in"][0].bias.requires_grad_(False)
        seen = [got for strategy in ("zero3", "zero1", "ddp")
                for got in tessera.run(lambda world: self.train(world, modules, strategy=strategy), threads=2)]
        self.check(seen[0], self.alone(modules, ranks=2), rtol=1e-5, atol=1e-6)
        for other in seen[1:]:
            self.check(other, seen[0], rtol=0, atol=0)

    def test_backward_draws_the_random_numbers_of_forward(self):
        modules = self.modules(torch.nn.Dropout(0.5))
        torch.manual_seed(7)
        want = self.alone(copy.deepcopy(modules), ranks=1)
        torch.manual_seed(7)
        self.check(tessera.run(lambda world: self.train(world, modules))[0], want, rtol=1e-5, atol=1e-6)
        self.assertIn("expected no random numbers while in computes", message(lambda: tessera.run(lambda world: self.train(world, modules), threads=2)))

    def test_backward_computes_under_the_autocast_of_forward(self):
        modules = {block: module for block, module in self.modules().items() if block != "twice"}  # whose product autocast leaves alone

        def loss(block):
            with torch.autocast("cpu", torch.bfloat16):
                return block("out", torch.tanh(block("in", self.inputs(0, 0)))).float().square().mean()

        def fn(world):
            model = Modules(world, modules)
            before = model.full_parameters()
            model.begin_step()
            loss(model).backward()
            model.step(1)
            return {name: before[name] - value for name, value in model.full_parameters().items()}
        loss(lambda block, *inputs: modules[block](*inputs)).backward()
        want = {"%s.%s" % (block, name): p.grad.numpy() for block, module in modules.items() for name, p in module.named_parameters()}
        self.check(tessera.run(fn)[0], want, atol=1e-6)

    def test_bf16(self):
        modules = {"a": torch.nn.Linear(4, 4, bias=False).to(torch.bfloat16)}  # whose values bf16 has
        modules["a"].weight.data[0, 0] = 2.0**40
        want = modules["a"].weight.detach().float().numpy()

        def fn(world):
            model = Modules(world, modules, param_dtype="bf16", grad_dtype="bf16")
            before = model.full_parameters()["a.weight"]
            model.begin_step()
            model("a", torch.eye(4, dtype=torch.bfloat16)).sum().backward()
            model.step(1)
            return before, model.full_parameters()["a.weight"]
        for before, after in tessera.run(fn, threads=2):
            np.testing.assert_array_equal(before, want)
            np.testing.assert_allclose(after, want - 1, atol=1e-6)

    def test_what_autograd_would_miss_is_told(self):
        class Named(torch.nn.Linear):
            def forward(self, x):
                return {"y": super().forward(x)}

        def cut(world):
            model = Modules(world, self.modules())
            model.begin_step()
            h = model("in", self.inputs(0, 0)).detach()
            model("out", model("twice", h, h)).sum().backward()
            model.step(0.1)

        def dictionary(world):
            model = Modules(world, {"a": Named(3, 3)})
            model.begin_step()
            model("a", self.inputs(0, 0))
        self.assertIn("expected a tensor or several of a, got dict", message(lambda: tessera.run(dictionary)))
        self.assertIn("expected a backward for every recorded forward", message(lambda: tessera.run(cut)))


if __name__ == "__main__":
    unittest.main()
