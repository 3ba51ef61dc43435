"""The only file that emits custom calls: a communicator's key and attributes.

What that means for ``jax.export``:

* A program whose collectives have ``backend="xla"``, or are traced with
  ``JAXCOMM_BACKEND=xla``, holds no custom call of ours. It can be exported for a
  ``jax.sharding.AbstractMesh``, and called on any devices, in any order.
* The ``host`` backend needs a mesh of devices, and JAX wants to be told that nobody
  vouches for its custom calls tomorrow: ``jax.export.export(program, disabled_checks=
  [jax.export.DisabledSafetyCheck.custom_call("jaxcomm.all_reduce")])``, one for each
  target that its refusal names. What comes of it is for the very mesh it was exported
  for: other devices are refused at run time, but the same devices in another order
  keep the ranks they had. In a process that did not trace the program, call
  ``jaxcomm.init(mesh)`` first.
"""

import functools
import hashlib
from typing import Any

import jax
import numpy as np

from jaxcomm import _ffi, compat, config
from jaxcomm.communicator import backends, cache, replica_groups
from jaxcomm.primitives.binder import Binder

# What the halves of a collective are called.
_START = ".start"
_DONE = "jaxcomm.done"


def settled_backend(backend: str | None) -> str | None:
    """Returns the backend of a call as far as it is known without devices.

    Where ``JAXCOMM_BACKEND`` is ``xla``, that is ``"xla"``, unless a live communicator
    of another backend says that :func:`jaxcomm.init` may have chosen otherwise.
    """
    if backend is not None or config.backend() != "xla":
        return backend
    live = cache.communicators()
    return None if any(member.is_ours for member in live) else "xla"


def register(collective) -> None:
    """Registers how a collective's primitives are lowered on every platform."""
    primitive = collective.primitive

    def with_ours(ctx, *operands, **params):
        return _lower(collective, ctx, *operands, **params)

    def elsewhere(ctx, *operands, axes, index_groups, name, **params):
        return _lower_to_xla(collective, ctx, *operands, axes=axes,
                             index_groups=index_groups, **_own(params))  # fmt: skip

    # The portable one needs none: XLA numbers the ranks along whatever mesh there is.
    compat.require_devices_during_lowering(primitive)
    for each in (primitive, primitive.portable):
        for platform in backends.lowering_platforms():
            compat.register_lowering(each, with_ours, platform=platform)
        compat.register_lowering(each, elsewhere)


def register_pair(collective) -> None:
    """Registers how the two halves of a collective are lowered on every platform.

    Where the transport is not ours, the first does everything.
    """

    def start(ctx, *operands, paired, **params):
        half = _START if paired else ""
        of_results = ctx.replace(avals_out=ctx.avals_out[len(operands) :])
        return [
            *operands,
            *_lower(collective, of_results, *operands, half=half, **params),
        ]

    def start_elsewhere(ctx, *operands, axes, index_groups, name, paired, **params):
        of_results = ctx.replace(avals_out=ctx.avals_out[len(operands) :])
        results = _lower_to_xla(collective, of_results, *operands, axes=axes,
                                index_groups=index_groups, **_own(params))  # fmt: skip
        return [*operands, *results]

    def done(ctx, *operands, leaves, paired, **params):
        results = operands[leaves : 2 * leaves]
        if not paired:
            return results
        avals = ctx.avals_in[:leaves]
        comm, size, instead = _transport(collective, ctx, avals, **params)
        if instead is not None or not _has_halves(ctx, comm):
            return results
        params["name"] = params["name"].removesuffix("_start") + "_done"
        aliases = {leaves + i: i for i in range(leaves)}
        return _call(
            _DONE, aliases, collective, comm, size, ctx, operands, avals,
            **params,
        )  # fmt: skip

    def done_elsewhere(ctx, *operands, leaves, **_):
        return operands[leaves : 2 * leaves]

    for half, ours, other in (
        (collective.pair.start, start, start_elsewhere),
        (collective.pair.done, done, done_elsewhere),
    ):
        compat.require_devices_during_lowering(half)
        for each in (half, half.portable):
            for platform in backends.lowering_platforms():
                compat.register_lowering(each, ours, platform=platform)
            compat.register_lowering(each, other)


def _has_halves(ctx, comm):
    """Says whether a communicator's transport can begin a collective, then end it.

    Not where shard_map leaves axes to XLA: it does not replicate what has effects, and
    without them would merge two starts.
    """
    return not comm.borrows and not compat.automatic_axes(ctx)


def _own(params):
    common = ("lane", "backend", "invariant", "name")
    return {key: value for key, value in params.items() if key not in common}


def _lower(collective, ctx, *operands, half="", **params):
    comm, size, instead = _transport(collective, ctx, ctx.avals_in, **params)
    if instead is not None:
        return instead(ctx, *operands)
    target = f"jaxcomm.{collective.name}"
    if half and _has_halves(ctx, comm):
        target += half
    else:
        target += comm.target_suffix
    aliases = collective.aliases(len(operands))
    return _call(
        target, aliases, collective, comm, size, ctx, operands, ctx.avals_in, **params
    )


def _call(
    target, aliases, collective, comm, size, ctx, operands, avals, *, axes, name,
    **params,
):  # fmt: skip
    """Emits a custom call that is for a communicator; avals are of what it sends."""
    own = _own(params)
    del own["index_groups"]
    rule = jax.ffi.ffi_lowering(
        target,
        operand_output_aliases=aliases or None,
        # XLA makes one of two equal starts, or moves one out of a loop, and not their
        # ends, which differ in what they wait for.
        has_side_effect=target == _DONE or target.endswith(_START),
    )
    return rule(
        ctx,
        *operands,
        collective=collective.name,
        name=name,
        axes=str(axes),
        key=np.int64(comm.key),
        program=_program(ctx, comm.key),
        reduce=own.get("op", "sum"),
        params=np.asarray(
            collective.planner_params(avals, size, **own), dtype=np.int64
        ),
    )


def _transport(
    collective, ctx, avals, *, axes, index_groups, name, lane, backend, **params
) -> tuple[Any, Any, Any]:
    """Finds what carries a call.

    Returns:
      The communicator and the size of its groups; or, last, a lowering rule that takes
      the place of a call of ours.
    """
    mesh = compat.concrete_mesh(ctx)
    own = _own(params)
    to_xla = functools.partial(
        _lower_to_xla, collective, axes=axes, index_groups=index_groups, **own
    )
    if mesh is None and backend == "xla":
        return None, None, to_xla
    if mesh is None:
        raise ValueError(
            f"{name} over {axes}: this program is lowered for an abstract mesh, which "
            f"has no devices to communicate between. Give jax.shard_map a mesh of "
            f"devices; of a shard_map within another, set it with jax.set_mesh(mesh); "
            f"or choose XLA's collectives with backend='xla'."
        )
    grid = compat.device_grid(mesh)
    part = replica_groups.partition(grid, axes, index_groups)
    if max(part.sizes) == 1:
        return None, 1, functools.partial(_lower_alone, collective, **own)
    comm = cache.for_lowering(mesh, axes, index_groups, lane, backend)
    if not comm.is_ours:
        return comm, part.sizes[0], to_xla
    instead = comm.spec.backend.instead(collective, avals, part.sizes[0], **own)
    if instead is not None:
        bind = Binder(axes, index_groups, lane, comm.backend, name)
        rule = functools.partial(compat.lower_as, functools.partial(instead, bind))
        return comm, part.sizes[0], rule
    return comm, part.sizes[0], None


def _program(ctx, key):
    """Returns a number for what a program being lowered does in a communicator.

    The same on every process.
    """
    text = f"{key} {compat.program_text(ctx)}"
    digest = hashlib.sha256(text.encode()).digest()
    program = np.frombuffer(digest[:8], np.int64)[0]
    _ffi.begin_program(int(program))
    return program


def _lower_to_xla(collective, ctx, *operands, axes, index_groups, **own):
    def with_lax(*xs):
        return collective.xla(xs, axes, index_groups, **own)

    return compat.lower_as(with_lax, ctx, *operands)


def _lower_alone(collective, ctx, *operands, **own):
    """A group of one device exchanges nothing: no communicator is made for it."""

    def alone(*xs):
        outs = collective.emulate_all([x[None] for x in xs], 1, **own)
        return [out[0] for out in outs]

    return compat.lower_as(alone, ctx, *operands)
