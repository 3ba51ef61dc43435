"""The strategies by name, what they cost by closed forms, and which is chosen."""

import dataclasses
import functools
import logging
from collections.abc import Callable

import numpy as np

from jaxcomm import compat
from jaxcomm.attention.mask import Mask
from jaxcomm.attention.schedules import Schedule
from jaxcomm.attention.strategies.all_gather import AllGather
from jaxcomm.attention.strategies.halo import Halo
from jaxcomm.attention.strategies.strategy import Problem, Strategy
from jaxcomm.attention.strategies.ulysses import Ulysses, Usp
from jaxcomm.attention.strategies.walk import Ring
from jaxcomm.machine import MACHINES, Machine

_logger = logging.getLogger("jaxcomm.attention")

# A new strategy is one file and one entry here: a function of the problem.
STRATEGIES: dict[str, Callable[[Problem], Strategy]] = {
    "ring": lambda problem: Ring(),
    "all_gather": lambda problem: AllGather(),
    "ulysses": lambda problem: Ulysses(problem.size),
    "usp": Usp.of,
    "halo": lambda problem: Halo(),
}


def get_strategy(
    strategy: str | Strategy, problem: Problem, what: str = "ring_attention"
) -> Strategy:
    """Return the strategy of that name, or the argument if it is one already.

    By the name "auto" it is the fastest on the platform of the mesh.
    """
    if isinstance(strategy, str) and strategy == "auto":
        platform = "cpu" if compat.mesh_platform() == "cpu" else "gpu"
        return _choose(problem, MACHINES[platform])
    names = ", ".join(map(repr, (*STRATEGIES, "auto")))
    if isinstance(strategy, Strategy):
        chosen = strategy
    elif not isinstance(strategy, str):
        raise TypeError(
            f"{what}: strategy={strategy!r} is of type {type(strategy).__name__}. Pass "
            f"one of {names} or an instance of Strategy."
        )
    elif strategy in STRATEGIES:
        chosen = STRATEGIES[strategy](problem)
    else:
        raise ValueError(
            f"{what}: strategy={strategy!r} is not known. Pass one of {names}, or an "
            "instance of Strategy."
        )
    reason = chosen.why_not(problem)
    if reason is not None:
        raise ValueError(
            f"{what}: strategy={chosen.name!r} was asked for, but {reason}. "
            "Pass strategy='ring', or 'auto' for the best that is possible."
        )
    return chosen


# Products of a backward pass for each one of the forward pass.
_BACKWARD = 2.5
# Heads of keys and values that differ are cuDNN's. What its hops of a ring take, over
# one of its kernels with as much work, forward and backward: on GPUs. Fitted to two
# H100s, keys of 192 and values of 128; the table is in test_comparison.py.
_HOPS_BY_CUDNN = 1.3, 2.0
# Times that differ by no more, relative, are equal.
_EQUAL = 1e-6
# Of a device's memory, what "auto" lets keys and values take at once.
_SHARE = 1 / 64
# These send keys from rank to rank, and neither gather them nor exchange heads.
_SHIFTING = ("ring", "halo")


@dataclasses.dataclass(frozen=True)
class ComparedStrategy:
    """One strategy beside the others.

    Attributes:
      strategy: its name.
      why_not: why it cannot compute this, or None; then the rest is 0.
      sends: collectives of a forward pass that follow one another.
      forward_bytes: that a rank sends in the forward pass.
      backward_bytes: that a rank sends in the backward pass.
      memory: bytes of keys and values that a rank holds at once, forward.
      flops: of the busiest rank, forward.
      balance: work of the busiest rank, over the mean.
      seconds: of both passes, by the machine's numbers. It compares strategies, and
        does not predict a run.
    """

    strategy: str
    why_not: str | None = None
    sends: int = 0
    forward_bytes: float = 0
    backward_bytes: float = 0
    memory: float = 0
    flops: float = 0
    balance: float = 0
    seconds: float = 0


def _compared(
    strategy: Strategy, problem: Problem, machine: Machine
) -> ComparedStrategy:
    """Return what a strategy costs; documents and padding of a batch are not known."""
    reason = strategy.why_not(problem)
    if reason is not None:
        return ComparedStrategy(strategy.name, reason)
    cost = strategy.cost(problem)
    layout = problem.query_layout
    # Of documents most are within a rank: one that has late tokens sees no more than
    # others. Not the layout, nor the problem: a cache would keep the trace of its order
    # alive.
    is_rule = layout.is_static and not problem.has_documents
    schedule = layout.schedule if is_rule else None
    pairs = _seen_keys(schedule, layout.size, layout.length, problem.mask)
    by_group = pairs.reshape(-1, cost.width).mean(1)
    per_pair = 2 * problem.batch * problem.heads
    per_pair *= problem.head_size + problem.value_size
    flops = float(by_group.max()) * per_pair

    # With documents rings were 1.8 to 3 times as fast as Ulysses, on 2 and 4 H100s.
    steps = 0 if problem.has_documents else cost.steps

    by_cudnn = machine.platform == "gpu" and problem.head_size != problem.value_size
    part, (forward_hops, backward_hops) = cost.hops / (cost.hops + 1), _HOPS_BY_CUDNN

    def seconds(work, sent, sends, of_hops):
        work *= 1 + by_cudnn * part * (of_hops - 1)
        compute = work / machine.flops + steps * machine.step
        wire = sent / machine.bytes_per_second + sends * machine.latency
        hidden = 0.0
        if cost.overlaps and sends:
            # The own block is computed before anything has arrived, or meanwhile.
            hidden = min(wire, compute * sends / (sends + 1))
        return compute + wire - hidden

    return ComparedStrategy(
        strategy.name,
        sends=cost.sends,
        forward_bytes=cost.forward_bytes,
        backward_bytes=cost.backward_bytes,
        memory=cost.memory,
        flops=flops,
        balance=float(by_group.max() / max(pairs.mean(), 1e-9)),
        seconds=seconds(flops, cost.forward_bytes, cost.sends, forward_hops)
        + seconds(
            _BACKWARD * flops, cost.backward_bytes, 2 * cost.sends, backward_hops
        ),
    )


def compared(problem: Problem, machine: Machine) -> dict[str, ComparedStrategy]:
    """Return what each strategy costs, by name."""
    return {
        name: _compared(make(problem), problem, machine)
        for name, make in STRATEGIES.items()
    }


def fastest(
    rows: dict[str, ComparedStrategy], problem: Problem, machine: Machine
) -> str:
    """Return the strategy that "auto" is, a function of shapes and options alone.

    It is the possible one of least time; of equals that which sends least. Keys and
    values that it holds take at most 1/64 of the machine's memory, unless it is the
    ring. The model knows no bias, no lengths of documents and no order that is data:
    with them it is the ring or the halo.
    """
    layouts = problem.query_layout, problem.key_layout
    is_known = not (problem.has_documents or problem.has_bias)
    is_known = is_known and all(layout.is_static for layout in layouts)
    most = _SHARE * machine.memory if machine.memory else float("inf")
    possible = [
        row
        for name, row in rows.items()
        if row.why_not is None
        and (is_known or name in _SHIFTING)
        and (row.memory <= most or name == "ring")
    ]
    least = min(row.seconds for row in possible)
    equals = [row for row in possible if row.seconds <= least * (1 + _EQUAL)]
    return min(equals, key=lambda row: row.forward_bytes).strategy


def _choose(problem: Problem, machine: Machine) -> Strategy:
    """Return the strategy that "auto" is, and log it once at the level of debug."""
    layouts = problem.query_layout, problem.key_layout
    # Layers of a model ask alike. A cache would keep the trace of an order alive.
    is_rule = all(layout.is_static for layout in layouts)
    rows, name = (_found if is_rule else _found.__wrapped__)(problem, machine)
    if _logger.isEnabledFor(logging.DEBUG):
        layout, least = problem.query_layout, rows[name].seconds
        others = ", ".join(
            f"{row.strategy} {row.seconds / least:.2f}"
            for row in rows.values()
            if row.why_not is None
        )
        _log_once(
            f"strategy='auto' is {name!r}: {layout.size} ranks, "
            f"{layout.schedule.name}, {layout.length} tokens, batch {problem.batch}, "
            f"{problem.heads}/{problem.key_heads} heads of {problem.head_size}, "
            f"documents: {problem.has_documents}, bias: {problem.has_bias}. Relative "
            f"times by the model: {others}."
        )
    return STRATEGIES[name](problem)


@functools.lru_cache(maxsize=64)
def _found(problem: Problem, machine: Machine):
    """Return what is compared, and the name of the fastest."""
    rows = compared(problem, machine)
    return rows, fastest(rows, problem, machine)


@functools.lru_cache(maxsize=256)
def _log_once(text: str) -> None:
    _logger.debug(text)


@functools.lru_cache(maxsize=64)
def _seen_keys(schedule: Schedule | None, size: int, length: int, mask: Mask):
    """Count the keys that the queries of each rank see, as float64 (ranks,).

    Of no schedule it is the mean of all ranks.
    """
    if schedule is None:
        return np.full(size, _seen(np.arange(length), mask).sum() / size)
    held = schedule.shard(size, schedule.local_length(size, length))
    return _seen(held, mask).reshape(size, -1).sum(1)


def _seen(at: np.ndarray, mask: Mask) -> np.ndarray:
    """Count the keys that queries at these positions see."""
    at = at.astype(np.float64)
    first = np.zeros_like(at) if mask.left is None else np.maximum(at - mask.left, 0)
    end = np.full_like(at, mask.key_length)
    if mask.right is not None:
        end = np.minimum(at + mask.right + 1, mask.key_length)
    return np.where(at < mask.query_length, np.maximum(end - first, 0), 0)
