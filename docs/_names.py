"""The public names of jaxcomm, and the page of ``docs/api`` that documents each."""

import inspect
from collections.abc import Iterator
from typing import Any

import jaxcomm

# The page of docs/api for names that a module or package defines: the longest match.
GROUPS = {
    "jax": "collectives",  # axis_index and axis_size are jax.lax's own.
    "jaxcomm.collectives": "collectives",
    "jaxcomm.collectives.split_phase": "split-phase",
    "jaxcomm.primitives": "collectives",
    "jaxcomm.primitives.split_phase": "split-phase",
    "jaxcomm.attention": "attention",
    "jaxcomm.planning": "planning",
    "jaxcomm.machine": "planning",
    "jaxcomm.communicator": "communicators",
    "jaxcomm.errors": "communicators",
    "jaxcomm.diagnostics": "diagnostics",
}

# Classes of which users get objects: how to make one is not documented.
RETURNED = {
    "CollectiveCounts",
    "Communicator",
    "Communicators",
    "Counters",
    "FlightRecord",
    "Handle",
    "MemoryRow",
    "attention.Comparison",
    "planning.Plan",
}


def public_objects() -> Iterator[tuple[str, Any]]:
    """Yield each public name, as users write it, and its object, each object once."""
    modules = []
    seen = set()
    for name in jaxcomm.__all__:
        found = getattr(jaxcomm, name)
        if inspect.ismodule(found):
            modules.append((f"jaxcomm.{name}", found))
            continue
        seen.add(id(found))
        yield f"jaxcomm.{name}", found
    for prefix, module in modules:
        for name, found in sorted(vars(module).items()):
            if callable(found) and not name.startswith("_") and id(found) not in seen:
                yield f"{prefix}.{name}", found


def group_of(name: str, found: Any) -> str:
    """Return the page of docs/api for a public name.

    Raises:
      LookupError: no group has its module.
    """
    module = name.rpartition(".")[0]
    if module == "jaxcomm":
        module = found.__module__
    parts = module.split(".")
    for count in range(len(parts), 0, -1):
        if group := GROUPS.get(".".join(parts[:count])):
            return group
    raise LookupError(
        f"{name} is public, and GROUPS in docs/_names.py gives its module, "
        f"{module}, no page of docs/api"
    )
