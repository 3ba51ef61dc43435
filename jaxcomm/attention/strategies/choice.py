"""What each strategy costs, by closed forms, and which is chosen."""

import dataclasses
import functools

import numpy as np

from jaxcomm.attention.problem import Problem
from jaxcomm.attention.strategies.registry import STRATEGIES
from jaxcomm.attention.strategies.strategy import Strategy
from jaxcomm.machine import Machine

# Products of a backward pass for each one of the forward pass.
_BACKWARD = 2.5


@dataclasses.dataclass(frozen=True)
class Estimate:
    """One strategy of a plan.

    Attributes:
      strategy: its name.
      why_not: why it cannot compute this, or None; then the rest is 0.
      sends: collectives of a forward pass that follow one another.
      forward_bytes: that a rank sends in the forward pass.
      backward_bytes: that a rank sends in the backward pass.
      memory: bytes of keys and values that a rank holds at once, forward.
      flops: of the busiest rank, forward.
      balance: work of the busiest rank, over the mean.
      forward_seconds: of the forward pass, by the machine's numbers.
      backward_seconds: of the backward pass, likewise.
    """

    strategy: str
    why_not: str | None = None
    sends: int = 0
    forward_bytes: float = 0
    backward_bytes: float = 0
    memory: float = 0
    flops: float = 0
    balance: float = 0
    forward_seconds: float = 0
    backward_seconds: float = 0

    @property
    def seconds(self) -> float:
        """Of both passes."""
        return self.forward_seconds + self.backward_seconds


def estimate(strategy: Strategy, problem: Problem, machine: Machine) -> Estimate:
    """Return what a strategy costs; documents and padding of a batch are not known."""
    reason = strategy.why_not(problem)
    if reason is not None:
        return Estimate(strategy.name, reason)
    cost = strategy.cost(problem)
    pairs = seen_keys(problem)
    by_group = pairs.reshape(-1, cost.width).mean(1)
    per_pair = 2 * problem.batch * problem.heads
    per_pair *= problem.head_size + problem.value_size
    flops = float(by_group.max()) * per_pair

    def seconds(work, sent, sends):
        compute = work / machine.flops
        wire = sent / machine.bytes_per_second + sends * machine.latency
        hidden = 0.0
        if cost.overlaps and sends:
            # The own block is computed before anything has arrived, or meanwhile.
            hidden = min(wire, compute * sends / (sends + 1))
        return compute + wire - hidden

    return Estimate(
        strategy.name,
        sends=cost.sends,
        forward_bytes=cost.forward_bytes,
        backward_bytes=cost.backward_bytes,
        memory=cost.memory,
        flops=flops,
        balance=float(by_group.max() / max(pairs.mean(), 1e-9)),
        forward_seconds=seconds(flops, cost.forward_bytes, cost.sends),
        backward_seconds=seconds(
            _BACKWARD * flops, cost.backward_bytes, 2 * cost.sends
        ),
    )


def estimates(problem: Problem, machine: Machine) -> dict[str, Estimate]:
    """Return what each strategy costs, by name."""
    return {
        name: estimate(make(problem), problem, machine)
        for name, make in STRATEGIES.items()
    }


def choose(problem: Problem, machine: Machine) -> Strategy:
    """Return the strategy with the least time; of equals the first of the registry."""
    found = estimates(problem, machine)
    legal = [name for name, row in found.items() if row.why_not is None]
    return STRATEGIES[min(legal, key=lambda name: found[name].seconds)](problem)


@functools.lru_cache(maxsize=64)
def seen_keys(problem: Problem) -> np.ndarray:
    """Count the keys that the queries of each rank see, as float64 (ranks,)."""
    layout, mask = problem.query_layout, problem.mask
    if not layout.is_static:
        mean = _seen(np.arange(layout.length), mask).sum() / layout.size
        return np.full(layout.size, mean)
    held = [layout.positions_of(rank) for rank in range(layout.size)]
    return np.array([_seen(np.asarray(at), mask).sum() for at in held])


def _seen(at: np.ndarray, mask) -> np.ndarray:
    """Count the keys that queries at these positions see."""
    at = at.astype(np.float64)
    first = np.zeros_like(at) if mask.left is None else np.maximum(at - mask.left, 0)
    end = np.full_like(at, mask.key_length)
    if mask.right is not None:
        end = np.minimum(at + mask.right + 1, mask.key_length)
    return np.where(at < mask.query_length, np.maximum(end - first, 0), 0)
