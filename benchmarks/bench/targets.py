"""The ratios to reach on two cores."""

import dataclasses

KIB, MIB = 1 << 10, 1 << 20


@dataclasses.dataclass(frozen=True)
class Target:
    """A bound on one measure of a row.

    Attributes:
      measure: ``"ratio"``, the time of jax.lax over ours; ``"share"``, our part of the
        roofline; ``"growth"``, of our memory against the smallest ring.
      bound: at least this much, of a growth less than this much; 1 is 100 %.
    """

    measure: str
    bound: float

    def is_met(self, value: float) -> bool:
        """Return whether a measured value is good enough."""
        return value < self.bound if self.measure == "growth" else value >= self.bound

    def __str__(self) -> str:
        if self.measure == "ratio":
            return f">= {self.bound:g}"
        return f"{'<' if self.measure == 'growth' else '>='} {100 * self.bound:g} %"


# By (op, bytes per device, devices); they go before the general bounds below.
_COLLECTIVES = {
    ("all_gather", 16 * MIB, 2): 8.0,
    ("all_gather", 16 * MIB, 8): 3.0,
    ("all_to_all", 16 * MIB, 2): 3.0,
    ("all_to_all", 16 * MIB, 8): 2.0,
    ("psum_bf16", 16 * MIB, 8): 1.5,
}
_CHAIN = {2: 5.0, 8: 12.0}
_SCAN = {2: 1.05, 8: 1.05}

# By (case, bytes per process, processes): the least ratio to each rival.
_PROCESSES = {
    ("psum", 16 * MIB, 2): {"gloo": 8.0, "mpi4jax": 6.0},
    ("ppermute", 16 * MIB, 2): {"gloo": 6.0, "mpi4jax": 1.5},
    ("all_gather", 16 * MIB, 2): {"gloo": 6.0, "mpi4jax": 4.0},
    ("all_to_all", 16 * MIB, 2): {"gloo": 8.0},
    ("50 dependent psums", 256, 2): {"gloo": 40.0, "mpi4jax": 1.0},
    ("psum", MIB, 8): {"mpi4jax": 1.0},
}

FORWARD = Target("share", 0.5)
FORWARD_AND_BACKWARD = Target("share", 0.4)
MEMORY_GROWTH = Target("growth", 0.05)


def for_collective(op: str, payload_bytes: int, devices: int) -> Target | None:
    """Return the bound on one op, None for a size or mesh without a target.

    >>> str(for_collective("psum", 256, 8)), str(for_collective("psum", 4096, 8))
    ('>= 1.1', '>= 0.95')
    """
    if payload_bytes > 16 * MIB or devices not in (2, 4, 8):
        return None
    general = 1.1 if payload_bytes == 256 else 0.95
    return Target("ratio", _COLLECTIVES.get((op, payload_bytes, devices), general))


def for_chain(devices: int) -> Target | None:
    """Return the bound on the chain of 50 dependent psums."""
    return Target("ratio", _CHAIN[devices]) if devices in _CHAIN else None


def for_scan(devices: int) -> Target | None:
    """Return the bound on the scan of psums and products."""
    return Target("ratio", _SCAN[devices]) if devices in _SCAN else None


def for_processes(
    case: str, payload_bytes: int, processes: int, rival: str
) -> Target | None:
    """Return the bound on one case against one rival.

    >>> str(for_processes("psum", 16 << 20, 2, "mpi4jax"))
    '>= 6'
    """
    bounds = _PROCESSES.get((case, payload_bytes, processes), {})
    return Target("ratio", bounds[rival]) if rival in bounds else None
