"""What the compiled ring holds, at growing rings with equal tokens per device."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from bench import devices as on
from bench import targets
from bench.attention import GATHERED, XLA_RING, Problem, attend, program
from bench.cases import Case, Session
from bench.gathered_attention import gathered_attention
from bench.rows import OURS, MemoryRow

SUITE = "memory"
DEVICES = (2, 4, 8)
TOKENS_PER_DEVICE = 2048


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryCase(Case):
    """One program compiled for several meshes; gives a row for each.

    Attributes:
      all_devices: sizes of the meshes.
      tokens: on each device.
    """

    all_devices: tuple[int, ...]
    tokens: int

    def measure(self, session: Session) -> Sequence[MemoryRow]:
        rows: list[MemoryRow] = []
        for count in self.all_devices:
            problem = Problem(self.tokens * count)
            held = {
                name: temp_bytes(local, problem, count)
                for name, local in (
                    (OURS, attend(None)),
                    (XLA_RING, attend("xla")),
                    (GATHERED, _gathered),
                )
            }
            growth = {
                name: held[name] / before - 1
                for name, before in (rows[0].temp_bytes.items() if rows else ())
                if before
            }
            row = MemoryRow(
                suite=self.suite,
                name=self.name,
                devices=count,
                detail=f"causal {problem}",
                target=targets.MEMORY_GROWTH if rows else None,
                temp_bytes=held,
                growth=growth,
            )
            rows.append(row)
        return rows


def cases(
    devices: Sequence[int] = DEVICES, tokens: int = TOKENS_PER_DEVICE
) -> Iterator[MemoryCase]:
    """Yield one case, forward with backward.

    Args:
      devices: sizes of the meshes.
      tokens: on each device, an even number.
    """
    yield MemoryCase(
        suite=SUITE,
        name="forward + backward",
        devices=max(devices),
        all_devices=tuple(sorted(devices)),
        tokens=tokens,
    )


def temp_bytes(local, problem: Problem, count: int) -> int:
    """Return ``temp_size_in_bytes`` of one device's program; nothing is run.

    Args:
      local: computes attention from one rank's blocks.
      problem: the shapes.
      count: devices of the ring.
    """
    mesh = on.mesh_of(count)
    split = jax.NamedSharding(mesh, jax.P(None, on.AXIS))
    x = jax.ShapeDtypeStruct(problem.shape, jnp.float32, sharding=split)
    compiled = jax.jit(program(local, mesh, True)).lower(x, x, x, x).compile()
    analysis: Any = compiled.memory_analysis()
    return int(analysis.temp_size_in_bytes)


def _gathered(query, key, value):
    return gathered_attention(query, key, value, axis_name=on.AXIS, schedule="zigzag")
