"""Collectives over axes of larger meshes, and in groups, against XLA's own."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import jax

import jaxcomm
from bench import units
from bench.gpu.rows import Figure
from bench.gpu.timer import Timer, thunk

# Ranks of a group.
_GROUPS = 2, 4


def rows(timer: Timer) -> Iterator[Figure]:
    """Yields figures of each axis of each mesh, then of groups of ranks."""
    for shape in shapes_of(timer.size):
        yield from _of_mesh(timer, shape)
    jaxcomm.init(timer.mesh, "i")
    for size in _GROUPS:
        if size < timer.size and timer.size % size == 0:
            yield from _in_groups(timer, size)


def shapes_of(size: int) -> list[tuple[int, ...]]:
    """Returns meshes of two axes and of three.

    >>> shapes_of(8), shapes_of(4), shapes_of(2)
    ([(2, 4), (2, 2, 2)], [(2, 2)], [])
    """
    two = [(2, size // 2)] * (size >= 4 and size % 2 == 0)
    return two + [(2, 2, size // 4)] * (size >= 8 and size % 4 == 0)


def _of_mesh(timer, shape):
    names = tuple("abc"[: len(shape)])
    auto = (jax.sharding.AxisType.Auto,) * len(shape)
    devices = list(timer.mesh.devices.flat)
    mesh = jax.make_mesh(shape, names, auto, devices=devices)
    split = dataclasses.replace(timer, mesh=mesh)
    for axes in (*names, names):
        jaxcomm.init(mesh, axes)
        text = f"{axes if isinstance(axes, str) else 'all axes'} of {_words(shape)}"
        yield from _figures(split, jax.P(names), text, _calls(axes, shape, names))


def _in_groups(timer, size):
    ranks = range(timer.size)
    groups = [list(ranks[first : first + size]) for first in ranks[::size]]
    for kind, some in (("next to each other", groups), ("far apart", _apart(groups))):
        text = f"groups of {size} of {timer.size}, {kind}"
        calls = {
            "psum": _call("psum", "i", axis_index_groups=some),
            "all_gather": _call("all_gather", "i", axis_index_groups=some),
        }
        yield from _figures(timer, jax.P("i"), text, calls)


def _apart(groups: Sequence[Sequence[int]]) -> list[list[int]]:
    count, size = len(groups), len(groups[0])
    return [[first + n * count for n in range(size)] for first in range(count)]


def _calls(axes, shape, names):
    found = {"psum": _call("psum", axes), "all_gather": _call("all_gather", axes)}
    if isinstance(axes, str):
        size = shape[names.index(axes)]
        ring = [(rank, (rank + 1) % size) for rank in range(size)]
        found["ppermute"] = _call("ppermute", axes, perm=ring)
    return found


def _call(name, axes, **options) -> Callable:
    return lambda module: lambda x: getattr(module, name)(x, axes, **options)


def _figures(timer, spec, text, calls):
    operands = timer.sizes.operands
    for size in dict.fromkeys((operands[0], operands[-2])):
        x = timer.random((timer.size, size // 4), spec=spec)
        for name, of in calls.items():
            ours, theirs = (timer.program(of(m), spec) for m in (jaxcomm, jax.lax))
            yield timer.compare(
                f"{name} {units.size(size)} over {text}", thunk(ours, x), "jax.lax",
                thunk(theirs, x), least=1.0,
            )  # fmt: skip


def _words(shape):
    return " x ".join(map(str, shape))
