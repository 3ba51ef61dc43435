"""Cases in one of their processes: made ready, run, and what comes after."""

import itertools
import threading

import jax
import numpy as np
import waiting
from stand_in import StandIn

import jaxcomm
from fault_suite import outcomes, programs
from fault_suite.cases import timeout_seconds
from fault_suite.programs import AXIS, OPERATIONS, RANKS
from jaxcomm.communicator import rendezvous

_SMALL = OPERATIONS["psum_small"]
_INTERNAL_ERROR = 3
# The first call of NCCL's that an operation makes.
_CALL_OF = {
    "all_gather": "ncclAllGather",
    "all_to_all": "ncclAlltoAll",
    "ppermute": "ncclSend",
}
# The seeds of operands: each turn's results differ from those of the turn before.
_CALM, _FAULTY, _NEXT = 1, 2, 3


def policy_of(case):
    fields = {"share": True} if case.around == "sibling" else {}
    fields["on_failure"] = case.on_failure
    if case.around == "eight_live":
        fields["lanes"] = 4
    return jaxcomm.CommPolicy(**fields)


class Delay:
    """What keeps a rank from its collective until ``wait()`` returns, on its device."""

    def __init__(self):
        self.wait = lambda: None

    def __call__(self, x, rank):
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

    def __init__(self, case, is_gpu, process, results):
        """Make the communicators and the programs, and see that they work."""
        self.case = case
        self.results = results
        self.process = process
        self.is_gpu = is_gpu
        self.sizes = programs.GPU_SIZES if is_gpu else programs.CPU_SIZES
        self.operation = OPERATIONS[case.operation]
        self.policy = policy_of(case)
        self.delay = Delay()
        self.behind_is_enqueued = threading.Event()
        self.devices = jax.devices()[:RANKS]
        self.mesh = _mesh(self.devices)
        self._make_communicators()
        self._make_programs()
        self._make_arrays()
        self._make_calm()
        if impatient := case.impatient_lanes(is_gpu):
            self._make_impatient(impatient)

    def _make_calm(self):
        if self.case.around == "first_use":
            self.is_prefilled = True  # as in the same program of other cases
        else:
            stale = self.stale.pop()
            at = _addresses(stale)
            out = self.program(stale, self.calm)
            self._check("calm", out, self.expected[_CALM])
            # Whether a reader would find STALE where nobody wrote.
            self.is_prefilled = _addresses(out) == at
        if self.case.operation == "hop" and not self.is_gpu:
            (default,) = (m for m in jaxcomm.communicators() if m.lane == "default")
            assert default.stats()["copied_calls"] > 0
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

    def _make_communicators(self, impatient=()):
        jaxcomm.finalize()
        # What is shared is what the lanes have by themselves, unless the case asks.
        self.lanes = {
            "idle_lane": ("default", "other"),
            "small_behind_on_other_lane": ("default", "other"),
            "sibling": ("default", "other"),
            "eight_live": ("default", "other", "third", "fourth"),
        }.get(self.case.around, ("default",))
        how = {"policy": self.policy}
        for lane in self.lanes:
            timeout = timeout_seconds(self.is_gpu) if lane in impatient else None
            jaxcomm.init(self.mesh, AXIS, lanes=lane, timeout=timeout, **how)
        if self.case.around == "eight_live":
            jaxcomm.init(_mesh(self.devices[::-1]), AXIS, lanes=self.lanes, **how)
            live = [each for each in jaxcomm.communicators() if each.size == RANKS]
            assert len(live) == 8, jaxcomm.communicators()

    def _make_impatient(self, lanes):
        """Make the communicators anew, such that waits in these lanes time out.

        So does their creation, if a process is stopped meanwhile: then once more.
        """
        texts = {0: "not done after"}
        while any(texts.values()):
            text = ""
            try:
                self._make_communicators(lanes)
            except jaxcomm.CommunicatorError as error:
                text = str(error)
            texts = self._exchange("whether it is made", text)
            assert not any(texts.values()) or "not done after" in str(texts), texts

    def _exchange(self, what, value):
        if self.case.processes == 1:
            return {0: value}
        return rendezvous.exchange((0, 1), self.process, what, value)

    def _make_programs(self):
        run, around, fault = self.operation.run, self.case.around, self.case.fault
        delayed = fault in ("late", "async_error", "stuck")

        def late(x):
            return self.delay(x, RANKS - 1) if delayed else x

        def local(x):
            return run(late(x))

        def beside(x, y):
            begun = jaxcomm.psum_start(late(x), AXIS)
            y = programs.busy(begun.then(y), self.sizes.turns)
            return begun.done(), y

        def with_lax_behind(x):
            out = local(x)
            return out, jax.lax.psum(out, AXIS)

        self.program = programs.jitted(self.mesh, local)
        # Runs when the fault strikes; the plain one before and after.
        self.at_fault = {
            "compute_beside": programs.jitted(self.mesh, beside),
            "lax_behind": programs.jitted(self.mesh, with_lax_behind),
        }.get(around, self.program)
        self.busy_program = programs.jitted(
            self.mesh, lambda y: programs.busy(y, self.sizes.turns)
        )
        self.small = {
            lane: programs.jitted(
                self.mesh, lambda x, lane=lane: jaxcomm.psum(x, AXIS, lane=lane)
            )
            for lane in ("default", *self.lanes[1:])
        }

    def _make_arrays(self):
        """Make all that is read or overwritten later: the devices may be lost then."""
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
        small = {
            seed: programs.operands(_SMALL, self.sizes, seed)
            for seed in (_CALM, _FAULTY)
        }
        self.small_calm, self.small_faulty = (
            programs.spread(self.mesh, rows) for rows in small.values()
        )
        self.small_expected = {
            seed: _SMALL.expected(rows) for seed, rows in small.items()
        }
        self.stale = programs.filled(self.mesh, self.expected[_CALM], 4)
        # One for each lane, one behind, one for another lane afterwards.
        self.small_stale = programs.filled(
            self.mesh, self.small_expected[_CALM], len(self.lanes) + 2
        )

    def _make_busy(self):
        """Make what keeps a device busy, and run it once.

        XLA loads a program's module when it first runs. That waits for all kernels on
        the device, so it would wait for the operation that the program is to be behind.
        """
        rows = programs.busy_rows(self.sizes)
        self.busy = programs.spread(self.mesh, rows)
        self.busy_expected = programs.shifted(self.sizes)
        if self.case.around == "compute_beside":
            out, busy = self.at_fault(self.stale.pop(), self.calm, self.busy)
            self._check("calm, busy beside", out, self.expected[_CALM])
        else:
            stale, self.busy_stale = programs.filled(self.mesh, rows, 2)
            busy = self.busy_program(stale, self.busy)
        self._check("calm, busy", busy, self.busy_expected)

    def _check(self, what, array, expected):
        for shard in array.addressable_shards:
            found, text = outcomes.judge(np.asarray(shard.data), expected[shard.index])
            if found != outcomes.RIGHT:
                raise RuntimeError(f"{what}: {found}: {text}")

    def run(self):
        case = self.case
        if case.fault in ("late", "async_error"):
            self.delay.wait = _wait_for_failure
        if case.fault == "stuck":
            self.delay.wait = waiting.forever
        call = _CALL_OF.get(self.operation.name, "ncclAllReduce")
        if case.fault == "refused" and self.process == 0:
            StandIn().fail(call, _INTERNAL_ERROR)
        if case.around == "first_use" and self.process == 0 and not self.is_gpu:
            StandIn().connect(call)
        told = case.fault == "async_error" and self.process == 0
        sums = len(StandIn().trace("ncclAllReduce")) if told else 0
        begin = self._loop if case.fault == "killed_in_loop" else self._once
        thread = threading.Thread(target=begin)
        thread.start()
        behind = None
        if case.fault != "killed_in_loop":
            waiting.until(lambda: not thread.is_alive() or _is_in_flight())
            if case.around.startswith(("small", "compute_behind")):
                behind = threading.Thread(target=self._behind)
                behind.start()
                if self.is_gpu:
                    waiting.event(self.behind_is_enqueued)
            self.results.say("waiting")
        if told:
            # In flight is also what has not yet come to NCCL.
            StandIn().until_called("ncclAllReduce", sums + 1)
            StandIn().async_error(StandIn().trace("ncclAllReduce")[sums])
        thread.join()
        if behind is not None:
            behind.join()

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
        with self.results.judging(*what):
            outs = self.at_fault(self.stale.pop(), self.faulty, *beside)
            outs = outs if len(what) > 1 else (outs,)
            readers = list(map(self.results.read, what, outs, expected))
            for reader in itertools.chain(*readers):
                reader.join()

    def _behind(self):
        """Queue what is to be behind, from a thread of its own.

        On CPU devices the call may wait for the results of the operation before it.
        """
        lane = "default" if self.case.around == "small_behind" else "other"
        with self.results.judging("behind"):
            if self.case.around == "compute_behind":
                out = self.busy_program(self.busy_stale, self.busy)
                expected = self.busy_expected
            else:
                out = self.small[lane](self.small_stale.pop(), self.small_faulty)
                expected = self.small_expected[_FAULTY]
            self.behind_is_enqueued.set()
            self.results.join("behind", out, expected)

    def _loop(self):
        """Run without a pause until something else than the right result comes."""
        rows = [programs.operands(self.operation, self.sizes, seed) for seed in (7, 8)]
        operands = [programs.spread(self.mesh, each) for each in rows]
        expected = [self.operation.expected(each) for each in rows]
        out, turn = self.stale.pop(), 0
        with self.results.judging("result"):
            while True:
                # The result before, which is wrong for this turn, is overwritten.
                out = self.program(out, operands[turn % 2])
                for shard in out.addressable_shards:
                    outcome, text = outcomes.judge(
                        np.asarray(shard.data), expected[turn % 2][shard.index]
                    )
                    if outcome != outcomes.RIGHT:
                        self.results.row(
                            "result", self.process, outcome, f"{turn}: {text}"
                        )
                        return
                turn += 1
                if turn == 10:
                    self.results.say("waiting")

    def aftermath(self):
        case = self.case
        if case.fault in ("none", "spoilt"):
            return
        self.delay.wait = lambda: None
        with self.results.judging("next"):
            again = self.program(self.stale.pop(), self.next)
            self.results.join("next", again, self.expected[_NEXT])
        if case.around in ("sibling", "idle_lane"):
            with self.results.judging("other lane"):
                again = self.small["other"](self.small_stale.pop(), self.small_faulty)
                self.results.join("other lane", again, self.small_expected[_FAULTY])
        if case.tries_init:
            with self.results.judging("init"):
                jaxcomm.finalize()
                jaxcomm.init(self.mesh, AXIS, policy=self.policy)
                self.results.row("init", self.process, outcomes.RIGHT)
        # Processes that both live would have to meet for it.
        if case.processes == 1 or case.victim is not None:
            with self.results.judging("anew"):
                self._anew()

    def _anew(self):
        jaxcomm.finalize()
        mesh = _mesh(jax.local_devices()[:RANKS])
        jaxcomm.init(mesh, AXIS, policy=self.policy)
        rows = programs.operands(_SMALL, self.sizes, _NEXT)[: mesh.size]
        (stale,) = programs.filled(mesh, rows, 1)
        program = programs.jitted(mesh, lambda x: jaxcomm.psum(x, AXIS))
        out = program(stale, programs.spread(mesh, rows))
        expected = np.tile(rows.sum(0, dtype=rows.dtype), (mesh.size, 1))
        self.results.join("anew", out, expected)


def _mesh(devices):
    return jax.sharding.Mesh(
        np.array(devices), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,)
    )


def _is_in_flight():
    return any(member.stats()["in_flight"] for member in jaxcomm.communicators())


def _is_any_broken():
    worlds = [member.world for member in jaxcomm.communicators()]
    return any(world is not None and world.is_broken for world in worlds)


def _wait_for_failure():
    """Return once this process knows of a failure, be it one of the other process."""
    try:
        waiting.until(_is_any_broken)
    except AssertionError:
        # The runner is to see it hang.
        waiting.forever()


def _addresses(array):
    return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]
