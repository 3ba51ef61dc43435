"""The public names of jaxcomm, and the page of ``docs/api`` that documents each."""

import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import jaxcomm

# The page of docs/api for names that a module or package defines: the longest match.
GROUPS = {
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
    "jaxcomm.checksums": "diagnostics",
}

# Classes of which users get objects: how to make one is not documented.
RETURNED = {"Communicator", "Handle"}


def public_objects(module: ModuleType = jaxcomm) -> Iterator[tuple[str, Any]]:
    """Yield each public name, as users write it, and its object: namespaces last."""
    found = [(name, getattr(module, name)) for name in module.__all__]
    for name, inner in sorted(found, key=lambda pair: inspect.ismodule(pair[1])):
        if inspect.ismodule(inner):
            yield from public_objects(inner)
        else:
            yield f"{module.__name__}.{name}", inner


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
