"""The package `tessera`: its bits, its errors, and its ranks as threads and as processes.

TESSERA_REFERENCE names the program of reference.cc; TESSERA_WITHOUT_GLOO says that Gloo need not be there. Each test of processes starts this file with a name of _PROGRAMS.
"""

import hashlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import unittest

import numpy as np

import tessera


def parameters():
    """Names and shapes of reference.cc, with its values."""
    def values(*shape):
        i = np.arange(np.prod(shape))
        return ((i * 5 % 11 - 5) / 8).astype(np.float32).reshape(shape)
    return {"first": {"w": values(5, 3), "b": values(3)}, "second": {"w": values(3, 7)}}


def add_gradient(fsdp, block, rank, step):
    def backward(p, grad):
        for name in p:
            i = np.arange(grad[name].size).reshape(grad[name].shape)
            grad[name] += (((i * 7 + rank * 3 + step * 5) % 17 - 8) / 16).astype(np.float32)
    fsdp.backward(block, backward)


def one_step(fsdp, step, rank=None, lr=0.01):
    fsdp.begin_step()
    for block in ("first", "second"):
        fsdp.forward(block, lambda p: None)
    for block in ("second", "first"):
        add_gradient(fsdp, block, fsdp.world.rank if rank is None else rank, step)
    return fsdp.step(lr, max_norm=1)


def flat(values):
    return np.concatenate([values[name].ravel() for name in ("first.w", "first.b", "second.w")])


def train(world, *, steps=4, **options):
    fsdp = tessera.Fsdp(world, parameters(), optimizer=tessera.AdamW(), **options)
    seen = []
    for step in range(steps):
        one_step(fsdp, step)
        seen.append(flat(fsdp.full_parameters()))
    return np.concatenate(seen)


class Lender:
    """What another framework may have: memory that it lends by DLPack, and no array of NumPy."""

    def __init__(self, array, device=(1, 0)):
        self.array, self.device = array, device

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **how):
        return self.array.__dlpack__(**how)


def message(fn):
    try:
        fn()
    except tessera.Error as error:
        return str(error)
    return ""


class Bits(unittest.TestCase):
    @unittest.skipUnless("TESSERA_REFERENCE" in os.environ, "without the program of reference.cc")
    def test_are_those_of_cpp_for_every_strategy(self):
        for ranks in (1, 3, 4):
            for strategy in tessera.STRATEGIES:
                hybrid = strategy in ("hsdp", "hybrid_zero2", "hfsdp")
                out = subprocess.run([os.environ["TESSERA_REFERENCE"], strategy, str(ranks)], stdout=subprocess.PIPE, text=True, check=True)
                want = np.array([float.fromhex(line) for line in out.stdout.split()], np.float32)
                for got in tessera.run(lambda world: train(world, strategy=strategy), threads=ranks):
                    np.testing.assert_array_equal(got, want, "%s on %d ranks" % (strategy, ranks))
                if hybrid and ranks == 4:
                    got = tessera.run(lambda world: train(world, strategy=strategy, shard_ranks=2), threads=4)
                    np.testing.assert_array_equal(got[0], want)

    def test_are_equal_for_every_option_of_the_schedule(self):
        want = tessera.run(train, threads=2)[0]
        for option in ({"prefetch": 0}, {"reductions_in_flight": 0}, {"unit_min_numel": 1 << 20}, {"strategy": "ddp", "bucket_nbytes": 64}):
            np.testing.assert_array_equal(tessera.run(lambda world: train(world, **option), threads=2)[1], want, str(option))

    def test_one_step_is_what_a_person_computes(self):
        def sgd(world):
            fsdp = tessera.Fsdp(world, {"a": {"w": (2, 2)}}, optimizer=tessera.Sgd(momentum=0.5))
            for _ in range(2):
                fsdp.begin_step()
                fsdp.forward("a", lambda p: None)

                def backward(p, grad):
                    grad["w"] += np.full((2, 2), 1 + world.rank, np.float32)
                    grad["w"] += 1
                fsdp.backward("a", backward)
                norm = fsdp.step(0.1)
            return norm, fsdp.full_parameters()["a.w"]
        for norm, w in tessera.run(sgd, threads=2):  # mean gradient 2.5, velocities 2.5 and 3.75
            self.assertEqual(norm, 5.0)
            np.testing.assert_allclose(w, np.full((2, 2), -0.625), rtol=1e-6)

    def test_weights(self):
        def fn(world):
            fsdp = tessera.Fsdp(world, {"a": {"w": np.zeros(2)}}, optimizer=tessera.Sgd(momentum=0))
            for micro in range(2):
                weight = 2 * world.rank + micro
                fsdp.next_micro_step(weight=weight) if micro else fsdp.begin_step(2, weight=weight)
                fsdp.forward("a", lambda p: None)
                fsdp.backward("a", lambda p, g: g["w"].__iadd__(weight) is None)  # as many terms, each with the gradient 1
            fsdp.step(1)
            return fsdp.full_parameters()["a.w"]
        for w in tessera.run(fn, threads=2):
            np.testing.assert_array_equal(w, [-1, -1])
        with self.assertRaisesRegex(tessera.InvalidArgument, "weight from 0 to 2\\^40, got -1"):
            tessera.run(lambda world: tessera.Fsdp(world, parameters()).begin_step(weight=-1))

    def test_micro_steps_and_evaluation(self):
        def fn(world):
            fsdp = tessera.Fsdp(world, parameters())
            fsdp.begin_step(2)
            for micro in range(2):
                if micro:
                    fsdp.next_micro_step()
                for block in ("first", "second"):
                    fsdp.forward(block, lambda p: None)
                for block in ("second", "first"):
                    add_gradient(fsdp, block, world.rank, micro)
            fsdp.step(1)

            def evaluate():
                seen = [fsdp.evaluate("second", lambda p: p["w"].copy())]
                before = world.sent_nbytes
                seen += [fsdp.evaluate("second", lambda p: p["w"].copy()) for _ in range(3)]
                assert world.sent_nbytes == before, "gathered once"
                return seen
            seen = fsdp.keep_gathered(evaluate)
            return seen, fsdp.full_parameters()["second.w"]
        i = np.arange(21)
        gradient = sum(((i * 7 + r * 3 + s * 5) % 17 - 8) / 16 for r in range(2) for s in range(2)) / 4
        want = parameters()["second"]["w"] - gradient.astype(np.float32).reshape(3, 7)
        for seen, full in tessera.run(fn, threads=2):
            for value in seen + [full]:
                np.testing.assert_array_equal(value, want)

    def test_a_root_is_around_the_others(self):
        def fn(world):
            fsdp = tessera.Fsdp(world, {"root": {"scale": np.ones(1, np.float32)}, "in": {"w": np.ones(3, np.float32)}}, root="root")
            fsdp.begin_step()
            y = fsdp.forward("root", lambda r: fsdp.forward("in", lambda p: 2 * p["w"] * r["scale"]))  # asked for in there

            def inner(p, grad):
                grad["w"] += 2

            def outer(p, grad):
                fsdp.backward("in", inner)
                grad["scale"] += 6
            fsdp.backward("root", outer)
            fsdp.step(0.25)
            return y, fsdp.full_parameters()
        for y, full in tessera.run(fn, threads=3):
            np.testing.assert_array_equal(y, [2, 2, 2])
            np.testing.assert_array_equal(full["in.w"], [0.5, 0.5, 0.5])
            np.testing.assert_array_equal(full["root.scale"], [-0.5])

    def test_frozen_parameters_stay(self):
        def fn(world):
            fsdp = tessera.Fsdp(world, parameters(), frozen=(name for name in ["first.w", "first.b"]))  # which can be read once
            fsdp.begin_step()
            fsdp.forward("first", lambda p: None)
            fsdp.forward("second", lambda p: None)
            add_gradient(fsdp, "second", world.rank, 0)
            trained = fsdp.backward("first", lambda p, grad: (list(p), list(grad), "w" in p, "w" in grad, [b.shape for _, b in p.items()]))
            fsdp.step(1)
            return fsdp.full_parameters(), trained
        full, trained = tessera.run(fn, threads=2)[0]
        np.testing.assert_array_equal(full["first.w"], parameters()["first"]["w"])
        self.assertFalse(np.array_equal(full["second.w"], parameters()["second"]["w"]))
        self.assertEqual(trained, (["w", "b"], [], True, False, [(5, 3), (3,)]))

    def test_a_scalar_is_a_parameter(self):
        def fn(world):
            fsdp = tessera.Fsdp(world, {"a": {"scale": np.float64(3), "shift": np.zeros(())}})
            before = fsdp.full_parameters()
            fsdp.load({"a.shift": np.array(2)})
            return fsdp.evaluate("a", lambda p: (p["scale"].shape, float(p["scale"]), float(p["shift"]))), before, fsdp.full_parameters()
        for seen, before, after in tessera.run(fn, threads=2):
            self.assertEqual(seen, ((), 3, 2))
            self.assertEqual({name: (value.shape, float(value)) for name, value in before.items()}, {"a.scale": ((), 3), "a.shift": ((), 0)})
            self.assertEqual(float(after["a.shift"]), 2)

    def test_values_that_are_lent_by_dlpack(self):
        for dtype in (np.float32, np.float64, np.float16, np.int32):
            values = (np.arange(12).reshape(3, 4).T * 3 - 7).astype(dtype)  # whose strides are not those of C

            def fn(world):
                fsdp = tessera.Fsdp(world, {"a": {"w": Lender(values)}})
                before = fsdp.full_parameters()["a.w"]
                fsdp.load({"a.w": Lender(values + 1)})
                return before, fsdp.full_parameters()["a.w"]
            for before, after in tessera.run(fn, threads=2):
                np.testing.assert_array_equal(before, values)
                np.testing.assert_array_equal(after, values + 1)
        self.assertEqual(tessera.plan({"a": {"w": Lender(np.zeros((8, 2)))}}, ranks=2)["plan"], tessera.plan({"a": {"w": (8, 2)}}, ranks=2)["plan"])

    def test_arrays_are_lent_by_dlpack(self):
        taken = []

        def array(lent):
            taken.append(lent.__dlpack_device__())
            return np.from_dlpack(lent)

        def fn(world):
            fsdp = tessera.Fsdp(world, parameters(), array=array)
            fsdp.evaluate("first", lambda p: None)
            seen = fsdp.evaluate("first", lambda p: p["w"].copy())
            kept = []
            return seen, message(lambda: fsdp.evaluate("first", lambda p: kept.append(p["b"])))  # which NumPy made of the lent memory
        for seen, text in tessera.run(fn, threads=2):
            np.testing.assert_array_equal(seen, parameters()["first"]["w"])
            self.assertIn("copy what you need later (first)", text)
        self.assertEqual(set(taken), {(1, 0)})

    def test_checkpoints_go_on_with_other_ranks_and_strategies(self):
        whole = tessera.run(train, threads=2)[0][-39:]
        with tempfile.TemporaryDirectory() as folder:
            def first(world):
                fsdp = tessera.Fsdp(world, parameters(), optimizer=tessera.AdamW(), strategy="zero3")
                checkpoints = tessera.Checkpointer(fsdp, folder)
                assert checkpoints.load_newest() is None
                for step in range(2):
                    one_step(fsdp, step)
                checkpoints.save(2, {"note": "half"})  # the end waits for it

            def second(world):
                fsdp = tessera.Fsdp(world, parameters(), optimizer=tessera.AdamW(), strategy="zero1")
                loaded = tessera.Checkpointer(fsdp, folder).load_newest()
                assert (loaded["step"], loaded["values"]) == (2, {"note": "half"}), loaded
                for step in range(2, 4):  # ranks 2 and 3 repeat what 0 and 1 do: the same mean
                    one_step(fsdp, step, rank=world.rank % 2)
                return flat(fsdp.full_parameters())
            tessera.run(first, threads=2)
            np.testing.assert_array_equal(tessera.run(second, threads=2)[0], whole)
            np.testing.assert_allclose(tessera.run(second, threads=4)[0], whole, rtol=1e-6)


    def test_the_page_of_the_package_trains(self):
        page = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "docs", "python.md")
        with open(page, encoding="utf-8") as file:
            code = re.search(r"## A training\n\n((?:    .*\n|\n)+)", file.read()).group(1)
        random = np.random.default_rng(0)
        names = {"w1": random.random((2, 8), np.float32), "w2": random.random((8, 1), np.float32), "num_steps": 3,
                 "batch": lambda step, rank: (np.full((4, 2), 1 + step + rank, np.float32), np.zeros((4, 1), np.float32))}
        exec(textwrap.dedent(code), names)
        self.assertEqual(names["parameters"].shape, (2, 8))
        self.assertFalse(np.array_equal(names["parameters"], names["w1"]))


class Errors(unittest.TestCase):
    def test_an_array_that_is_kept_is_told(self):
        kept = []

        def fn(world):
            fsdp = tessera.Fsdp(world, parameters())
            fsdp.begin_step()
            fsdp.forward("first", lambda p: kept.append(p["w"][0]))  # a view of a part
        text = message(lambda: tessera.run(fn, threads=2))
        self.assertIn("copy what you need later (first)", text)

    def test_values_are_read_only_and_gradients_are_written_in_place(self):
        def writes(p):
            p["w"][0] = 1

        def replaces(p, grad):
            grad["w"] = np.zeros((5, 3), np.float32)

        def fn(world):
            fsdp = tessera.Fsdp(world, parameters())
            fsdp.begin_step()
            fsdp.forward("first", writes)
        with self.assertRaisesRegex(ValueError, "read-only"):
            tessera.run(fn)

        def fn2(world):
            fsdp = tessera.Fsdp(world, parameters())
            fsdp.begin_step()
            fsdp.forward("first", lambda p: None)
            fsdp.backward("first", replaces)
        self.assertIn("expected first.w to be written in place", message(lambda: tessera.run(fn2)))

    def test_bad_calls_are_refused(self):
        cases = {
            "expected one of": lambda w: tessera.Fsdp(w, parameters(), strateg="zero3"),
            "zero3": lambda w: tessera.Fsdp(w, parameters(), strategy="zero9"),
            "expected at least 1, got 0 (shard_ranks=0)": lambda w: tessera.Fsdp(w, parameters(), shard_ranks=0),
            "of the kind of prefetch, got 'x'": lambda w: tessera.Fsdp(w, parameters(), prefetch="x"),
            "expected first.w of (5, 3), got (3, 5)": lambda w: tessera.Fsdp(w, parameters()).load({"first.w": np.zeros((3, 5))}),
            "first.b in memory of the CPU, got device 3 of DLPack's type 2, which is a GPU of CUDA":
                lambda w: tessera.Fsdp(w, parameters()).load({"first.b": Lender(np.zeros(3), device=(2, 3))}),
            "a.w in memory of the CPU, got device 0 of DLPack's type 10": lambda w: tessera.Fsdp(w, {"a": {"w": Lender(np.zeros(3), device=(10, 0))}}),
            "with bf16, which NumPy lacks, got <": lambda w: tessera.Fsdp(w, parameters(), param_dtype="bf16", array=np.asarray),
            "got complex ones": lambda w: tessera.Fsdp(w, parameters()).load({"first.b": np.zeros(3, complex)}),
            "keep": lambda w: tessera.Checkpointer(tessera.Fsdp(w, parameters()), ".", keep=-1),
            "expected f32 or bf16, got f64": lambda w: tessera.Fsdp(w, parameters(), param_dtype="f64"),
            "expected frozen parameters of the blocks, got first.x": lambda w: tessera.Fsdp(w, parameters(), frozen=["first.x"]),
            "expected root to be one of the blocks, got 'top'": lambda w: tessera.Fsdp(w, parameters(), root="top"),
            "begin_step": lambda w: tessera.Fsdp(w, parameters()).step(0.1),
            "got 'third'": lambda w: tessera.Fsdp(w, parameters()).forward("third", print),
            "first.w": lambda w: tessera.Fsdp(w, parameters()).load({"first.w": np.zeros(3)}),
            "expected a parameter of the model, got 'no'": lambda w: tessera.Fsdp(w, parameters()).load({"no": np.zeros(3)}),
            "expected array=tessera.torch_array": lambda w: tessera.Fsdp(w, parameters(), param_dtype="bf16"),
            "expected a parameter of first, got 'v'": lambda w: tessera.Fsdp(w, parameters()).evaluate("first", lambda p: p["v"]),
        }
        for want, call in cases.items():
            with self.subTest(want):
                self.assertIn(want, message(lambda: tessera.run(call)))
        self.assertIn("at least 1 thread", message(lambda: tessera.run(print, threads=0)))

    def test_values_that_differ_between_ranks_are_told(self):
        def fn(world):
            blocks = parameters()
            blocks["first"]["b"] += world.rank
            tessera.Fsdp(world, blocks)
        self.assertIn("expected equal values of first.b on all ranks, got others on ranks 0 and 1",
                      message(lambda: tessera.run(fn, threads=2)))

    def test_what_must_be_equal_or_shared_is_checked(self):
        cases = {
            "equal values of the optimizer": lambda w: tessera.Fsdp(w, parameters(), optimizer=tessera.Sgd(momentum=0.5 * w.rank)),
            "got a copy": lambda w: tessera.Fsdp(w, parameters(), array=np.copy),
            "got that of a.w as b.w": lambda w: (lambda v: tessera.Fsdp(w, {"a": {"w": v}, "b": {"w": v}}))(np.zeros(2)),
            "expected a finite lr, got nan": lambda w: one_step(tessera.Fsdp(w, parameters()), 0, lr=float("nan")),
            "expected begin_step() before forward()": lambda w: tessera.Fsdp(w, parameters()).forward("first", print),
            "expected an array or a shape, got 3.0 (a.w)": lambda w: tessera.Fsdp(w, {"a": {"w": 3.0}}),
            "expected names that are str": lambda w: tessera.Fsdp(w, {0: {"w": (2,)}}),
            "expected a list of frozen parameters": lambda w: tessera.Fsdp(w, parameters(), frozen="first.w"),
        }
        for want, call in cases.items():
            with self.subTest(want):
                self.assertIn(want, message(lambda: tessera.run(call, threads=2)))

    def test_a_gradient_that_is_not_finite_is_named(self):
        def fn(world):
            fsdp = tessera.Fsdp(world, parameters())
            fsdp.begin_step()
            fsdp.forward("second", lambda p: None)

            def backward(p, grad):
                grad["w"] += np.float32("nan") if world.rank == 1 else np.float32(0)
            fsdp.backward("second", backward)
            fsdp.step(0.1)
        self.assertIn("second.w", message(lambda: tessera.run(fn, threads=2)))

    def test_the_first_error_of_a_rank_ends_all_with_its_type(self):
        def fn(world):
            fsdp = tessera.Fsdp(world, parameters())
            if world.rank == 1:
                raise KeyError("mine")
            try:
                one_step(fsdp, 0)
            except tessera.CommError as error:
                others.append(str(error))
                raise
        for _ in range(30):
            others = []
            with self.assertRaisesRegex(KeyError, "mine"):
                tessera.run(fn, threads=3)
            self.assertEqual(len(others), 2)
            self.assertIn("KeyError: 'mine'", others[0])

    def test_an_array_that_is_kept_stays_told_and_readable(self):
        kept = []

        def fn(world):
            fsdp = tessera.Fsdp(world, parameters())
            fsdp.begin_step()
            for _ in range(3):  # a caught error does not make it right
                try:
                    fsdp.forward("first", lambda p: kept.append(p["w"]))
                except tessera.InvalidArgument as error:
                    texts.append(str(error))
        texts = []
        tessera.run(fn)
        self.assertIn("copy what you need later (first)", texts[0])
        self.assertIn("of which nothing was kept, got first again", texts[1])
        np.testing.assert_array_equal(kept[0], parameters()["first"]["w"])  # its memory is there still

    def test_a_block_in_itself_is_refused(self):
        def fn(world):
            fsdp = tessera.Fsdp(world, parameters())
            fsdp.begin_step()
            fsdp.forward("first", lambda p: fsdp.forward("first", lambda q: None))
        self.assertIn("got first again", message(lambda: tessera.run(fn)))

    def test_a_frozen_parameter_has_no_gradient(self):
        def fn(world):
            fsdp = tessera.Fsdp(world, parameters(), frozen=["first.w"])
            fsdp.begin_step()
            fsdp.forward("first", lambda p: None)
            fsdp.backward("first", lambda p, grad: grad["w"])
        self.assertIn("expected a parameter that is trained, got first.w", message(lambda: tessera.run(fn)))

    def test_what_is_kept_after_the_end_can_do_nothing(self):
        kept = []

        def fn(world):
            fsdp = tessera.Fsdp(world, parameters())
            kept.extend([world, fsdp])
        tessera.run(fn)
        self.assertIn("has returned", message(lambda: kept[0].rank))
        self.assertIn("has returned", message(lambda: kept[1].begin_step()))

    def test_a_rank_that_stays_away_is_named(self):
        def fn(world):
            if world.rank == 0:
                world.barrier()
            else:
                time.sleep(3)
        self.assertIn("rank 1", message(lambda: tessera.run(fn, threads=2, deadline_s=1)))

    def test_an_interrupt_ends_all_ranks(self):
        # Whoever starts a program in the background may have it ignore interrupts.
        self.addCleanup(signal.signal, signal.SIGINT, signal.signal(signal.SIGINT, signal.default_int_handler))

        def fn(world):
            if world.rank == 0:
                threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
            while True:
                world.barrier()
        with self.assertRaises(KeyboardInterrupt):
            tessera.run(fn, threads=2)


class Around(unittest.TestCase):
    def test_values_of_all_ranks(self):
        got = tessera.run(lambda world: world.all_gather([world.rank, 0.1]), threads=3)
        self.assertEqual(got, [[[0, 0.1], [1, 0.1], [2, 0.1]]] * 3)

    def test_a_plan_counts_what_a_run_does(self):
        for strategy in ("ddp", "zero2", "zero3"):
            def fn(world):
                fsdp = tessera.Fsdp(world, parameters(), optimizer=tessera.AdamW(), strategy=strategy)
                one_step(fsdp, 0)
                before = world.sent_nbytes
                one_step(fsdp, 1)
                return world.sent_nbytes - before, fsdp.peak_nbytes, fsdp.plan()
            sent, peak, lines = tessera.run(fn, threads=4)[0]
            planned = tessera.plan(parameters(), ranks=4, optimizer=tessera.AdamW(), strategy=strategy)
            self.assertEqual((planned["sent_nbytes"], planned["plan"]), (sent, lines), strategy)
            self.assertEqual(planned["peak_nbytes"], peak, strategy)
        self.assertEqual(tessera.plan({"a": {"w": (10, 10)}}, ranks=1, strategy="ddp")["sent_nbytes"], 0)

    def test_plans_of_many_ranks(self):
        layer = {"w": (4096, 4096)}
        blocks = {"layer%d" % i: layer for i in range(32)}
        whole = 4 * 32 * 4096 * 4096
        ddp = tessera.plan(blocks, ranks=256, optimizer=tessera.AdamW(), strategy="ddp")
        zero3 = tessera.plan(blocks, ranks=256, optimizer=tessera.AdamW(), strategy="zero3")
        self.assertGreaterEqual(ddp["peak_nbytes"], 4 * whole)  # parameters, gradients, two states
        self.assertLess(zero3["peak_nbytes"], whole)
        self.assertEqual(zero3["peak_nbytes_by_category"]["optimizer"], 2 * whole // 256)

    def test_comparisons_are_read(self):
        with tempfile.TemporaryDirectory() as folder:
            with open(folder + "/compare.json", "w", encoding="utf-8") as file:
                file.write('{"verdict": {"agrees": true}}')
            self.assertTrue(tessera.compare(folder)["verdict"]["agrees"])


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Processes(unittest.TestCase):
    def check(self, outs):
        want = train_digest(tessera.run(train, threads=4)[0])
        self.assertEqual([line for out in outs for line in out.split("\n") if line], [want] * 4)

    def test_of_mpirun(self):
        if not os.path.exists("/usr/bin/mpirun.openmpi"):
            self.skipTest("without Open MPI")
        out = subprocess.run(["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", "2", sys.executable, __file__, "train"],
                             stdout=subprocess.PIPE, text=True, timeout=120, check=True)
        self.check([out.stdout])

    def test_of_torchrun(self):  # by the variables that it sets
        port = str(free_port())
        processes = []
        for rank in "01":
            variables = dict(os.environ, RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1",
                             MASTER_PORT=port)
            processes.append(subprocess.Popen([sys.executable, __file__, "train"], env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        ends = [process.communicate(timeout=120) for process in processes]
        if "TESSERA_WITHOUT_GLOO" in os.environ and any("libtessera_gloo.so" in err for _, err in ends):
            self.skipTest("without Gloo")
        self.assertEqual([process.returncode for process in processes], [0, 0], ends)
        self.check([out for out, _ in ends])


def train_digest(values):
    return hashlib.sha256(values.tobytes()).hexdigest()


_PROGRAMS = {"train": lambda: [print(train_digest(values)) for values in tessera.run(train, threads=2)]}

if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1] in _PROGRAMS:
        _PROGRAMS[sys.argv[1]]()
    else:
        unittest.main()
