"""Check that folders depend only on folders below them, and that BUILD is complete.

It also checks that only compat/ uses what is private to JAX. `make lint` runs it. It
reads the sources, so that no import order hides an edge.
"""

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# ---- C++: from below. Folders on one line do not include each other.
ORDER = [
    ["base", "watch"],
    ["os"],
    ["flight"],
    ["core"],
    ["planners"],
    ["xla", "backends/nccl", "backends/host/reduce"],
    ["backends/host/arena"],
    ["backends/host/local"],
    ["python"],
]
LEVELS = {folder: level for level, folders in enumerate(ORDER) for folder in folders}

# ---- Python: from below. Folders, and files beside them, of a line do not import each
# other.
PACKAGE = ROOT / "jaxcomm"
LAYERS = (
    ("errors", "config", "renamed", "_ffi", "machine", "own_file"),
    ("_built",),
    ("compat",),
    ("communicator",),
    ("diagnostics",),
    ("primitives",),
    ("collectives",),
    ("attention",),
    ("planning",),
    ("checksums",),
    ("__init__",),
    ("launch", "doctor"),
)
PARTS = {name: level for level, names in enumerate(LAYERS) for name in names}
# Modules that are there with an extra alone, or that must not be imported early.
MAY_BE_LATE = {
    "communicator/failures.py": "a signal handler's thread",
    "launch/child.py": "the program to launch chooses when JAX is imported",
}
# What JAX may change without notice. Others call a function of compat/.
PRIVATE_MODULES = r"jax\._src\b|jax\.interpreters\.(?!ad\b|batching\b)"
PRIVATE = {
    *("_backend_factories", "_check_vma", "_src", "abstract_device", "axis_context"),
    *("def_effectful_abstract_eval", "fancy_primitive_batchers", "get_axis_env"),
    *("global_state", "lower_fun", "manual_axis_type", "mat", "module_context"),
    *("parent_trace", "register_lowering", "str_short", "strip_weak_type"),
    *("to_tangent_aval", "trace_ctx", "unreduced_kind"),
}


def _name(path):
    return path.relative_to(ROOT).as_posix()


def _folder(name):
    inner = name.removeprefix("ffi/")
    return next((f for f in LEVELS if inner.startswith(f + "/")), None)


def cpp_faults():
    """Yield what is wrong with the includes of ffi/."""
    kinds = {".cc", ".h", ".inc", ".cu"}
    for path in sorted(p for p in (ROOT / "ffi").rglob("*") if p.suffix in kinds):
        name, text = _name(path), path.read_text("utf-8")
        own = _folder(name)
        if own is None:
            yield f"{name}: its folder is none of {list(LEVELS)}"
            continue
        for header in re.findall(r'(?m)^\s*#\s*include\s*["<]([^">]+)[">]', text):
            if "tests/" in header:
                yield f"{name} includes a test: {header}"
            if not header.startswith("ffi/"):
                continue
            if not (ROOT / header).is_file():
                yield f"{name} includes {header}: no such file"
                continue
            other = _folder(header)
            if own != other and LEVELS[own] <= LEVELS[other]:
                yield f"{name} includes {header}, of a folder that is not below"
        if own != "python" and re.search(r"nanobind|\bPy[A-Z_]\w+|Python\.h", text):
            yield f"{name} sees Python"
        stand_in = re.search(r"(?i)stand-?in\b|fake|jaxcommTestDouble", text)
        if stand_in and name != "ffi/backends/nccl/library/test_double.h":
            yield f"{name} names the stand-in for NCCL"
        for guard in re.findall(r"(?m)^#ifndef (JAXCOMM_\w+_H_)$", text):
            if guard != f"JAXCOMM_{re.sub('[/.]', '_', name).upper()}_":
                yield f"{name} has the guard {guard}"


def _exists(module):
    path = PACKAGE.joinpath(*module.split(".")[1:])
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def _imported(node):
    if isinstance(node, ast.Import):
        return [a.name for a in node.names if a.name.startswith("jaxcomm")]
    if not isinstance(node, ast.ImportFrom):
        return []
    source = node.module or ""
    if not source.startswith("jaxcomm"):
        return []
    if source == "jaxcomm":
        names = [a.name for a in node.names]
        return [f"jaxcomm.{n}" if n in PARTS else "jaxcomm" for n in names]
    whole = [f"{source}.{a.name}" for a in node.names]
    return [module if _exists(module) else source for module in whole]


def _edges(tree):
    found = []

    def visit(node, inside):
        inside = inside or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        found.extend((module, inside) for module in _imported(node))
        for child in ast.iter_child_nodes(node):
            visit(child, inside)

    visit(tree, False)
    return found


def _part(module):
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def python_faults():
    """Yield what is wrong with the imports of jaxcomm/."""
    graph = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        tree = ast.parse(path.read_text())
        inner = path.relative_to(PACKAGE).with_suffix("").parts
        module = ".".join(["jaxcomm", *(p for p in inner if p != "__init__")])
        if _part(module) not in PARTS:
            yield f"{name}: {_part(module)} is in no layer"
            continue
        edges = _edges(tree)
        graph[module] = {other for other, _ in edges}
        for other, inside in edges:
            if _part(other) not in PARTS:
                yield f"{name} imports {other}, which is in no layer"
                continue
            climbs = PARTS[_part(other)] >= PARTS[_part(module)]
            if _part(other) != _part(module) and climbs:
                yield f"{name} imports {other}, of a folder that is not below"
            if _part(other) == "_ffi" and module != "jaxcomm._built":
                yield f"{name} imports _ffi, which may be absent: take _built._ffi"
            if inside and name not in MAY_BE_LATE:
                yield f"{name} imports {other} inside a function"
        if _part(module) != "compat":
            for line, used in sorted(dict(_private(tree)).items()):
                yield f"{name}:{line} uses {used} of JAX, which only compat/ may"
    yield from _circles(graph)


def _private(tree):
    """Yield the line and the name of each use of what is private to JAX."""
    for node in ast.walk(tree):
        modules, names = [], []
        match node:
            case ast.Import():
                modules = [each.name for each in node.names]
            case ast.ImportFrom(module=str(module)):
                names = [each.name for each in node.names]
                modules = [f"{module}.{each}" for each in names]
            case ast.Attribute(value=ast.Name(id="compat")):
                pass
            case ast.Attribute():
                names, modules = [node.attr], [ast.unparse(node)]
            case ast.Call(func=ast.Name(id="getattr" | "hasattr" | "setattr")):
                names = [each.value for each in node.args if _is_text(each)]
            case ast.keyword(arg=str(name)):
                names = [name]
        for each in names:
            if each in PRIVATE:
                yield node.lineno, each
        for each in modules:
            if re.match(PRIVATE_MODULES, each):
                yield node.lineno, each


def _is_text(node):
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _circles(graph):
    done = set()

    def visit(module, way):
        if module in way:
            yield f"a circle: {' -> '.join([*way[way.index(module) :], module])}"
        elif module not in done:
            for other in sorted(graph.get(module, ())):
                yield from visit(other, (*way, module))
            done.add(module)

    for module in graph:
        yield from visit(module, ())


def _glob(include, exclude=(), allow_empty=False):
    def found(patterns):
        return {_name(p) for pat in patterns for p in ROOT.glob(pat) if p.is_file()}

    files = sorted(found(include) - found(exclude))
    assert files or allow_empty, f"no file matches {include}"
    return files


def bazel_faults():
    """Yield files and headers that the targets of BUILD lack, and sources of none."""
    targets = {}

    def rule(**attributes):
        targets[attributes["name"]] = attributes

    names = {"load": lambda *_: None, "package": lambda **_: None, "glob": _glob}
    names |= dict.fromkeys(("cc_library", "cc_binary", "cc_test", "py_library"), rule)
    exec(compile((ROOT / "BUILD").read_text("utf-8"), "BUILD", "exec"), names)

    def own(target):
        kinds = ("srcs", "hdrs", "textual_hdrs")
        return [file for kind in kinds for file in target.get(kind, ())]

    def visible(target):
        files = set(own(target))
        for dependency in target.get("deps", ()):
            if dependency.startswith(":"):
                files |= visible(targets[dependency[1:]])
        return files

    compiled = []
    for name, target in targets.items():
        if name == "jaxcomm":
            continue
        seen = visible(target)
        compiled += [file for file in target["srcs"] if file.endswith(".cc")]
        for file in own(target):
            if not (ROOT / file).is_file():
                yield f"BUILD: {name} has {file}: no such file"
                continue
            text = (ROOT / file).read_text("utf-8")
            pattern = r'(?m)^\s*#\s*include\s*"((?:ffi|tests)/[^"]+)"'
            for header in set(re.findall(pattern, text)) - seen:
                yield f"BUILD: {name} lacks {header}, which {file} includes"
    sources = _glob(["ffi/**/*.cc", "tests/ffi/*.cc", "tests/doubles/**/*.cc"])
    for file in sorted({*sources} ^ {*compiled}):
        yield f"BUILD: {file} is compiled by no target, or is not there"
    for file in {file for file in compiled if compiled.count(file) > 1}:
        yield f"BUILD: {file} is compiled twice"


def main():
    """Print all faults; return 1 if there are any."""
    faults = [*cpp_faults(), *python_faults(), *bazel_faults()]
    print(*faults, sep="\n", end="\n" if faults else "")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
