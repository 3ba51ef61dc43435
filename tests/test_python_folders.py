"""The package's folders are its architecture: a folder imports only folders below it.

All of it is read from the source, so that no import order hides an edge.
"""

import ast
import pathlib

import pytest

import jaxcomm

PACKAGE = pathlib.Path(jaxcomm.__file__).parent
# From below. Folders, and files beside them, of one line do not import each other.
LAYERS = (
    ("errors", "config", "_ffi", "_built", "machine"),
    ("compat",),
    ("communicator",),
    ("diagnostics",),
    ("primitives",),
    ("collectives",),
    ("attention", "fsdp"),
    ("planning",),
    ("__init__",),
    ("launch", "doctor"),
)
# Tools that are to leave the package; they may import all of it.
OUTSIDE = {"bench", "demo", "soak"}
# Modules that are there with an extra alone, or that must not be imported early.
MAY_BE_LATE: dict[str, str] = {
    "communicator/failures.py": "a signal handler's thread",
    "launch/child.py": "the program to launch chooses when JAX is imported",
    "launch/records.py": "most runs do not fail, and need no merge",
}


def files():
    found = sorted(PACKAGE.rglob("*.py"))
    return [
        path
        for path in found
        if path.relative_to(PACKAGE).parts[0].removesuffix(".py") not in OUTSIDE
    ]


def folder_of(module: str) -> str:
    """Returns the part of the package that holds ``jaxcomm.<...>``."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def imported(node: ast.AST) -> list[str]:
    """Returns the modules of jaxcomm that an import statement imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names if alias.name.startswith("jaxcomm")]
    if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith(
        "jaxcomm"
    ):
        return []
    parts = {name for layer in LAYERS for name in layer} | OUTSIDE
    if node.module == "jaxcomm":
        return [
            f"jaxcomm.{alias.name}" if alias.name in parts else "jaxcomm"
            for alias in node.names
        ]
    return [
        f"{node.module}.{alias.name}"
        if module_exists(f"{node.module}.{alias.name}")
        else node.module
        for alias in node.names
    ]


def module_exists(module: str) -> bool:
    path = PACKAGE.joinpath(*module.split(".")[1:])
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def edges(path: pathlib.Path) -> list[tuple[str, bool]]:
    """Returns the modules a file imports, also for types, and whether in a function."""
    found: list[tuple[str, bool]] = []

    def visit(node, inside):
        inside = inside or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        found.extend((module, inside) for module in imported(node))
        for child in ast.iter_child_nodes(node):
            visit(child, inside)

    visit(ast.parse(path.read_text()), False)
    return found


def name_of(path: pathlib.Path) -> str:
    relative = path.relative_to(PACKAGE).with_suffix("")
    parts = [part for part in relative.parts if part != "__init__"]
    return ".".join(["jaxcomm", *parts])


def level(folder: str) -> int:
    (found,) = [i for i, layer in enumerate(LAYERS) if folder in layer]
    return found


def test_every_folder_has_its_place():
    found = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in files()}
    known = {name for layer in LAYERS for name in layer} - {"_ffi"}
    assert found == known


def test_a_folder_imports_only_folders_below_it():
    climbs = []
    for path in files():
        here = folder_of(name_of(path))
        for module, _ in edges(path):
            there = folder_of(module)
            if there != here and level(there) >= level(here):
                climbs.append(f"{path.relative_to(PACKAGE)} imports {module}")
    assert climbs == []


def test_no_file_imports_itself_by_way_of_others():
    graph = {name_of(path): {module for module, _ in edges(path)} for path in files()}
    done: set[str] = set()

    def visit(module, way):
        if module in way:
            circle = [*way[way.index(module) :], module]
            pytest.fail(f"a circle: {' -> '.join(circle)}")
        if module in done:
            return
        for other in sorted(graph.get(module, ())):
            visit(other, (*way, module))
        done.add(module)

    for module in graph:
        visit(module, ())


def test_no_function_imports_the_package():
    late = [
        f"{path.relative_to(PACKAGE)} imports {module} inside a function"
        for path in files()
        if str(path.relative_to(PACKAGE)) not in MAY_BE_LATE
        for module, inside in edges(path)
        if inside
    ]
    assert late == []


def test_only_compat_imports_private_parts_of_jax():
    private = []
    for path in files():
        if path.name == "compat.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
            private += [f"{path.name}: {n}" for n in names if "jax._src" in n]
            if isinstance(node, ast.Attribute) and node.attr == "_src":
                private.append(f"{path.name}: {ast.unparse(node)}")
    assert private == []
