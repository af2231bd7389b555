"""Tessera from Python: sharding, checkpoints and plans for a model that lies in NumPy or PyTorch.

    import numpy as np, tessera

    def train(world):                                 # on every rank
        fsdp = tessera.Fsdp(world, {"fc": {"w": np.zeros((2, 1), np.float32)}}, strategy="zero3")
        for step in range(100):
            x = np.random.default_rng([step, world.rank]).random((32, 2), np.float32)
            fsdp.begin_step()
            error = fsdp.forward("fc", lambda p: x @ p["w"]) - x.sum(1, keepdims=True)

            def backward(p, grad):
                grad["w"] += x.T @ error / 16

            fsdp.backward("fc", backward)
            fsdp.step(lr=0.5)
        return fsdp.full_parameters()

    w = tessera.run(train, threads=4)[0]["fc.w"]

The engine moves and keeps parameters, gradients and optimizer states; what is computed is the caller's, on the CPU. Bits are
those of the C++ library: equal for every strategy and number of processes. docs/python.md says more.
"""

import gc
import json
import os
import zlib

import numpy

from . import _engine
from ._engine import AdamW, CommError, DeviceError, Error, InvalidArgument, IoError, STRATEGIES, Sgd, World

__all__ = ["AdamW", "Checkpointer", "CommError", "DeviceError", "Error", "Fsdp", "InvalidArgument", "IoError", "STRATEGIES",
           "Sgd", "World", "compare", "plan", "run", "torch_array"]


def run(fn, *, threads=1, deadline_s=300.0):
    """Calls fn(world) on ranks, and returns the results of those of this process, in their order.

    `threads` ranks are threads of this process. Where torchrun, mpirun or Slurm has started several processes, the ranks of
    all of them are one world, over MPI or Gloo. A rank that raises ends the others, and run() raises what it did. A rank that
    waits for another one for longer than `deadline_s` is an error that names who is missing.
    """
    return _engine.run(fn, threads, deadline_s)


class Fsdp:
    """Blocks of parameters, sharded over the ranks of `world`, and their optimizer.

    `blocks`: {block: {parameter: value}} in the order of forward. A value is an array or a tensor, whose f32 values are the
    initial ones and equal on all ranks, or a shape, for zeros. A parameter is called "block.parameter" where no block
    is meant. `root`: the name of the block of `blocks` whose functions are around those of all others, or None.
    `frozen`: names of parameters without gradients. `array`: makes of a NumPy array what functions of blocks are given, such as
    torch.from_dlpack; tessera.torch_array also takes bf16, whose bits are int16 in NumPy.

    Options, as in shard/options.h: strategy (one of STRATEGIES), shard_ranks, prefetch, reductions_in_flight, unit_min_numel,
    bucket_nbytes, param_dtype (what is gathered and computed with), reduce_dtype (of gradients on their way) and grad_dtype
    (what backward adds into): "f32" or "bf16". Collective.
    """

    def __init__(self, world, blocks, *, root=None, optimizer=None, frozen=(), array=None, **options):
        if array is None and "bf16" in (options.get("param_dtype"), options.get("grad_dtype")):
            raise InvalidArgument("[python] expected array=tessera.torch_array with bf16, which NumPy lacks, got none")
        self._array = array
        self._blocks = {block: list(parameters) for block, parameters in blocks.items()}
        self._shapes = {}
        values = {}
        for block, name, value in _walk(blocks):
            full = "%s.%s" % (block, name)
            self._shapes[full] = _shape_of(value)
            if not _is_shape(value):
                values[full] = _f32(value)
        self.world = world
        self.model = _engine.Model(world, *_specs(blocks, root, frozen), optimizer or Sgd(), **options)
        self.load(values)

    def begin_step(self, num_micro_steps=1):
        """Starts a step of as many forwards and backwards, and the first of them."""
        self.model.begin_step(num_micro_steps)

    def next_micro_step(self):
        """Starts the next forward and backward of the step."""
        self.model.next_micro_step()

    def forward(self, block, fn):
        """Gathers the block, and returns fn(p), where p[name] is a whole parameter, to be read."""
        return self._visit(block, _engine.For.forward, fn)

    def backward(self, block, fn):
        """Gathers the block, and returns fn(p, grad). `grad[name] += value` adds to the gradient of this rank's loss.

        Once the passes of all its blocks have come here, a unit is reduced, while other blocks compute. A parameter whose
        gradient fn does not touch has one of zeros.
        """
        return self._visit(block, _engine.For.backward, fn)

    def evaluate(self, block, fn):
        """As forward(), between steps and without a backward."""
        return self._visit(block, _engine.For.evaluation, fn)

    def step(self, lr, *, max_norm=0.0):
        """Updates all parameters by the mean gradient over ranks and micro-steps, clipped to max_norm unless that is 0.

        Returns the gradient's norm before clipping. Raises InvalidArgument, on every rank, that names a parameter whose
        gradient is not finite.
        """
        return self.model.step(lr, max_norm)

    def keep_gathered(self, fn):
        """Returns fn(), in which every evaluate() finds its block gathered: gathers once for many of them."""
        result = []
        self.model.keep_gathered(lambda: result.append(fn()))
        return result[0]

    def load(self, values):
        """Sets parameters, {"block.parameter": array}, from whole values. Collective, between steps.

        Raises InvalidArgument that names a parameter whose values are not equal on all ranks.
        """
        values = {name: _f32(value) for name, value in values.items()}
        checksums = [zlib.crc32(value, zlib.crc32(("%s %s" % (name, value.shape)).encode())) for name, value in values.items()]
        for rank, theirs in enumerate(self.world.all_gather(checksums)):
            for name, mine, other in zip(values, checksums, theirs):
                if mine != other:
                    raise InvalidArgument("[python] expected equal values of %s on all ranks, got others on ranks %d and %d"
                                          % (name, *sorted((rank, self.world.rank))))
        for name, value in values.items():
            self.model.load(name, value)

    def full_parameters(self):
        """{"block.parameter": f32 array}, whole, on every rank. Collective."""
        return {name: self.model.full_parameter(name).reshape(shape) for name, shape in self._shapes.items()}

    def plan(self):
        """What all ranks have agreed on, in lines for people: options, units, and where each parameter lies."""
        return self.model.plan()

    @property
    def peak_nbytes(self):
        """The most that the engine has kept for this model on this rank."""
        return self.model.peak_nbytes()

    def _visit(self, block, what, fn):
        if block not in self._blocks:
            raise InvalidArgument("[python] expected a block, one of %s, got %r" % (", ".join(self._blocks), block))
        self.model.gather(block, what)
        lent = [_Lent(self, block, is_grad=False)]
        if what == _engine.For.backward:
            lent.append(_Lent(self, block, is_grad=True))
        result = fn(*lent)
        for arrays in lent:
            arrays.take_back()
        if not self.model.is_returned(block):
            gc.collect()  # what only a cycle of references keeps is kept by nobody
        self.model.release(block, what)
        return result


class _Lent:
    """Arrays of a block's parameters or gradients by name, while its function runs."""

    def __init__(self, fsdp, block, is_grad):
        self._fsdp, self._block, self._is_grad = fsdp, block, is_grad
        self._arrays = {}

    def __getitem__(self, name):
        full = "%s.%s" % (self._block, name)
        if self._arrays is None:
            raise InvalidArgument("[python] expected %s inside the function of its block" % full)
        if name not in self._fsdp._blocks[self._block]:
            raise InvalidArgument("[python] expected a parameter of %s, got %r" % (self._block, name))
        if name not in self._arrays:
            array = self._fsdp.model.array(self._block, full, self._is_grad)
            if self._fsdp._array is not None:
                array = self._fsdp._array(array)
            elif not self._is_grad:
                array.flags.writeable = False
            self._arrays[name] = array
        return self._arrays[name]

    def __setitem__(self, name, value):
        if value is not self[name]:  # what += leaves
            raise InvalidArgument("[python] expected %s.%s to be written in place, as by grad[name] += value, got another array"
                                  % (self._block, name))

    def keys(self):
        return list(self._fsdp._blocks[self._block])

    def __iter__(self):
        return iter(self.keys())

    def __len__(self):
        return len(self.keys())

    def take_back(self):
        self._arrays = None


class Checkpointer:
    """Saves and loads the parameters and optimizer states of an Fsdp, one for each; any strategy and number of ranks loads them.

    `folder` is on a file system that all ranks share, `keep` how many checkpoints stay, all if 0. With asynchronous=True
    save() returns once the values are copied, and they are written while training goes on. All calls are collective, between
    steps. The folder's files are those of docs/checkpoints.md.
    """

    def __init__(self, fsdp, folder, *, keep=3, asynchronous=True):
        self._model = fsdp.model
        self._model.open_checkpoints(os.fspath(folder), keep, asynchronous)

    def save(self, step, values=None):
        """Saves what is held after `step` steps, with `values`, {str: str}, for the program. Waits for an earlier save."""
        self._model.save(step, values or {})

    def poll(self):
        """The step of the save at work once it is done, else None. To be called between steps, on every rank."""
        return self._model.poll()

    def wait(self):
        """Returns once no save is at work."""
        return self._model.wait()

    def load_newest(self):
        """Loads the newest checkpoint that is whole. Returns its "step", "values" and "path", or None if there is none."""
        return self._model.load_checkpoint("")

    def load(self, path):
        """Loads one checkpoint, and returns as load_newest()."""
        return self._model.load_checkpoint(os.fspath(path))


def plan(blocks, *, ranks, rank=0, root=None, optimizer=None, frozen=(), **options):
    """What a step takes of one of `ranks` ranks that need not be there, without memory for it; arguments as of Fsdp.

    Returns peak_nbytes and peak_nbytes_by_category of what the engine keeps, sent_nbytes and num_collectives of a step, and
    what Fsdp.plan() says as "plan". What the caller computes, its activations and its time are its own and no part of this.
    """
    return _engine.plan(rank, ranks, *_specs(blocks, root, frozen), optimizer or Sgd(), **options)


def torch_array(array):
    """A PyTorch tensor of the memory of an array that functions of blocks are given, f32 or bf16: for Fsdp(array=...)."""
    import torch
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if array.dtype == numpy.int16 else tensor


def compare(folder):
    """What the program `compare` has found and written to its --out folder: compare.json, as lists and dictionaries."""
    with open(os.path.join(os.fspath(folder), "compare.json"), encoding="utf-8") as file:
        return json.load(file)


def _walk(blocks):
    for block, parameters in blocks.items():
        for name, value in parameters.items():
            yield block, name, value


def _is_shape(value):
    return isinstance(value, tuple) and all(isinstance(n, int) for n in value)


def _shape_of(value):
    return value if _is_shape(value) else tuple(int(n) for n in value.shape)


def _f32(value):
    """A NumPy array of the values of an array or a PyTorch tensor."""
    if hasattr(value, "detach"):
        value = value.detach().cpu().float().numpy()
    return numpy.ascontiguousarray(value, dtype=numpy.float32)


def _specs(blocks, root, frozen):
    """Blocks and root as the engine is told of them."""
    frozen = set(frozen)
    names = {"%s.%s" % (block, name) for block, name, _ in _walk(blocks)}
    if not frozen <= names:
        raise InvalidArgument("[python] expected frozen parameters of the blocks, got %s" % ", ".join(sorted(frozen - names)))
    if root is not None and root not in blocks:
        raise InvalidArgument("[python] expected root to be one of the blocks, got %r" % root)
    specs = {block: (block, [(name, list(_shape_of(value)), "%s.%s" % (block, name) not in frozen)
                             for name, value in parameters.items()]) for block, parameters in blocks.items()}
    return [spec for block, spec in specs.items() if block != root], specs.get(root)
