"""What each strategy of attention would send and hold, without any device."""

import dataclasses
import html
import math
from typing import Any

import jax.numpy as jnp

from jaxcomm.attention import arguments
from jaxcomm.attention.layout import Layout
from jaxcomm.attention.state.fragments import Fragments
from jaxcomm.attention.state.kernel import StateKernel
from jaxcomm.attention.state.maps import Sent, least_sent
from jaxcomm.attention.strategies.choice import ComparedStrategy, compared, fastest
from jaxcomm.attention.strategies.strategy import Problem
from jaxcomm.communicator import text_table
from jaxcomm.machine import Machine
from jaxcomm.primitives.arguments import flag, integer

_WHAT = "compare_strategies"
_COLUMNS = (
    *("  strategy", "sends", "sent forward", "backward", "K and V", "GFLOP"),
    *("balance", "relative time"),
)
_RECURRENT = "  recurrent layers", "sends", "sent forward", "backward", "microseconds"


@dataclasses.dataclass(frozen=True, repr=False)
class Comparison:
    """Every strategy for one call of attention; prints as a table.

    Attributes:
      chosen: the strategy of least time among those whose keys and values take at most
        1/64 of the machine's memory. With documents, and where the order of tokens is
        data, it is ``"ring"`` or ``"halo"``. ``strategy="auto"`` chooses so too, with
        the numbers of the machine ``"gpu"`` or ``"cpu"``; with a bias or a mask as with
        documents.
      rows: by name.
      machine: whose numbers the times are made of.
      recurrent: what ``"state_scan"`` and ``"causal_halo"`` send, where asked for,
        whatever the length of the sequence. They say no ``memory`` and ``flops``.
    """

    chosen: str
    rows: dict[str, ComparedStrategy]
    machine: Machine
    recurrent: dict[str, ComparedStrategy] = dataclasses.field(default_factory=dict)

    def _cells(self):
        least = self.rows[self.chosen].seconds
        return [
            (
                f"{'>' if name == self.chosen else ' '} {name}",
                str(row.sends),
                *map(text_table.size, (row.forward_bytes, row.backward_bytes)),
                text_table.size(row.memory),
                f"{row.flops / 1e9:.4g}",
                f"{row.balance:.2f}",
                f"{row.seconds / least:.2f}",
            )
            for name, row in self.rows.items()
            if row.why_not is None
        ]

    def _remarks(self):
        return [
            *(
                f"  {name} is not possible: {row.why_not}"
                for name, row in self.rows.items()
                if row.why_not is not None
            ),
            "Per rank. Bytes by formula. Time of both passes, over the least, by a "
            f"model: {self.machine.flops:.3g} FLOP/s, "
            f"{self.machine.bytes_per_second:.3g} B/s, {self.machine.latency:.2g} "
            f"s a send, {self.machine.step:.2g} s a step ({self.machine.source}).",
        ]

    def _tables(self):
        yield _COLUMNS, self._cells()
        if self.recurrent:
            yield (
                _RECURRENT,
                [
                    (
                        f"  {name}",
                        str(row.sends),
                        *map(text_table.size, (row.forward_bytes, row.backward_bytes)),
                        f"{row.seconds * 1e6:.3g}",
                    )
                    for name, row in self.recurrent.items()
                ],
            )

    def __str__(self) -> str:
        drawn = (text_table.text(*each) for each in self._tables())
        return "\n".join([*drawn, *self._remarks()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        drawn = (text_table.as_html(*each) for each in self._tables())
        return "".join(
            [*drawn, *(f"<p>{html.escape(line)}</p>" for line in self._remarks())]
        )


def compare_strategies(
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
    has_documents: bool = False,
    axis_sizes: tuple[int, ...] | None = None,
    machine: str | Machine = "gpu",
    kernel: StateKernel | None = None,
    halo_width: int | None = None,
) -> Comparison:
    """Say what each strategy would send and hold, and which is chosen.

    For a model that has recurrent layers too, it says what these would send.

    Needs no device. The documents and the padding of a batch are not known to it.

    Args:
      layout: of the sequence.
      heads, key_heads: query heads, and key heads; the same if None.
      head_size, value_size: of keys, and of values; the same if None.
      batch: sequences of a rank.
      dtype: of the arrays.
      key_layout: of the keys, if they are another sequence.
      is_causal, local_window_size: as in ``ring_attention``.
      has_documents: whether tokens have segment ids. Then ranks are taken to have equal
        work, whatever the schedule: how long documents are is not known.
      axis_sizes: of the mesh axes that split the sequence, if they are several.
      machine: a name, such as ``"h100"`` or ``"cpu"``, or a ``jaxcomm.Machine``.
      kernel: of ``state_scan`` over the same layout, with states of ``heads`` x
        ``head_size`` x ``value_size``. If None, it is not looked at.
      halo_width: the ``width`` of ``causal_halo``, of ``heads`` x ``head_size``
        channels of ``dtype``. If None, it is not looked at.

    Raises:
      TypeError: a layout, a number or the kernel is of another type.
      ValueError: a number is below one, ``key_heads`` do not divide ``heads``, the
        product of ``axis_sizes`` or the ranks of ``key_layout`` are not those of
        ``layout``, or the machine is unknown. With ``kernel`` or ``halo_width``, the
        layout deals too many fragments, as ``"striped"`` does, or deals documents.

    >>> layout = Layout("zigzag", 8, 32768)
    >>> found = compare_strategies(
    ...     layout, heads=32, key_heads=8, head_size=128, is_causal=True
    ... )
    >>> found.chosen, found.rows["ring"].sends
    ('ulysses', 7)
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
            f"{_WHAT}: key_heads={key_heads} do not divide heads={heads}. Pass a "
            "divisor: each key head serves an equal group of query heads."
        )
    is_causal = flag(is_causal, f"{_WHAT}: is_causal")
    window = arguments.window_of(local_window_size, is_causal, _WHAT)
    problem = Problem(
        query_layout=layout,
        key_layout=key_layout,
        mask=arguments.mask_of(layout, key_layout, window),
        has_documents=flag(has_documents, f"{_WHAT}: has_documents"),
        batch=batch,
        heads=heads,
        key_heads=key_heads,
        head_size=head_size,
        value_size=value_size,
        itemsize=_dtype_of(dtype).itemsize,
        axis_sizes=(layout.size,) if axis_sizes is None else axis_sizes,
    )
    machine = Machine.named(machine)
    rows = compared(problem, machine)
    recurrent = {}
    if kernel is not None:
        recurrent["state_scan"] = _scan_of(problem, kernel, machine)
    if halo_width is not None:
        width = _positive(halo_width, "halo_width")
        recurrent["causal_halo"] = _halo_of(problem, width, machine)
    return Comparison(fastest(rows, problem, machine), rows, machine, recurrent)


def _scan_of(problem: Problem, kernel, machine: Machine) -> ComparedStrategy:
    if not isinstance(kernel, StateKernel):
        raise TypeError(
            f"{_WHAT}: kernel={kernel!r} is no kernel. Pass one of "
            "jaxcomm.attention.state, such as GatedDelta()."
        )
    size, count = problem.head_size, _fragments(problem)
    of_key = size if kernel.gates == "key" else 1
    factor = size**2 if kernel.state == "matrix" else of_key
    # Sums are float32, and of float64 inputs float64.
    states = problem.batch * problem.heads * max(4, problem.itemsize)
    addend = states * size * problem.value_size
    sent = least_sent(problem.size, count, states * factor, addend)
    ids = (problem.size - 1) * count * problem.batch * 4
    return _exchange("state_scan", sent, ids * problem.has_documents, machine)


def _halo_of(problem: Problem, width: int, machine: Machine) -> ComparedStrategy:
    tokens = (problem.size - 1) * _fragments(problem) * problem.batch * width
    channels = problem.heads * problem.head_size
    sent = Sent(1, tokens * channels * problem.itemsize)
    return _exchange("causal_halo", sent, tokens * 4 * problem.has_documents, machine)


def _exchange(name: str, sent: Sent, ids: int, machine: Machine) -> ComparedStrategy:
    """Return what both passes send. The ids of tokens have no gradient."""
    forward = Sent(sent.sends + (ids > 0), sent.bytes + ids)
    seconds = forward.seconds(machine) + sent.seconds(machine)
    return ComparedStrategy(
        name,
        sends=forward.sends,
        forward_bytes=forward.bytes,
        backward_bytes=sent.bytes,
        seconds=seconds,
    )


def _fragments(problem: Problem) -> int:
    layout = problem.query_layout
    if not layout.is_static:
        raise ValueError(
            f"{_WHAT}: the layout {layout.schedule!r} deals documents, and how many "
            "fragments a rank has is known at run time. Compare a layout of the "
            "schedule 'zigzag' or 'contiguous'."
        )
    return Fragments.of(layout, 1, _WHAT).count


def _check_layouts(layout, key_layout, axis_sizes) -> None:
    for name, found in (("layout", layout), ("key_layout", key_layout)):
        if not isinstance(found, Layout):
            raise TypeError(
                f"{_WHAT}: {name}={found!r} is no layout. Pass jaxcomm.Layout("
                "schedule, size, length)."
            )
    ranks = layout.size if axis_sizes is None else math.prod(axis_sizes)
    if layout.size != ranks or layout.size != key_layout.size:
        raise ValueError(
            f"{_WHAT}: the layout is of {layout.size} ranks, that of the keys of"
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
            f"{_WHAT}: dtype={dtype!r} is no floating dtype. Pass one, such as "
            "'bfloat16'."
        )
    return found


def _positive(found, name: str) -> int:
    number = integer(found, f"{_WHAT}: {name}")
    if number < 1:
        raise ValueError(f"{_WHAT}: {name}={number}. Pass one or more.")
    return number
