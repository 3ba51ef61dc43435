"""A case in one of its processes: made ready, run, and what comes after."""

import contextlib
import ctypes
import json
import os
import threading
import time

import jax
import numpy as np

import jaxcomm
from fault_suite import outcomes, programs
from fault_suite.cases import LATE_SECONDS
from fault_suite.lines import say
from fault_suite.programs import AXIS, OPERATIONS, RANKS
from jaxcomm.communicator import rendezvous

# More than any wait of a rank; the parent ends the process long before.
_FOREVER_SECONDS = 600
_SMALL = OPERATIONS["psum_small"]
_INTERNAL_ERROR, _REMOTE_ERROR = 3, 6
# The first call of NCCL's that an operation makes.
_CALL_OF = {"all_gather": "ncclAllGather", "ppermute": "ncclSend"}
# The seeds of operands: each turn's results differ from those of the turn before.
_CALM, _FAULTY, _NEXT = 1, 2, 3


def policy_of(case):
    """Returns how the case's communicators are made."""
    fields = {"share": True} if case.around == "sibling" else {}
    fields["on_failure"] = case.on_failure
    if case.around == "eight_live":
        fields["lanes"] = 4
    return jaxcomm.CommPolicy(**fields)


class Delay:
    """What keeps a rank from its collective: in a callback, on its own device alone.

    Attributes:
      wait: returns when the rank may come.
    """

    def __init__(self):
        self.wait = lambda: None

    def __call__(self, x, rank):
        """Returns x, on the rank once it may come."""
        scalar = jax.ShapeDtypeStruct((), np.float32)
        zero = jax.lax.cond(
            jax.lax.axis_index(AXIS) == rank,
            lambda: jax.pure_callback(self._wait, scalar),
            lambda: jax.numpy.float32(0),
        )
        return x + zero.astype(x.dtype)

    def _wait(self):
        self.wait()
        return np.float32(0)


class Trial:
    """A case in this process: made ready, run, and what comes after."""

    def __init__(self, case, is_gpu, process, deadline):
        """Makes the communicators and the programs, and sees that they work.

        Args:
          case: what happens.
          is_gpu: whether on GPUs.
          process: which of the case's it is.
          deadline: how long a rank waits for the other, in seconds.
        """
        self.case = case
        self.process = process
        self.is_gpu = is_gpu
        self.sizes = programs.GPU_SIZES if is_gpu else programs.CPU_SIZES
        self.operation = OPERATIONS[case.operation]
        self.policy = policy_of(case)
        self.deadline = deadline
        self.delay = Delay()
        self.devices = jax.devices()[:RANKS]
        self.mesh = _mesh(self.devices)
        self._make_communicators()
        self._make_programs()
        self._make_arrays()
        self._compile()
        self._make_calm()

    def _make_calm(self):
        """Runs all programs before there is a fault, and ends if one is not right."""
        stale = self.stale.pop()
        at = _addresses(stale)
        out = self.program(stale, self.calm)
        self._check("calm", out, self.expected[_CALM])
        # Whether a reader would find STALE where nobody wrote.
        self.is_prefilled = _addresses(out) == at
        for lane, small in self.small.items():
            out = small(self.small_stale.pop(), self.small_calm)
            self._check(f"calm lane {lane}", out, self.small_expected[_CALM])
        if self.case.around == "lax_behind":
            # XLA makes its own communicators when a program of theirs first runs.
            out, total = self.at_fault(self.stale.pop(), self.calm)
            self._check("calm, lax behind", out, self.expected[_CALM])
            self._check("calm lax", total, RANKS * self.expected[_CALM])
        if self.case.around.startswith("compute"):
            self._make_busy()

    def _make_communicators(self):
        jaxcomm.finalize()
        # What is shared is what the lanes have by themselves, unless the case asks.
        self.lanes = {
            "idle_lane": ("default", "other"),
            "small_behind_on_other_lane": ("default", "other"),
            "sibling": ("default", "other"),
            "eight_live": ("default", "other", "third", "fourth"),
        }.get(self.case.around, ("default",))
        how = {"lanes": self.lanes, "policy": self.policy, "timeout": self.deadline}
        jaxcomm.init(self.mesh, AXIS, **how)
        if self.case.around == "eight_live":
            turned = _mesh(self.devices[::-1])
            jaxcomm.init(turned, AXIS, **how)
            live = [each for each in jaxcomm.communicators() if each.size == RANKS]
            assert len(live) == 8, jaxcomm.communicators()

    def _make_programs(self):
        run, around, fault = self.operation.run, self.case.around, self.case.fault
        delayed = fault in ("late", "async_error", "stuck")
        late_rank = 0 if fault == "stuck" else RANKS - 1

        def late(x):
            return self.delay(x, late_rank) if delayed else x

        def local(x):
            return run(late(x), None)

        def beside(x, y):
            begun = jaxcomm.psum_start(late(x), AXIS)
            y = programs.busy(begun.then(y), self.sizes.turns)
            return begun.done(), y

        def with_lax_behind(x):
            out = local(x)
            return out, jax.lax.psum(out, AXIS)

        self.program = programs.jitted(self.mesh, local, 1)
        # Runs when the fault strikes; the plain one before and after.
        self.at_fault = {
            "compute_beside": programs.jitted(self.mesh, beside, 2, 2),
            "lax_behind": programs.jitted(self.mesh, with_lax_behind, 1, 2),
        }.get(around, self.program)
        self.busy_program = programs.jitted(
            self.mesh, lambda y: programs.busy(y, self.sizes.turns), 1
        )
        self.small = {
            lane: programs.jitted(
                self.mesh, lambda x, lane=lane: jaxcomm.psum(x, AXIS, lane=lane), 1
            )
            for lane in ("default", *self.lanes[1:])
        }

    def _make_arrays(self):
        """Makes all that is read or overwritten later: the devices may be lost then."""
        of = {
            seed: programs.operands(self.operation, self.sizes, seed)
            for seed in (_CALM, _FAULTY, _NEXT)
        }
        self.calm, self.faulty, self.next = (
            programs.spread(self.mesh, rows) for rows in of.values()
        )
        self.expected = {
            seed: self.operation.expected(rows) for seed, rows in of.items()
        }
        small = programs.operands(_SMALL, self.sizes, _FAULTY)
        self.small_faulty = programs.spread(self.mesh, small)
        self.small_expected = {
            seed: _SMALL.expected(programs.operands(_SMALL, self.sizes, seed))
            for seed in (_CALM, _FAULTY)
        }
        self.stale = programs.filled(self.mesh, self.expected[_CALM], 4)
        # One for each lane, one behind, one for another lane afterwards.
        self.small_stale = programs.filled(
            self.mesh, self.small_expected[_CALM], len(self.lanes) + 2
        )

    def _compile(self):
        """Compiles what runs before the fault, and waits for the other process.

        The deadline of the first sums would count what the other still compiles. Calls
        find in JAX's caches what was compiled here.
        """
        first = self.stale[0], self.calm
        self.program.lower(*first).compile()
        if self.case.around == "lax_behind":
            self.at_fault.lower(*first).compile()
        rows = programs.operands(_SMALL, self.sizes, _CALM)
        self.small_calm = programs.spread(self.mesh, rows)
        for small in self.small.values():
            small.lower(self.small_stale[0], self.small_calm).compile()
        if self.case.processes > 1:
            rendezvous.exchange((0, 1), self.process, "ready for the first sums", None)

    def _make_busy(self):
        """Makes what keeps a device busy; it is compiled, not run: it takes seconds."""
        rows = programs.busy_rows(self.sizes)
        self.busy = programs.spread(self.mesh, rows)
        self.busy_expected = programs.shifted(self.sizes)
        stale, self.busy_stale = programs.filled(self.mesh, rows, 2)
        # The driver and cuBLAS load a kernel when it first runs, and may wait for all
        # others to end.
        once = programs.jitted(self.mesh, lambda y: programs.busy(y, 1), 1)
        jax.block_until_ready(once(stale, self.busy))
        if self.case.around == "compute_beside":
            lowered = self.at_fault.lower(self.stale[0], self.faulty, self.busy)
            self.at_fault = lowered.compile()
        else:
            lowered = self.busy_program.lower(self.busy_stale, self.busy)
            self.busy_program = lowered.compile()

    def _check(self, what, array, expected):
        for shard in array.addressable_shards:
            found, text = outcomes.judge(np.asarray(shard.data), expected[shard.index])
            if found != outcomes.RIGHT:
                raise RuntimeError(f"{what}: {found}: {text}")

    # -- while the fault strikes --------------------------------------------------

    def run(self):
        """Starts the program, says when it waits, and judges what comes."""
        case = self.case
        if case.fault in ("late", "async_error"):
            self.delay.wait = self._be_late
        if case.fault == "stuck":
            self.delay.wait = lambda: time.sleep(_FOREVER_SECONDS)
        if case.fault == "refused" and self.process == 0:
            call = _CALL_OF.get(self.operation.name, "ncclAllReduce")
            _stand_in().jaxcommFakeFail(call.encode(), 0, _INTERNAL_ERROR)
        begin = self._loop if case.fault == "killed_in_loop" else self._once
        thread = threading.Thread(target=begin)
        say("begun", case=str(case))
        thread.start()
        behind = None
        if case.fault != "killed_in_loop":
            _until(lambda: not thread.is_alive() or _is_in_flight())
            if case.around in ("small_behind", "small_behind_on_other_lane"):
                behind = threading.Thread(target=self._small_behind)
            elif case.around == "compute_behind":
                behind = threading.Thread(target=self._compute_behind)
            if behind is not None:
                behind.start()
            if self.is_gpu:
                # What is enqueued is to be running.
                time.sleep(0.2)
            say("waiting", case=str(case))
        if case.fault == "async_error" and self.process == 0:
            _report_async_error()
        thread.join()
        if behind is not None:
            behind.join()

    def _be_late(self):
        """Waits until the rank that waits for this one has failed, and a while longer.

        Of a failure in the other process this one is told, or it sees the process end.
        """
        _until(_is_any_broken)
        time.sleep(LATE_SECONDS)

    def _once(self):
        around = self.case.around
        beside = (self.busy,) if around == "compute_beside" else ()
        expected = [self.expected[_FAULTY]]
        what = ["result"]
        if beside:
            expected.append(self.busy_expected)
            what.append("beside")
        elif around == "lax_behind":
            expected.append(RANKS * self.expected[_FAULTY])
            what.append("behind")
        with self._judging(*what):
            outs = self.at_fault(self.stale.pop(), self.faulty, *beside)
            outs = outs if len(what) > 1 else (outs,)
            readers = [
                reader
                for each in zip(what, outs, expected, strict=True)
                for reader in self._read(*each)
            ]
            for reader in readers:
                reader.join()

    # A call may wait for its results, as those on CPU devices do: these two have
    # threads of their own, and come when the operation before them is under way.

    def _small_behind(self):
        lane = "default" if self.case.around == "small_behind" else "other"
        with self._judging("behind"):
            out = self.small[lane](self.small_stale.pop(), self.small_faulty)
            self._join("behind", out, self.small_expected[_FAULTY])

    def _compute_behind(self):
        with self._judging("behind"):
            out = self.busy_program(self.busy_stale, self.busy)
            self._join("behind", out, self.busy_expected)

    def _loop(self):
        """Runs without a pause until something else than the right result comes."""
        rows = [programs.operands(self.operation, self.sizes, seed) for seed in (7, 8)]
        operands = [programs.spread(self.mesh, each) for each in rows]
        expected = [self.operation.expected(each) for each in rows]
        out, turn = self.stale.pop(), 0
        with self._judging("result"):
            while True:
                # The result before, which is wrong for this turn, is overwritten.
                out = self.program(out, operands[turn % 2])
                for shard in out.addressable_shards:
                    outcome, text = outcomes.judge(
                        np.asarray(shard.data), expected[turn % 2][shard.index]
                    )
                    if outcome != outcomes.RIGHT:
                        self._row("result", self.process, outcome, f"{turn}: {text}")
                        return
                turn += 1
                if turn == 10:
                    say("waiting", case=str(self.case))

    # -- what comes after ---------------------------------------------------------

    def aftermath(self):
        """Calls the communicator again, its siblings, and what is made anew."""
        case = self.case
        if case.fault in ("none", "spoilt"):
            return
        self.delay.wait = lambda: None
        with self._judging("next"):
            again = self.program(self.stale.pop(), self.next)
            self._join("next", again, self.expected[_NEXT])
        if case.around in ("sibling", "idle_lane"):
            with self._judging("other lane"):
                again = self.small["other"](self.small_stale.pop(), self.small_faulty)
                self._join("other lane", again, self.small_expected[_FAULTY])
        if case.tries_init:
            # For who is not refused, and waits for the process that has gone.
            os.environ["JAXCOMM_TIMEOUT"] = "3"
            with self._judging("init"):
                jaxcomm.finalize()
                jaxcomm.init(self.mesh, AXIS, policy=self.policy)
                self._row("init", self.process, outcomes.RIGHT)
        # Processes that both live would have to meet for it.
        if case.processes == 1 or case.victim is not None:
            with self._judging("anew"):
                self._anew()

    def _anew(self):
        """Goes on with the devices of this process."""
        jaxcomm.finalize()
        mesh = _mesh(jax.local_devices()[:RANKS])
        jaxcomm.init(mesh, AXIS, policy=self.policy)
        rows = programs.operands(_SMALL, self.sizes, _NEXT)[: mesh.size]
        (stale,) = programs.filled(mesh, rows, 1)
        program = programs.jitted(mesh, lambda x: jaxcomm.psum(x, AXIS), 1)
        out = program(stale, programs.spread(mesh, rows))
        expected = np.tile(rows.sum(0, dtype=rows.dtype), (mesh.size, 1))
        self._join("anew", out, expected)

    # -- judging ------------------------------------------------------------------

    def _join(self, what, array, expected):
        for reader in self._read(what, array, expected):
            reader.join()

    def _read(self, what, array, expected):
        """Starts to read each rank's result beside the others'; returns the threads."""
        readers = []
        for shard in array.addressable_shards:
            readers.append(
                threading.Thread(
                    target=self._judge, args=(what, shard, expected[shard.index])
                )
            )
            readers[-1].start()
        return readers

    def _judge(self, what, shard, expected):
        rank = self.devices.index(shard.device)
        try:
            found = np.asarray(shard.data)
        except Exception as error:
            self._row(what, rank, outcomes.RAISED, _text(error))
            return
        now = time.monotonic()
        if self.case.fault == "spoilt" and rank == 0:
            found = found.copy()
            found.flat[-1] += 1
        self._row(what, rank, *outcomes.judge(found, expected), now)

    @contextlib.contextmanager
    def _judging(self, *whats):
        """Says of a call that raises that all ranks of this process raised."""
        try:
            yield
        except Exception as error:
            for what in whats:
                for rank, device in enumerate(self.devices):
                    if device.process_index == jax.process_index():
                        self._row(what, rank, outcomes.RAISED, _text(error))

    def _row(self, what, rank, outcome, text="", now=None):
        at = time.monotonic() if now is None else now
        say(
            "row", case=str(self.case), what=what, rank=rank, outcome=outcome,
            text=text, at=at,
        )  # fmt: skip


def _text(error):
    return f"{type(error).__name__}: {error}"


def _mesh(devices):
    return jax.sharding.Mesh(
        np.array(devices), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,)
    )


def _is_in_flight():
    return any(member.stats()["in_flight"] for member in jaxcomm.communicators())


def _is_any_broken():
    """Says whether a communicator of this process has failed, for good."""
    worlds = [member.world for member in jaxcomm.communicators()]
    return any(world is not None and world.is_broken for world in worlds)


def _until(condition):
    """Waits for a condition, but not for ever."""
    end = time.monotonic() + _FOREVER_SECONDS
    while not condition() and time.monotonic() < end:
        time.sleep(0.002)


def _addresses(array):
    return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]


def _stand_in():
    library = ctypes.CDLL(os.environ["JAXCOMM_NCCL_LIBRARY"])
    library.jaxcommFakeTrace.restype = ctypes.c_char_p
    library.jaxcommFakeAsyncError.argtypes = ctypes.c_int64, ctypes.c_int
    return library


def _report_async_error():
    library = _stand_in()
    calls = [json.loads(line) for line in library.jaxcommFakeTrace().splitlines()]
    last = [each for each in calls if each["name"] == "ncclAllReduce"][-1]
    assert library.jaxcommFakeAsyncError(last["comm"], _REMOTE_ERROR) == 1
