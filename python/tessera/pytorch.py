"""Modules of PyTorch, 2.4 or later, as blocks: import tessera.pytorch."""

import copy

import torch
from torch.func import functional_call

import tessera


class Modules(tessera.Fsdp):
    """An Fsdp of {block: torch.nn.Module}, whose gradients are those of autograd. Options as of Fsdp, without root.

        y = model("second", model("first", x))    # between begin_step() and step(), or without gradients between steps
        loss(y).backward()

    A block takes and gives tensors. Its backward computes it again, so that what is kept are the tensors between blocks;
    buffers that its forward writes are written twice, are each rank's own, and are in no checkpoint. Parameters that do not
    require gradients are frozen. `modules` are left as they are, and needed no more.
    """

    def __init__(self, world, modules, **options):
        named = {block: dict(module.named_parameters()) for block, module in modules.items()}
        frozen = ["%s.%s" % (block, name) for block, values in named.items() for name, p in values.items() if not p.requires_grad]
        super().__init__(world, named, frozen=frozen, array=tessera.torch_array, **options)
        # Of each rank, as functional_call() changes a module while it computes; and without values, which the engine has.
        self._modules = {}
        for block, module in modules.items():
            empty = {id(p): torch.nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in module.parameters()}
            self._modules[block] = copy.deepcopy(module, empty)

    def __call__(self, block, *inputs):
        if not torch.is_grad_enabled():
            return self.evaluate(block, lambda p: self._compute(block, p, inputs))
        has_backward = torch.empty(0, requires_grad=True)  # even where no input requires gradients
        return _Block.apply(self, block, has_backward, *inputs)

    def _compute(self, block, parameters, inputs):
        return functional_call(self._modules[block], dict(parameters), tuple(inputs))


class _Block(torch.autograd.Function):
    @staticmethod
    def forward(ctx, model, block, _, *inputs):
        ctx.model, ctx.block, ctx.random = model, block, torch.get_rng_state()
        ctx.autocast = torch.autocast("cpu", torch.get_autocast_dtype("cpu"), torch.is_autocast_enabled("cpu"), cache_enabled=False)
        ctx.save_for_backward(*inputs)
        out = model.forward(block, lambda p: model._compute(block, p, inputs))
        if not all(isinstance(t, torch.Tensor) for t in _tuple(out)):
            raise tessera.InvalidArgument("[python] expected a tensor or several of %s, got %s" % (block, type(out).__name__))
        ctx.is_random = not torch.equal(ctx.random, torch.get_rng_state())
        if ctx.is_random and model.world.threads > 1:
            raise tessera.InvalidArgument(
                "[python] expected no random numbers while %s computes, as backward draws them again and threads share one generator; "
                "got some: use processes of one thread, and torch.Generator for what is outside blocks" % block)
        return out

    @staticmethod
    def backward(ctx, *douts):
        def fn(p, grad):
            weights = {name: p[name].requires_grad_(name in grad) for name in p}
            inputs = [x.detach().requires_grad_(needs) for x, needs in zip(ctx.saved_tensors, ctx.needs_input_grad[3:])]
            with torch.enable_grad(), ctx.autocast, torch.random.fork_rng(devices=[], enabled=ctx.is_random):
                if ctx.is_random:
                    torch.set_rng_state(ctx.random)
                outs = _tuple(ctx.model._compute(ctx.block, weights, inputs))
            used = [(out, dout) for out, dout in zip(outs, douts) if out.requires_grad]
            wanted = [t for t in [*inputs, *weights.values()] if t.requires_grad]
            got = [None] * len(wanted)
            if used:
                outs, douts_of_outs = zip(*used)
                got = torch.autograd.grad(outs, wanted, douts_of_outs, allow_unused=True)
            gradients = dict(zip(map(id, wanted), got))
            for name, weight in weights.items():
                if gradients.get(id(weight)) is not None:
                    grad[name] += gradients[id(weight)]
            return tuple(gradients.get(id(x)) for x in inputs)

        return None, None, None, *ctx.model.backward(ctx.block, fn)


def _tuple(out):
    return out if isinstance(out, tuple) else (out,)
