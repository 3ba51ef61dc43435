"""What attention over a split sequence would cost, without any device."""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp

from jaxcomm import machine as machines
from jaxcomm.attention import arguments
from jaxcomm.attention.layout import Layout
from jaxcomm.attention.problem import Problem
from jaxcomm.attention.strategies.choice import Estimate, choose, estimates
from jaxcomm.communicator import text_table
from jaxcomm.machine import Machine
from jaxcomm.primitives.arguments import flag, integer


@dataclasses.dataclass(frozen=True)
class Plan:
    """Every strategy for one call; prints as a table.

    Attributes:
      chosen: what ``strategy="auto"`` takes.
      rows: by name.
      machine: whose numbers the times are made of.
    """

    chosen: str
    rows: dict[str, Estimate]
    machine: Machine

    def __str__(self) -> str:
        lines = [
            f"{'':2}{'strategy':12}{'sends':>6}{'sent forward':>14}{'backward':>12}"
            f"{'K and V':>12}{'GFLOP':>10}{'balance':>9}{'forward':>12}{'backward':>12}"
        ]
        for name, row in self.rows.items():
            if row.why_not is not None:
                lines.append(f"  {name:12}not possible: {row.why_not}")
                continue
            mark = "> " if name == self.chosen else "  "
            lines.append(
                f"{mark}{name:12}{row.sends:6}{text_table.size(row.forward_bytes):>14}"
                f"{text_table.size(row.backward_bytes):>12}{text_table.size(row.memory):>12}"
                f"{row.flops / 1e9:10.4g}{row.balance:9.2f}"
                f"{1e3 * row.forward_seconds:9.3g} ms{1e3 * row.backward_seconds:9.3g} "
                "ms"
            )
        lines.append(
            "Per rank. Bytes by formula. Times by formula from "
            f"{self.machine.source}: {self.machine.flops:.3g} FLOP/s, "
            f"{self.machine.bytes_per_second:.3g} B/s, {self.machine.latency:.2g} s a "
            "send."
        )
        return "\n".join(lines)


def plan(
    layout: Layout,
    *,
    heads: int,
    head_size: int,
    key_heads: int | None = None,
    value_size: int | None = None,
    batch: int = 1,
    dtype: Any = "bfloat16",
    key_layout: Layout | None = None,
    is_causal: bool = False,
    local_window_size: int | tuple[int, int] | None = None,
    axis_sizes: tuple[int, ...] | None = None,
    machine: str | Machine = "gpu",
) -> Plan:
    """Say what each strategy would send, hold and take, and which is chosen.

    Needs no device. Documents and padding of a batch are not known to it.

    Args:
      layout: of the sequence.
      heads, key_heads: query heads, and key heads; the same if None.
      head_size, value_size: of keys, and of values; the same if None.
      batch: sequences of a rank.
      dtype: of the arrays.
      key_layout: of the keys, if they are another sequence.
      is_causal, local_window_size: as in ``ring_attention``.
      axis_sizes: of the mesh axes that split the sequence, if they are several.
      machine: a name, such as ``"h100"`` or ``"cpu"``, or a ``jaxcomm.Machine``.

    Raises:
      TypeError: a layout or a number is of another type.
      ValueError: a number is below one, ``key_heads`` do not divide ``heads``, the
        product of ``axis_sizes`` or the ranks of ``key_layout`` are not those of
        ``layout``, or the machine is unknown.

    >>> layout = Layout("zigzag", 8, 32768)
    >>> plan(layout, heads=32, key_heads=8, head_size=128, is_causal=True).chosen
    'ring'
    """
    key_layout = layout if key_layout is None else key_layout
    if axis_sizes is not None:
        sizes = axis_sizes if isinstance(axis_sizes, (tuple, list)) else (axis_sizes,)
        axis_sizes = tuple(_positive(size, "axis_sizes") for size in sizes)
    _check_layouts(layout, key_layout, axis_sizes)
    heads, head_size, batch, key_heads, value_size = (
        _positive(found, name)
        for name, found in (
            ("heads", heads),
            ("head_size", head_size),
            ("batch", batch),
            ("key_heads", heads if key_heads is None else key_heads),
            ("value_size", head_size if value_size is None else value_size),
        )
    )
    if heads % key_heads:
        raise ValueError(
            f"attention.plan: key_heads={key_heads} do not divide heads={heads}. Pass "
            "a divisor: each key head serves an equal group of query heads."
        )
    is_causal = flag(is_causal, "attention.plan: is_causal")
    window = arguments.window_of(local_window_size, is_causal, "attention.plan")
    problem = Problem(
        query_layout=layout,
        key_layout=key_layout,
        mask=arguments.mask_of(layout, key_layout, window),
        batch=batch,
        heads=heads,
        key_heads=key_heads,
        head_size=head_size,
        value_size=value_size,
        itemsize=_dtype_of(dtype).itemsize,
        axis_sizes=(layout.size,) if axis_sizes is None else axis_sizes,
    )
    machine = machines.of(machine, "attention.plan")
    rows = estimates(problem, machine)
    return Plan(choose(problem, machine).name, rows, machine)


def _check_layouts(layout, key_layout, axis_sizes) -> None:
    for name, found in (("layout", layout), ("key_layout", key_layout)):
        if not isinstance(found, Layout):
            raise TypeError(
                f"attention.plan: {name}={found!r} is no layout. Pass jaxcomm.Layout("
                "schedule, size, length)."
            )
    ranks = layout.size if axis_sizes is None else math.prod(axis_sizes)
    if layout.size != ranks or layout.size != key_layout.size:
        raise ValueError(
            f"attention.plan: the layout is of {layout.size} ranks, that of the keys of"
            f" {key_layout.size}, and axis_sizes={axis_sizes}. All must be of the same "
            "ranks."
        )


def _dtype_of(dtype):
    try:
        found = None if dtype is None else jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or not jnp.issubdtype(found, jnp.floating):
        raise TypeError(
            f"attention.plan: dtype={dtype!r} is no floating dtype. Pass one, such as "
            "'bfloat16'."
        )
    return found


def _positive(found, name: str) -> int:
    number = integer(found, f"attention.plan: {name}")
    if number < 1:
        raise ValueError(f"attention.plan: {name}={number}. Pass one or more.")
    return number
