"""The only file that emits custom calls: a communicator's key and attributes."""

import jax
import numpy as np

from jaxcomm import _jax_compat, communicator, mesh_groups


def register(collective) -> None:
    """Registers how a collective's primitive is lowered on every platform."""
    primitive = collective.primitive

    def on_cpu(ctx, *operands, **params):
        return _lower(collective, ctx, *operands, **params)

    def elsewhere(ctx, *operands, axes, index_groups, name, **params):
        return _lower_to_xla(collective, ctx, *operands, axes=axes,
                             index_groups=index_groups, **_own(params))  # fmt: skip

    _jax_compat.require_devices_during_lowering(primitive)
    _jax_compat.register_lowering(primitive, on_cpu, platform="cpu")
    _jax_compat.register_lowering(primitive, elsewhere)


def _own(params):
    common = ("lane", "backend", "invariant", "name")
    return {key: value for key, value in params.items() if key not in common}


def _lower(
    collective, ctx, *operands, axes, index_groups, name, lane, backend, **params
):
    mesh = _jax_compat.concrete_mesh(ctx)
    if mesh is None:
        raise ValueError(
            f"{name} over {axes}: this program is lowered for an abstract mesh, which "
            f"has no devices to communicate between. Give jax.shard_map a mesh of "
            f"devices."
        )
    grid = _jax_compat.device_grid(mesh)
    part = mesh_groups.partition(grid, axes, index_groups)
    own = _own(params)
    if max(part.sizes) == 1:
        return _lower_alone(collective, ctx, *operands, **own)
    comm = communicator.for_lowering(mesh, axes, index_groups, lane, backend)
    if comm.backend == "xla":
        return _lower_to_xla(
            collective, ctx, *operands, axes=axes, index_groups=index_groups, **own
        )
    rule = jax.ffi.ffi_lowering(
        f"jaxcomm.{collective.name}",
        operand_output_aliases=collective.aliases(len(operands)) or None,
    )
    planner_params = collective.planner_params(
        ctx.avals_in,
        part.sizes[0],
        **own,
    )
    return rule(
        ctx,
        *operands,
        collective=collective.name,
        name=name,
        axes=str(axes),
        key=np.int64(comm.key),
        reduce=own.get("op", "sum"),
        params=np.asarray(planner_params, dtype=np.int64),
    )


def _lower_to_xla(collective, ctx, *operands, axes, index_groups, **own):
    def with_lax(*xs):
        return collective.xla(xs, axes, index_groups, **own)

    return _jax_compat.lower_as(with_lax, ctx, *operands)


def _lower_alone(collective, ctx, *operands, **own):
    """A group of one device exchanges nothing: no communicator is made for it."""

    def alone(*xs):
        outs = collective.emulate_all([x[None] for x in xs], 1, **own)
        return [out[0] for out in outs]

    return _jax_compat.lower_as(alone, ctx, *operands)
