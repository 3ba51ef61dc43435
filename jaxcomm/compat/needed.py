"""What jaxcomm needs of JAX from its import on."""

import importlib
import warnings
from collections.abc import Callable
from typing import Any

import jax

# pyproject.toml has the lower bound alone: a newer JAX is tried, and warned of.
REQUIREMENT = "jax>=0.10.2,<0.13"
# Where each name of NEEDED was checked. The last is the newest that ran the tests.
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
    "jax._src.interpreters.partial_eval": ["DynamicJaxprTrace", "dce_jaxpr"],
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
    """Return the modules of ``NEEDED``, by name, if this JAX has all that they hold."""
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


def warn_of_newer(version: str) -> None:
    """Warn if no test ran on this version of JAX, nor on another patch of it."""
    tried, found = (tuple(map(int, of.split(".")[:2])) for of in (CHECKED[-1], version))
    if found > tried:
        warnings.warn(
            f"jaxcomm was not tried on jax {version}; {CHECKED[-1]} is the newest that "
            "ran its tests. The names that it needs are there. Run python -m "
            "jaxcomm.doctor --check, which compares collectives with XLA's, or "
            f"pip install {REQUIREMENT!r}",
            stacklevel=2,
        )


def _has(owner, path: str) -> bool:
    *outer, name = path.split(".")
    for each in outer:
        owner = getattr(owner, each, None)
    return hasattr(owner, name) or name in getattr(owner, "__dataclass_fields__", ())


MODULES = needed_modules()
warn_of_newer(jax.__version__)
