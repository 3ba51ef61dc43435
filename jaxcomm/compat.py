"""The only file that uses private parts of JAX or depends on its version.

``NEEDED`` lists what jaxcomm needs from its import on. The import fails where JAX lacks
one of these names, and says so. Other names serve few programs. They are looked up
when they are needed, and say on which versions they were checked. When a new JAX moves
a name, mend this file.
"""

import contextlib
import functools
import importlib
import inspect
import threading
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

# pyproject.toml has the same bounds.
REQUIREMENT = "jax>=0.10.2,<0.13"
# Where each name of NEEDED was checked.
CHECKED = ("0.10.2", "0.11.2", "0.12.0.1")
# By module: its names, and what is in them. A class has it as an attribute or a field.
NEEDED = {
    "jax._src.config": ["_check_vma.__call__", "_check_vma.value"],
    "jax._src.core": [
        *("AxisEnv.axis_exists", "AxisEnv.axis_size", "get_axis_env"),
        *("ManualAxisType.reduced", "ManualAxisType.unreduced"),
        *("ManualAxisType.update", "ManualAxisType.varying"),
        *("NamedAxisEffect", "Tracer", "trace_ctx.trace"),
        *("ShapedArray.manual_axis_type", "ShapedArray.mat", "ShapedArray.str_short"),
        *("ShapedArray.to_tangent_aval", "ShapedArray.update"),
    ],
    "jax._src.dispatch": ["prim_requires_devices_during_lowering.add"],
    "jax._src.distributed": ["global_state.client"],
    "jax._src.interpreters.batching": ["AxisData.name", "AxisData.size"],
    "jax._src.interpreters.partial_eval": ["DynamicJaxprTrace"],
    "jax._src.xla_bridge": ["backends", "num_cpu_devices.value"],
    # Public modules, and parts of them that JAX changes without notice too.
    "jax.extend.core": ["Primitive.def_effectful_abstract_eval"],
    "jax.interpreters.ad": [
        *("UndefinedPrimal.aval", "Zero", "instantiate_zeros"),
        *("is_undefined_primal", "primitive_jvps", "primitive_transposes"),
    ],
    "jax.interpreters.batching": ["fancy_primitive_batchers", "primitive_batchers"],
    "jax.interpreters.mlir": [
        *("LoweringRuleContext.avals_in", "LoweringRuleContext.avals_out"),
        *("LoweringRuleContext.module_context", "LoweringRuleContext.primitive"),
        *("LoweringRuleContext.replace", "ModuleContext.axis_context"),
        *("ModuleContext.module", "SPMDAxisContext.manual_axes"),
        *("SPMDAxisContext.mesh", "lower_fun", "register_lowering"),
    ],
    "jax.sharding": ["AbstractMesh.manual_axes", "NamedSharding.update"],
}


def needed_modules(
    find: Callable[[str], Any] = importlib.import_module,
) -> dict[str, Any]:
    """Return the modules of ``NEEDED``, by name, if this JAX has all that is in them.

    Args:
      find: returns the module of a name.
    """
    found, missing = {}, []
    for module, names in NEEDED.items():
        try:
            found[module] = find(module)
        except ImportError:
            missing.append(module)
        else:
            lacks = [name for name in names if not _has(found[module], name)]
            missing += [f"{module}.{name}" for name in lacks]
    if missing:
        raise ImportError(
            f"jaxcomm needs {', '.join(missing)}, which jax {jax.__version__} does not "
            f"have. jaxcomm was checked on jax {', '.join(CHECKED)}. Install one of "
            f"these: pip install {REQUIREMENT!r}"
        )
    return found


def _has(owner, path: str) -> bool:
    *outer, name = path.split(".")
    for each in outer:
        owner = getattr(owner, each, None)
    return hasattr(owner, name) or name in getattr(owner, "__dataclass_fields__", ())


_modules = needed_modules()
_config = _modules["jax._src.config"]
_core = _modules["jax._src.core"]
_dispatch = _modules["jax._src.dispatch"]
_distributed = _modules["jax._src.distributed"]
_pe = _modules["jax._src.interpreters.partial_eval"]
_xla_bridge = _modules["jax._src.xla_bridge"]
_ad = _modules["jax.interpreters.ad"]
_batching = _modules["jax.interpreters.batching"]
_mlir = _modules["jax.interpreters.mlir"]


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
      aval: a type.
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


def require_devices_during_lowering(primitive) -> None:
    """Keep JAX from reusing a lowering of ``primitive`` on other devices.

    Without it a jitted function called under two meshes of equal shape, with the
    devices in another order, runs with the first one's groups.
    """
    _dispatch.prim_requires_devices_during_lowering.add(primitive)


def register_types(primitive, rule) -> None:
    """Register ``rule(*avals, **params)``, which returns results' types and effects."""
    primitive.def_effectful_abstract_eval(rule)


def register_batching(primitive, rule) -> None:
    """Register ``rule(axis_data, operands, dims, **params)`` for ``jax.vmap``.

    ``axis_data`` has the ``name`` and ``size`` of the axis that is mapped.
    """
    _batching.fancy_primitive_batchers[primitive] = rule


def register_lowering(primitive, rule, platform: str | None = None) -> None:
    """Register a lowering rule; without a platform, for all that have none."""
    _mlir.register_lowering(primitive, rule, platform=platform)


def lower_as(function, ctx, *operands, **params):
    """Lower a call as the JAX function ``function(*operands, **params)``."""
    rule = _mlir.lower_fun(function, multiple_results=True)
    # Else what a kernel reads of an operand varies, and what it computes does not.
    plain = [aval.update(manual_axis_type=type(aval.mat)()) for aval in ctx.avals_in]
    # As under check_vma=False: in a lowering, types are settled.
    with _config._check_vma(False):
        return rule(ctx.replace(avals_in=plain), *operands, **params)


def has_tangent(x) -> bool:
    """Say whether ``x`` is of a type that can be differentiated by."""
    return jax.numpy.issubdtype(x.dtype, jax.numpy.inexact)


def current_trace():
    """Return what is tracing now: another object in each traced function."""
    return _core.trace_ctx.trace


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


def key_value_store() -> Any:
    """Return the client of ``jax.distributed``'s key-value store, None if none runs.

    It has ``key_value_set(key, text, allow_overwrite)``,
    ``blocking_key_value_get(key, milliseconds)`` and ``key_value_dir_get(folder)``,
    which returns the keys and texts of all entries below a folder at one moment.
    """
    return _distributed.global_state.client


def serve_jobs_store(address: str, processes: int) -> Any:
    """Serve what processes of ``jax.distributed`` meet in, until its ``shutdown()``.

    The end of a process does not end the others.

    Args:
      address: host and port.
      processes: how many there will be.
    """
    # Checked on 0.10.2, 0.12.0.1.
    return _distributed._jax.get_distributed_runtime_service(
        address, processes, recoverable=True
    )


class _ServedElsewhere:
    def shutdown(self):
        pass


@contextlib.contextmanager
def jobs_store_served_elsewhere():
    """Keep ``jax.distributed.initialize`` from serving the store in process 0."""
    # Checked on 0.10.2, 0.12.0.1.
    library = _distributed._jax
    serve = library.get_distributed_runtime_service
    library.get_distributed_runtime_service = lambda *_, **__: _ServedElsewhere()
    try:
        yield
    finally:
        library.get_distributed_runtime_service = serve


def around_start_of_devices(before, after) -> None:
    """Call ``before()`` and ``after()`` once, when this process first asks for devices.

    If ``before`` raises, so does whatever asked, and the next one calls it again.
    """
    start = _xla_bridge.backends
    acting = threading.RLock()
    waiting = [before]
    following = [after]

    def act_then_start():
        with acting:
            if waiting:
                waiting[0]()
                waiting.clear()
                if _xla_bridge.backends is act_then_start:
                    _xla_bridge.backends = start
        found = start()
        with acting:
            if following:
                following.pop()()
        return found

    _xla_bridge.backends = act_then_start


def make_cpu_client_inside(context) -> bool:
    """Have JAX make its CPU client inside ``context()``, now and whenever it is anew.

    Returns:
      False if this JAX makes it in a way that is not known here.
    """
    # Checked on 0.10.2, 0.11.2, 0.12.0.1.
    try:
        registration = _xla_bridge._backend_factories["cpu"]
        make = registration.factory

        @functools.wraps(make)
        def make_inside(*arguments, **options):
            with context():
                return make(*arguments, **options)

        registration.factory = make_inside
    except (AttributeError, KeyError):
        return False
    return True


def configured_cpu_devices() -> int | None:
    """Return how many CPU devices JAX was configured to have, None if it was not."""
    # Checked on 0.10.2, 0.11.2, 0.12.0.1.
    configured = _xla_bridge.num_cpu_devices.value
    return configured if configured >= 0 else None


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


# cuDNN's attention. All of it was checked on 0.10.2 and 0.11.2, whose functions take
# these, and on 0.12.0.1, where score_mod joined them. They are below JAX's rules for
# partitioning, which need to know the devices, and vmap: jaxcomm has its own.
_CUDNN_OPERANDS = (
    *("query", "key", "value", "bias", "q_seqlen", "kv_seqlen", "q_offsets"),
    *("kv_offsets", "page_table_k", "page_table_v"),
)
_CUDNN_SAVED = ("activation", "fwd_output", "grad_output")
_CUDNN_PARAMETERS = (
    *("scale", "seed", "dropout_rate", "variadic_args", "mask_type", "layout"),
    "sliding_window_length",
)


def _cudnn():
    # Not above: a JAX that keeps it elsewhere is a JAX without it, not an error.
    from jax._src.cudnn import fused_attention_stablehlo

    return fused_attention_stablehlo


def _cudnn_signatures(*score_mod: str):
    """Return the arguments that are known, of the forward and the backward pass."""
    parameters = (*(f"{name}_args" for name in score_mod), *_CUDNN_PARAMETERS)
    return (
        (*_CUDNN_OPERANDS, *parameters, *score_mod, "is_training"),
        (*_CUDNN_OPERANDS, *_CUDNN_SAVED, *parameters, *score_mod),
    )


def _cudnn_passes():
    cudnn = _cudnn()
    return cudnn._dot_product_attention_fwd_impl, cudnn._dot_product_attention_bwd_impl


def _cudnn_signatures_found():
    return tuple(tuple(inspect.signature(each).parameters) for each in _cudnn_passes())


# What JAX raises where it finds no device. It asserts that there is a platform of those
# that JAX_PLATFORMS names. Checked on 0.10.2, 0.12.0.1.
NO_DEVICES = (RuntimeError, AssertionError)


@functools.cache
def cudnn_attention_mismatch() -> str | None:
    """Say why JAX's calls of cuDNN's attention cannot be used; None if they can."""
    try:
        cudnn = _cudnn()
        _ = cudnn.MaskType.NO_MASK, cudnn.MaskType.CAUSAL, cudnn.AttentionLayout.BTNH
        found = _cudnn_signatures_found()
    except (ImportError, AttributeError) as error:
        return f"jax {jax.__version__} keeps cuDNN's attention elsewhere ({error})"
    if found not in (_cudnn_signatures(), _cudnn_signatures("score_mod")):
        return (
            f"jax {jax.__version__} calls cuDNN's attention in a way that this jaxcomm "
            "does not know"
        )
    return None


def cudnn_forward(
    query, key, value, *, scale: float, is_causal: bool, left: int | None = None
):
    """Compute attention with cuDNN; can be lowered for CUDA only.

    Args:
      query: (B, T, N, D) bfloat16 or float16.
      key, value: (B, S, K, D) of the same dtype; K divides N.
      scale: factor on the scores.
      is_causal: whether query i sees only keys 0 to i. Else it sees all.
      left: if causal, how many keys before its own a query sees. If None, all of them.

    Returns:
      (out, lse): (B, T, N, D) in that dtype, and (B, N, T) float32, the natural
      logarithm of the sum of exp(scale * query . key).
    """
    operands = query, key, value
    return _call_cudnn(0, operands, (), scale, is_causal, left, is_training=True)


def cudnn_backward(
    query,
    key,
    value,
    lse,
    out,
    grad_out,
    *,
    scale: float,
    is_causal: bool,
    left: int | None = None,
):
    """Compute the gradients of query, key and value, in their dtype.

    Args:
      query, key, value, scale, is_causal, left: as in :func:`cudnn_forward`.
      lse, out: what that returned. Or the same over more keys than these, and the
        gradients are what these keys contribute.
      grad_out: like ``out``.
    """
    operands, saved = (query, key, value), (lse, out, grad_out)
    return _call_cudnn(1, operands, saved, scale, is_causal, left)


def _call_cudnn(index: int, operands, saved, scale, is_causal, left, **more):
    cudnn = _cudnn()
    if _cudnn_signatures_found() == _cudnn_signatures("score_mod"):
        more |= {"score_mod_args": (), "score_mod": None}
    unused = [jax.numpy.zeros(0, operands[0].dtype)] * (len(_CUDNN_OPERANDS) - 3)
    return _cudnn_passes()[index](
        *(*operands, *unused, *saved),
        scale=scale,
        seed=0,
        dropout_rate=0.0,
        variadic_args=(False, False),  # No bias, so no gradient of one.
        mask_type=cudnn.MaskType.CAUSAL if is_causal else cudnn.MaskType.NO_MASK,
        layout=cudnn.AttentionLayout.BTNH.value,
        # The query's own key counts.
        sliding_window_length=None if left is None else left + 1,
        **more,
    )


@functools.cache
def triton_mismatch() -> str | None:
    """Say why Pallas cannot make kernels with Triton here; None if it can."""
    # Checked on 0.10.2, 0.11.2, 0.12.0.1. Deprecated since 0.11.
    try:
        _triton_parameters()
    except (ImportError, AttributeError) as error:
        return f"jax {jax.__version__} makes no kernels with Triton ({error})"
    return None


def why_no_triton_for(device_kind: str) -> str | None:
    """Say why Triton makes no kernels for a kind of GPU, or None."""
    # Since 0.12 JAX has a list of those it knows. Checked on 0.12.0.1.
    try:
        gpu_info = importlib.import_module("jax._src.pallas.triton.gpu_info")
        known = gpu_info.gpu_version_from_device_kind
    except (ImportError, AttributeError):
        return None
    if known(device_kind) is not None:
        return None
    return f"jax {jax.__version__} makes no kernels for {device_kind!r}"


def triton_parameters(*, warps: int, stages: int):
    """Return ``compiler_params`` of ``pallas_call`` for a kernel by Triton."""
    return _triton_parameters()(num_warps=warps, num_stages=stages)


@contextlib.contextmanager
def without_triton_warning():
    """Keep JAX from saying in every program that Pallas for Triton is deprecated."""
    message = "The Pallas Triton backend is deprecated"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message, DeprecationWarning)
        yield


def _triton_parameters():
    # Not above: it takes a quarter of a second, and few programs need it.
    from jax.experimental.pallas import triton

    return triton.CompilerParams


def from_dlpack(capsule, device) -> jax.Array:
    """Return the array of a DLPack capsule, on the device whose memory it is in.

    ``jax.dlpack.from_dlpack`` takes all CPU memory to belong to the first CPU device.

    Args:
      capsule: as ``__dlpack__()`` returns it.
      device: whose memory it is.
    """
    # Checked on 0.10.2, 0.11.2, 0.12.0.1.
    from jax._src.lib import _jax

    stream = None
    if device.platform != "cpu":
        stream = device.get_stream_for_external_ready_events()
    return _jax.dlpack_managed_tensor_to_buffer(capsule, device, stream, None)


def cudnn_version() -> int | None:
    """Return cuDNN's version, as 91300 for 9.13.0, or None where JAX has none."""
    # Checked on 0.10.2, 0.11.2, 0.12.0.1.
    try:
        from jax._src.lib import cuda_versions

        return None if cuda_versions is None else cuda_versions.cudnn_get_version()
    except (ImportError, AttributeError, RuntimeError):
        return None
