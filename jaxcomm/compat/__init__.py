"""The only folder that uses private parts of JAX or depends on its version.

``NEEDED`` lists what jaxcomm needs from its import on. The import fails where JAX lacks
one of these names, and says so. Other names serve few programs. They are looked up
when they are needed, and say on which versions they were checked. When a new JAX moves
a name, mend this folder.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm.compat.meshes import (
    require_devices_during_lowering as require_devices_during_lowering,
)
from jaxcomm.compat.needed import CHECKED as CHECKED
from jaxcomm.compat.needed import MODULES as MODULES
from jaxcomm.compat.needed import NEEDED as NEEDED
from jaxcomm.compat.needed import REQUIREMENT as REQUIREMENT
from jaxcomm.compat.needed import needed_modules as needed_modules
from jaxcomm.compat.needed import warn_of_newer as warn_of_newer
from jaxcomm.compat.processes import around_compilation as around_compilation
from jaxcomm.compat.processes import around_start_of_devices as around_start_of_devices
from jaxcomm.compat.processes import configured_cpu_devices as configured_cpu_devices
from jaxcomm.compat.processes import forget_topology as forget_topology
from jaxcomm.compat.processes import from_dlpack as from_dlpack
from jaxcomm.compat.processes import (
    jobs_store_served_elsewhere as jobs_store_served_elsewhere,
)
from jaxcomm.compat.processes import key_value_store as key_value_store
from jaxcomm.compat.processes import make_cpu_client_inside as make_cpu_client_inside
from jaxcomm.compat.processes import serve_jobs_store as serve_jobs_store

_config = MODULES["jax._src.config"]
_core = MODULES["jax._src.core"]
_pe = MODULES["jax._src.interpreters.partial_eval"]
_ad = MODULES["jax.interpreters.ad"]
_batching = MODULES["jax.interpreters.batching"]
_mlir = MODULES["jax.interpreters.mlir"]


def explicit_sharding(x):
    """Return the sharding of ``x`` where its type has one, or None.

    Types have one on meshes with explicit axes, outside of ``jax.shard_map``.
    """
    sharding = jax.typeof(x).sharding
    mesh = sharding.mesh
    if mesh.empty or jax.sharding.AxisType.Explicit not in mesh.axis_types:
        return None
    return sharding


def mesh_platform() -> str | None:
    """Return the platform of the mesh that a program is traced for, or None.

    None outside of a mesh, and of an abstract mesh that names no device.
    """
    # Checked on 0.10.2: an AbstractDevice has device_kind and platform.
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    return getattr(device, "platform", None)


def abstract_mesh(sizes: dict[str, int], platform: str) -> jax.sharding.AbstractMesh:
    """Return a mesh of Auto axes without devices, of this :func:`mesh_platform`."""
    return jax.sharding.AbstractMesh(
        tuple(sizes.values()),
        tuple(sizes),
        axis_types=(jax.sharding.AxisType.Auto,) * len(sizes),
        # Checked on 0.10.2, 0.12.0.1: its kind, cores and platform.
        abstract_device=jax.sharding.AbstractDevice(platform, None, platform),
    )


def manual_axes() -> frozenset:
    """Return the axes of several devices over which this trace's mesh is manual."""
    # Checked on 0.10.2, 0.12.0.1.
    mesh = jax.sharding.get_abstract_mesh()
    return frozenset(axis for axis in mesh.manual_axes if mesh.shape[axis] > 1)


def checks_varying_axes() -> bool:
    """Say whether this trace is under ``shard_map(..., check_vma=True)``."""
    return _config._check_vma.value


def types_gathered_values() -> bool:
    """Say whether jax.lax regards ``all_gather(to=)`` in this trace.

    Without ``check_vma`` it takes every ``to`` for ``"varying"`` from 0.12 on. The
    transpose of ``"varying"`` sums, and the one of ``"invarying"`` does not.
    """
    # Checked on 0.10.2, 0.11.2, 0.12.0.1.
    return jax.__version_info__ < (0, 12) or checks_varying_axes()


class Kinds(NamedTuple):
    """The manual mesh axes over which a value is of some kind, as sets of names.

    Attributes:
      varying: over which it may differ between devices.
      unreduced: over which devices hold terms of a sum that is still to be taken.
      reduced: over which it is equal, and its cotangent is unreduced.
    """

    varying: frozenset
    unreduced: frozenset
    reduced: frozenset


def kinds_of(x) -> Kinds:
    """Return the kinds of an array, or of a type.

    >>> kinds_of(jax.numpy.ones(2)).varying
    frozenset()
    """
    mat = (x if isinstance(x, _core.ShapedArray) else jax.typeof(x)).mat
    return Kinds(mat.varying, mat.unreduced, mat.reduced)


def varying_axes(x) -> frozenset:
    """Return the mesh axes over which an array, or a type, may differ."""
    return kinds_of(x).varying


def type_text(aval) -> str:
    """Return a type as JAX writes it, with its kinds.

    >>> type_text(jax.typeof(jax.numpy.ones(2)))
    'f32[2]'
    """
    return aval.str_short(True)


def with_manual_axes(aval, **kinds: frozenset):
    """Return ``aval`` with other axes over which it is of some kinds.

    Args:
      **kinds: the mesh axes over which it is ``varying``, ``unreduced`` or ``reduced``.
    """
    # Constants come without the mesh, which the type needs.
    mesh = jax.sharding.get_abstract_mesh()
    aval = aval.update(sharding=aval.sharding.update(mesh=mesh))
    mat: Any = aval.mat
    # From jax 0.11 on a type also says how it is unreduced, but not without axes.
    if hasattr(mat, "unreduced_kind") and not kinds.get("unreduced", mat.unreduced):
        return aval.update(manual_axis_type=mat.update(**kinds, unreduced_kind=None))
    return aval.update(manual_axis_type=mat.update(**kinds))


def is_unreduced_sum(aval) -> bool:
    """Say whether unreduced parts of an operand add up: newer jax has others."""
    return getattr(getattr(aval.mat, "unreduced_kind", None), "name", "sum") == "sum"


def with_varying_axes(aval, axes):
    """Return ``aval`` varying over exactly ``axes`` of the current mesh."""
    return with_manual_axes(aval, varying=frozenset(axes))


def zero_tangent(primal):
    """Return the symbolic zero that is the tangent of ``primal``."""
    return _ad.Zero(jax.typeof(primal).to_tangent_aval())


def is_zero_tangent(tangent) -> bool:
    """Say whether a tangent or cotangent is a symbolic zero."""
    return type(tangent) is _ad.Zero


def axis_size(axis) -> int:
    """Return the extent of an axis, as ``jax.lax.axis_size`` does.

    It also knows the one of a ``jax.vmap`` while the backward pass of a
    ``jax.custom_vjp`` is traced, which JAX (0.10.2, 0.11.2, 0.12.0.1) names there to
    the rules for batching alone.

    Raises:
      NameError: if no mapping binds the axis.
    """
    env = _core.get_axis_env()
    if env.axis_exists(axis):
        return env.axis_size(axis)
    trace = _core.trace_ctx.trace
    while trace is not None:
        mapped = getattr(trace, "axis_data", None)
        if mapped is not None and mapped.name == axis:
            return mapped.size
        trace = getattr(trace, "parent_trace", None)
    raise NameError(f"unbound axis name: {axis}")


def check_axes_bound(axes, name: str) -> None:
    """Raise NameError, as JAX does, if an axis is not bound by a mapping."""
    for axis in axes:
        try:
            axis_size(axis)
        except NameError as error:
            raise NameError(
                f"{error}. Call jaxcomm.{name} inside jax.shard_map "
                f"over a mesh with that axis, or jax.vmap(..., axis_name={axis!r})."
            ) from None


def named_axis_effects(axes):
    """Return the effects by which JAX knows what axes a jaxpr needs bound."""
    return {_core.NamedAxisEffect(axis) for axis in axes}


def register_types(primitive, rule) -> None:
    """Register ``rule(*avals, **params)``, which returns results' types and effects."""
    primitive.def_effectful_abstract_eval(rule)


def register_batching(primitive, rule) -> None:
    """Register ``rule(axis_data, operands, dims, **params)`` for ``jax.vmap``.

    ``axis_data`` has the ``name`` and ``size`` of the axis that is mapped. Operands are
    arrays: JAX hands over a number of a program as it stands there, without a shape.
    """

    def batch(axis_data, operands, dims, **params):
        operands = [x if hasattr(x, "shape") else jnp.asarray(x) for x in operands]
        return rule(axis_data, operands, dims, **params)

    _batching.fancy_primitive_batchers[primitive] = batch


def register_lowering(
    primitive, rule, platform: str | None = None, *, shared: bool = True
) -> None:
    """Register a lowering rule; without a platform, for all that have none.

    Unless ``shared``, JAX lowers each call by itself, and equal ones too.
    """
    _mlir.register_lowering(primitive, rule, platform=platform, cacheable=shared)


def lower_as(function, ctx, *operands, **params):
    """Lower a call as the JAX function ``function(*operands, **params)``."""
    rule = _mlir.lower_fun(function, multiple_results=True)
    # Else what a kernel reads of an operand varies, and what it computes does not.
    plain = [aval.update(manual_axis_type=type(aval.mat)()) for aval in ctx.avals_in]
    # As under check_vma=False: in a lowering, types are settled.
    with _config._check_vma(False):
        return rule(ctx.replace(avals_in=plain), *operands, **params)


def lowering_platform(ctx) -> str | None:
    """Return the platform that a program is lowered for; None if it is for several."""
    platforms = ctx.platforms or ctx.module_context.platforms
    return platforms[0] if len(platforms) == 1 else None


def program_name(ctx) -> str:
    """Return what a program being lowered is called, such as ``"jit_step"``."""
    name = ctx.module_context.module.operation.attributes["sym_name"]
    return str(name).strip('"')


def has_tangent(x) -> bool:
    """Say whether ``x`` is of a type that can be differentiated by."""
    return jax.numpy.issubdtype(x.dtype, jax.numpy.inexact)


def current_trace():
    """Return what is tracing now: another object in each traced function."""
    return _core.trace_ctx.trace


def traced(function, args):
    """Return a function's jaxpr without what nobody uses, as JAX lowers it."""
    jaxpr = jax.make_jaxpr(function)(*args).jaxpr
    return _pe.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0]


def is_staging() -> bool:
    """Say whether calls go into a program; otherwise each is one by itself."""
    trace = current_trace()
    while trace is not None and not isinstance(trace, _pe.DynamicJaxprTrace):
        trace = getattr(trace, "parent_trace", None)
    return trace is not None


def is_tracer(x) -> bool:
    """Say whether ``x`` is being traced rather than a concrete value."""
    return isinstance(x, _core.Tracer)


def known_value(x):
    """Return an array as numpy where this process can read all of it now, or None."""
    if is_tracer(x) or not getattr(x, "is_fully_addressable", True):
        return None
    return np.asarray(x)


def concrete_mesh(ctx):
    """Return the ``jax.sharding.Mesh`` a program is being lowered for, or None.

    None outside shard_map, and where only an abstract mesh is known.
    """
    mesh = getattr(ctx.module_context.axis_context, "mesh", None)
    return mesh if isinstance(mesh, jax.sharding.Mesh) else None


def operation_named(ctx, name: str):
    """Return a context in which what is lowered has this name in profiles.

    XLA names an instruction by the last part of its location, which JAX makes the name
    of the primitive. The rest of the location stays: the scopes, and the source line.
    """
    # Checked on 0.10.2. Where locations are made otherwise, the names stay JAX's.
    name = name.replace("/", "_")
    kind = type(ctx.module_context.module.operation.location)

    def renamed(location):
        if not hasattr(location, "name_str"):
            return location
        text = location.name_str.replace(ctx.primitive.name, name)
        inner = renamed(location.child_loc)
        return kind.name(text, childLoc=inner)

    return renamed(kind.current)


def program_text(ctx) -> str:
    """Return what a program being lowered is called, with its arguments' types.

    Known before the program's body is lowered, and the same on every process.
    """
    module = ctx.module_context.module
    name = str(module.operation.attributes["sym_name"])
    for operation in module.body.operations:
        attributes = operation.attributes
        if "sym_name" in attributes and str(attributes["sym_name"]) == '"main"':
            return f"{name} {attributes['function_type']}"
    return name


def automatic_axes(ctx) -> frozenset:
    """Return the mesh axes of several devices that shard_map left to XLA.

    Outside of shard_map there are none.
    """
    axis_context = ctx.module_context.axis_context
    if getattr(axis_context, "mesh", None) is None:
        return frozenset()
    sizes = axis_context.mesh.shape
    # No default: without the attribute a manual axis is not to be told from one of XLA.
    manual = frozenset(axis_context.manual_axes)
    return frozenset(axis for axis in sizes if sizes[axis] > 1) - manual


# What JAX raises where it finds no device. It asserts that there is a platform of those
# that JAX_PLATFORMS names. Checked on 0.10.2, 0.12.0.1.
NO_DEVICES = (RuntimeError, AssertionError)
