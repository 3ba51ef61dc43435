"""A plan as text, HTML and JSON."""

import dataclasses
import html
import math
from collections.abc import Iterator
from typing import Any

from jaxcomm.diagnostics import table
from jaxcomm.planning.contents import Contents
from jaxcomm.planning.figure import ORIGINS, Figure

_COMMUNICATORS = (
    *("mesh axes", "lane", "backend", "groups", "domains", "buffers", "device memory"),
    *("pinned", "host memory", "peers"),
)
_CALLS = (
    *("collective", "mesh axes", "lane", "carrier", "operands", "bytes", "times"),
    *("one takes", "bus GB/s", "all take"),
)
_RANKS = ("ranks", "such as", "communicators", "device memory", "pinned")
_ATTENTION = (
    "mesh axes",
    "tokens",
    "layers",
    "strategy",
    "links",
    "forward",
    "backward",
)


def draw(plan: Contents) -> str:
    """Draw a plan for a terminal."""
    lines = [_heading(plan)]
    for title, columns, rows in _tables(plan):
        lines += ["", title, table.text(columns, rows)]
    lines += ["", *_facts(plan)]
    lines += [f"warning: {each}" for each in plan.warnings]
    lines += [f"note: {each}" for each in plan.notes]
    return "\n".join([*lines, _legend(plan)])


def as_html(plan: Contents) -> str:
    """Draw a plan for a notebook."""
    parts = [f"<p>{html.escape(_heading(plan))}</p>"]
    for title, columns, rows in _tables(plan):
        parts.append(f"<p>{html.escape(title)}</p>{table.as_html(columns, rows)}")
    said = [*_facts(plan)]
    said += [f"warning: {each}" for each in plan.warnings]
    said += [f"note: {each}" for each in plan.notes]
    return "".join(
        [*parts, *(f"<p>{html.escape(e)}</p>" for e in (*said, _legend(plan)))]
    )


def to_json(plan: Contents) -> dict[str, Any]:
    """Return a plan in types that json writes; figures as value and origin."""
    machine = dataclasses.asdict(plan.machine)
    del machine["samples"]
    return {
        "axes": dict(plan.axes),
        "machine": machine,
        "processes": plan.processes,
        "communicators": [
            {
                "axes": list(each.key.axes),
                "index_groups": each.key.index_groups,
                "lane": each.key.lane,
                "backend": each.key.backend,
                "shares": each.shares,
                "groups": [dataclasses.asdict(group) for group in each.groups],
                "device_bytes": _figure(each.device_bytes),
                "pinned_bytes": _figure(each.pinned_bytes),
                "host_bytes": _figure(each.host_bytes),
                "peers": each.peers,
            }
            for each in plan.communicators
        ],
        "calls": [
            {
                **dataclasses.asdict(row.call),
                "bytes": row.call.bytes,
                "times": row.times,
                "carrier": row.cost.carrier,
                "reason": row.cost.reason,
                "bus_rate": row.cost.bus_rate,
                "seconds": _figure(row.cost.seconds),
            }
            for row in plan.calls
        ],
        "attention": [
            {
                **dataclasses.asdict(each.asked),
                "chosen": each.plan.chosen,
                "crosses_domains": each.crosses,
                "seconds": each.seconds,
                "strategies": {
                    name: dataclasses.asdict(row)
                    for name, row in each.plan.rows.items()
                },
            }
            for each in plan.attention
        ],
        "ranks": [
            {
                "count": each.count,
                "example": each.example,
                "communicators": each.communicators,
                "device_bytes": _figure(each.device_bytes),
                "pinned_bytes": _figure(each.pinned_bytes),
            }
            for each in plan.ranks
        ],
        "startup": {
            "processes": plan.startup.processes,
            "rounds": plan.startup.rounds,
            "messages": _figure(plan.startup.messages),
            "store_bytes": _figure(plan.startup.store_bytes),
            "seconds": _figure(plan.startup.seconds),
        },
        "step_seconds": _figure(plan.step_seconds),
        "warnings": list(plan.warnings),
        "notes": list(plan.notes),
    }


def _figure(figure: Figure) -> dict[str, Any]:
    return {"value": figure.value, "origin": ORIGINS[figure.origin]}


def _heading(plan: Contents) -> str:
    axes = " x ".join(f"{name} {size}" for name, size in plan.axes.items())
    machine = plan.machine
    return (
        f"{axes}: {math.prod(plan.axes.values())} devices, {plan.processes} processes, "
        f"domains of {machine.domain} ({machine.source})"
    )


def _tables(plan: Contents) -> Iterator[tuple[str, tuple[str, ...], list]]:
    if plan.communicators:
        rows = [_communicator(each) for each in plan.communicators]
        yield "communicators, as the rank with most sees them", _COMMUNICATORS, rows
    if plan.calls:
        rows = [_call(row) for row in plan.calls]
        yield "collectives of a step", _CALLS, rows
    if plan.attention:
        rows = [_attention(each) for each in plan.attention]
        yield "attention of a step, by layer", _ATTENTION, rows
    if plan.ranks:
        rows = [
            (
                str(each.count),
                str(each.example),
                str(each.communicators),
                _bytes(each.device_bytes),
                _bytes(each.pinned_bytes),
            )
            for each in plan.ranks
        ]
        yield "ranks, by what they hold", _RANKS, rows


def _communicator(each):
    groups = ", ".join(f"{g.count} of {g.size}" for g in each.groups)
    return (
        _axes(each.key.axes, each.key.index_groups),
        each.key.lane,
        each.key.backend,
        groups,
        str(each.domains),
        ("shared" if each.shares else "own") if each.key.backend == "nccl" else "-",
        _bytes(each.device_bytes),
        _bytes(each.pinned_bytes),
        _bytes(each.host_bytes),
        str(each.peers),
    )


def _call(row):
    call = row.call
    return (
        call.name,
        _axes(call.axes, call.index_groups),
        call.lane,
        row.cost.carrier,
        call.operands,
        table.size(call.bytes),
        str(row.times),
        _seconds(row.cost.seconds),
        f"{row.cost.bus_rate / 1e9:.3g}",
        _seconds(row.seconds),
    )


def _attention(each):
    row = each.plan.rows[each.plan.chosen]
    return (
        _axes(each.asked.names, None),
        str(each.asked.tokens),
        str(each.asked.times),
        each.plan.chosen,
        "between domains" if each.crosses else "in a domain",
        f"{table.duration(row.forward_seconds)} f",
        f"{table.duration(row.backward_seconds)} f",
    )


def _facts(plan: Contents) -> Iterator[str]:
    if plan.calls:
        yield f"communication of a step: {_seconds(plan.step_seconds)}"
    for each in plan.attention:
        took = table.duration(each.seconds)
        yield f"attention over {each.asked.axes!r}: {took} f a step"
    start = plan.startup
    if start.rounds:
        yield (
            f"start: {start.rounds} rounds of {start.processes} processes, "
            f"{start.messages.value:.0f} f messages of the first, "
            f"{_bytes(start.store_bytes)} from the store, {_seconds(start.seconds)}"
        )


def _legend(plan: Contents) -> str:
    return "; ".join(f"{letter}: {words}" for letter, words in ORIGINS.items())


def _axes(axes, index_groups) -> str:
    text = " x ".join(axes)
    return text if index_groups is None else f"{text} in {len(index_groups)} parts"


def _bytes(figure: Figure) -> str:
    return f"{table.size(figure.value)} {figure.origin}" if figure.value else "0"


def _seconds(figure: Figure) -> str:
    return f"{table.duration(figure.value)} {figure.origin}"
