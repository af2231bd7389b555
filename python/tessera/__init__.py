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

# This is longer than a binding of 800 lines would be: what is lent and then kept, replaced or of another rank is an error and no
# wrong number, Ctrl-C and a first error end all ranks, and checkpoints, keep_gathered() and modules of PyTorch have parts of their own.

import collections.abc
import gc
import json
import math
import operator
import os
import time
import zlib

import numpy

from . import _engine
from ._engine import AdamW, CommError, DeviceError, Error, InvalidArgument, IoError, STRATEGIES, Sgd, World

if int(numpy.__version__.split(".")[0]) >= 2 and not _engine.knows_numpy_2:
    raise ImportError("tessera was built with pybind11 before 2.12, which misreads the arrays of NumPy 2: build it with a newer one, "
                      "or use NumPy 1")

__all__ = ["AdamW", "Checkpointer", "CommError", "DeviceError", "Error", "Fsdp", "InvalidArgument", "IoError", "STRATEGIES",
           "Sgd", "World", "compare", "plan", "run", "torch_array"]


def run(fn, *, threads=1, deadline_s=300.0):
    """Calls fn(world) on ranks, and returns the results of those of this process, in their order.

    `threads` ranks are threads of this process. Where torchrun, mpirun or Slurm has started several processes, the ranks of
    all of them are one world, over MPI or Gloo; under MPI a process calls run() once. A rank that raises ends the others at
    their next call of the engine, and run() raises what it did. A rank that waits for another one for longer than `deadline_s`
    is an error that names who is missing; run() returns once all have ended. Ctrl-C interrupts all.
    """
    return _engine.run(fn, threads, deadline_s)


class Fsdp:
    """Blocks of parameters, sharded over the ranks of `world`, and their optimizer.

    `blocks`: {block: {parameter: value}} in the order of forward. A value is an array, or what lends its memory of the CPU by
    DLPack, as tensors do; its f32 values are the initial ones and equal on all ranks. Or it is a shape, for zeros. A parameter is called "block.parameter" where no block
    is meant. `root`: the name of the block of `blocks` whose functions are around those of all others, or None.
    `frozen`: names of parameters without gradients. `array`: makes of a NumPy array, which has __dlpack__(), what
    functions of blocks are given: torch.from_dlpack, or tessera.torch_array, which knows bf16, too.

    `optimizer`: Sgd() if it is None. Values of other types are cast to f32.

    Options, as in shard/options.h: strategy (one of STRATEGIES; "zero3"), shard_ranks, prefetch, reductions_in_flight, unit_min_numel,
    bucket_nbytes, param_dtype (what is gathered and computed with), reduce_dtype (of gradients on their way) and grad_dtype
    (what backward adds into): "f32" or "bf16". Collective.
    """

    def __init__(self, world, blocks, *, root=None, optimizer=None, frozen=(), array=None, **options):
        if array is not None and not _shares_memory(array):
            raise InvalidArgument("[python] expected array to make what shares the memory of a NumPy array, got a copy")
        is_bf16 = "bf16" in (options.get("param_dtype"), options.get("grad_dtype"))
        if is_bf16 and (array is None or "bfloat16" not in str(array(numpy.zeros(1, numpy.int16)).dtype)):
            raise InvalidArgument("[python] expected array=tessera.torch_array with bf16, which NumPy lacks, got %s" % array)
        self._array = array
        self._blocks = {block: list(parameters) for block, parameters in blocks.items()}
        self._shapes, values, names = {}, {}, {}
        for block, name, value in _walk(blocks):
            full = "%s.%s" % (block, name)
            self._shapes[full] = _shape_of(value)
            if not _is_shape(value):
                values[full] = _f32(full, value)
                if names.setdefault(id(value), full) != full:
                    raise InvalidArgument("[python] expected each array once, got that of %s as %s: a root may be shared" % (names[id(value)], full))
        self._frozen, self._in_step = _frozen(frozen), False
        specs = _specs(blocks, root, self._frozen)
        self.world = world
        optimizer = optimizer or Sgd()
        self._require_equal({"the optimizer": zlib.crc32(repr(optimizer).encode())})
        self.model = _engine.Model(world, *specs, optimizer, **options)
        self.load(values)

    def begin_step(self, num_micro_steps=1, weight=None):
        """Starts a step of num_micro_steps forwards and backwards of the model, and the first of them.

        weight: how many terms, such as targets, the loss of this pass is a sum of on this rank; then the mean is over the terms of all
        ranks and passes, each of which says its own.
        """
        self.model.begin_step(num_micro_steps, weight)
        self._in_step = True

    def next_micro_step(self, weight=None):
        """Starts the next forward and backward of the step, with a weight of its own if begin_step() was given one."""
        self.model.next_micro_step(weight)

    def forward(self, block, fn):
        """Gathers the block, and returns fn(p), where p[name] is a whole parameter, to be read."""
        if block in self._blocks and not self._in_step:
            raise InvalidArgument("[python] expected begin_step() before forward(), or evaluate(), got neither (%s)" % block)
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
        if not math.isfinite(lr):
            raise InvalidArgument("[python] expected a finite lr, got %s" % lr)
        norm = self.model.step(lr, max_norm)
        self._in_step = False
        return norm

    def keep_gathered(self, fn):
        """Returns fn(), in which every evaluate() finds its block gathered: gathers once for many of them."""
        result = []
        self.model.keep_gathered(lambda: result.append(fn()))
        return result[0]

    def load(self, values):
        """Sets parameters, {"block.parameter": array}, from whole values. Collective, between steps.

        Raises InvalidArgument that names a parameter whose values are not equal on all ranks.
        """
        values = {name: _f32(name, value) for name, value in values.items()}
        for name, value in values.items():
            if name not in self._shapes:
                raise InvalidArgument("[python] expected a parameter of the model, got %r" % name)
            if value.shape != self._shapes[name]:
                raise InvalidArgument("[python] expected %s of %s, got %s" % (name, self._shapes[name], value.shape))
        self._require_equal({name: zlib.crc32(value, zlib.crc32(name.encode())) for name, value in values.items()})
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

    def _require_equal(self, checksums):
        """Collective."""
        for rank, theirs in enumerate(self.world.all_gather(list(checksums.values()))):
            for name, other in zip(checksums, theirs):
                if checksums[name] != other:
                    raise InvalidArgument("[python] expected equal values of %s on all ranks, got others on ranks %d and %d"
                                          % (name, *sorted((rank, self.world.rank))))

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
        for pause_s in (0, 0.001, 0.01, 0.1):
            if self.model.is_returned(block):
                break
            time.sleep(pause_s)  # another thread may be collecting
            gc.collect()  # what only a cycle of references keeps is kept by nobody
        self.model.release(block, what)
        return result


class _Lent(collections.abc.Mapping):
    """Arrays of a block's parameters or gradients by name, while its function runs."""

    def __init__(self, fsdp, block, is_grad):
        self._fsdp, self._block, self._is_grad = fsdp, block, is_grad
        self._arrays = {}
        self._names = [name for name in fsdp._blocks[block] if not (is_grad and "%s.%s" % (block, name) in fsdp._frozen)]

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

    def __iter__(self):
        return iter(self._names)

    def __len__(self):
        return len(self._names)

    def __contains__(self, name):
        return name in self._names

    def take_back(self):
        self._arrays = None


class Checkpointer:
    """Saves and loads the parameters and optimizer states of an Fsdp, which has one of these. Any strategy and number of ranks
    loads them.

    `folder` is on a file system that all ranks share, `keep` how many checkpoints stay, all if 0. With asynchronous=True
    save() returns once the values are copied, and they are written while training goes on. All calls are collective, between
    steps. The folder's files are those of docs/checkpoints.md.
    """

    def __init__(self, fsdp, folder, *, keep=3, asynchronous=True):
        self._model = fsdp.model
        self._model.open_checkpoints(fsdp.world, os.fspath(folder), keep, asynchronous)

    def save(self, step, values=None):
        """Saves what is held after `step` steps, with `values`, {str: str}, for the program. Waits for an earlier save.

        What is at work when the function of run() returns is waited for.
        """
        values = values or {}
        if not all(isinstance(text, str) for item in values.items() for text in item):
            raise InvalidArgument("[python] expected values of str to str, got %r" % (values,))
        self._model.save(step, values)

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
    """What a step takes of one of `ranks` ranks that need not be there, without memory for it; blocks, root,
    optimizer, frozen and options as of Fsdp.

    Returns peak_nbytes and peak_nbytes_by_category of what the engine keeps, sent_nbytes and num_collectives of a step, and
    what Fsdp.plan() says as "plan". What the caller computes, its activations and its time are its own and no part of this.
    """
    return _engine.plan(rank, ranks, *_specs(blocks, root, frozen), optimizer or Sgd(), **options)


def torch_array(array):
    """A PyTorch tensor of the memory of an array that functions of blocks are given, f32 or bf16: for Fsdp(array=...)."""
    import torch
    tensor = torch.from_dlpack(array)
    return tensor.view(torch.bfloat16) if array.dtype == numpy.int16 else tensor


def compare(folder):
    """What the program `compare` has found and written to its --out folder: compare.json, as lists and dictionaries."""
    with open(os.path.join(os.fspath(folder), "compare.json"), encoding="utf-8") as file:
        return json.load(file)


def _shares_memory(array):
    memory = numpy.zeros(1, numpy.float32)
    made = array(memory)
    memory[0] = 1
    return float(made[0]) == 1


def _walk(blocks):
    for block, parameters in blocks.items():
        for name, value in parameters.items():
            if not isinstance(block, str) or not isinstance(name, str):
                raise InvalidArgument("[python] expected names that are str, got %r and %r" % (block, name))
            if not (_is_shape(value) or hasattr(value, "shape") or hasattr(value, "__dlpack__")):
                raise InvalidArgument("[python] expected an array or a shape, got %r (%s.%s)" % (value, block, name))
            yield block, name, value


def _is_shape(value):
    return isinstance(value, (tuple, list))


def _shape_of(value):
    if not _is_shape(value):
        value = value.shape if hasattr(value, "shape") else numpy.from_dlpack(value).shape
    return tuple(operator.index(n) for n in value)


def _f32(name, value):
    """A NumPy array of the values of an array, a tensor of PyTorch, or what else lends its memory by DLPack."""
    if hasattr(value, "detach"):  # PyTorch lends no parameters, and NumPy knows no bf16
        value = value.detach().float() if "bfloat16" in str(value.dtype) else value.detach()
    if _is_lent_by_dlpack(value):
        device, index = value.__dlpack_device__()
        if device not in (1, 3):  # kDLCPU, kDLCUDAHost
            raise InvalidArgument("[python] expected %s in memory of the CPU, got device %d of DLPack's type %d, which is %s"
                                  % (name, index, device, "a GPU of CUDA" if device == 2 else "another one"))
        value = numpy.from_dlpack(value)
    if numpy.iscomplexobj(value):
        raise InvalidArgument("[python] expected real values, got complex ones")
    return numpy.asarray(value, dtype=numpy.float32, order="C")  # keeps a scalar one


def _is_lent_by_dlpack(value):  # NumPy does not lend its read-only arrays
    return hasattr(value, "__dlpack__") and not isinstance(value, (numpy.ndarray, numpy.generic))


def _frozen(names):
    """As a set, of what may be iterated once."""
    if isinstance(names, str):
        raise InvalidArgument("[python] expected a list of frozen parameters, got %r" % names)
    return set(names)


def _specs(blocks, root, frozen):
    """Blocks and root as the engine is told of them."""
    frozen = _frozen(frozen)
    names = {"%s.%s" % (block, name) for block, name, _ in _walk(blocks)}
    if not frozen <= names:
        raise InvalidArgument("[python] expected frozen parameters of the blocks, got %s" % ", ".join(sorted(frozen - names)))
    if root is not None and root not in blocks:
        raise InvalidArgument("[python] expected root to be one of the blocks, got %r" % root)
    specs = {block: (block, [(name, list(_shape_of(value)), "%s.%s" % (block, name) not in frozen)
                             for name, value in parameters.items()]) for block, parameters in blocks.items()}
    return [spec for block, spec in specs.items() if block != root], specs.get(root)
