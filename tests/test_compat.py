"""A JAX that lacks what jaxcomm needs is refused at the import, in a sentence."""

import importlib
import itertools
import pathlib
import sys
import tomllib
import types
import warnings

import forked
import jax
import pytest

from jaxcomm import compat

_FILE = tomllib.loads(
    (pathlib.Path(__file__).parents[1] / "pyproject.toml").read_text()
)
PROJECT, TOOL = _FILE["project"], _FILE["tool"]


class Lacking:
    """Stands for a module or a class of JAX without one name, ``a.b`` for b of a."""

    def __init__(self, real, path):
        self._real, self._path = real, path.split(".")

    def __getattr__(self, name):
        if name == self._path[0]:
            if len(self._path) == 1:
                raise AttributeError(name)
            return Lacking(getattr(self._real, name), ".".join(self._path[1:]))
        found = getattr(self._real, name)
        if name == "__dataclass_fields__":
            return {each: found[each] for each in found if each != self._path[0]}
        return found


@pytest.mark.parametrize(
    ("module", "name"),
    [(module, name) for module, names in compat.NEEDED.items() for name in names],
)
def test_each_needed_name_is_missed(module, name):
    def find(each):
        found = importlib.import_module(each)
        return Lacking(found, name) if each == module else found

    with pytest.raises(ImportError) as raised:
        compat.needed_modules(find)
    assert str(raised.value) == (
        f"jaxcomm needs {module}.{name}, which jax {jax.__version__} does not have. "
        "jaxcomm was checked on jax 0.10.2, 0.11.2, 0.12.0.1. Install one of these: "
        "pip install 'jax>=0.10.2,<0.13'"
    )


def test_the_import_of_jaxcomm_says_what_jax_lacks():
    text = "import jax; del jax._src.core.NamedAxisEffect; import jaxcomm"
    done = forked.run([sys.executable, "-c", text], capture_output=True, timeout=120)
    assert done.returncode == 1
    said = "\nImportError: jaxcomm needs jax._src.core.NamedAxisEffect, which jax "
    assert said in done.stderr.decode()


@pytest.mark.parametrize("version", ["0.13.0", "0.13.0.dev20270101", "1.0"])
def test_a_jax_that_nobody_tried_is_warned_of(version):
    with pytest.warns(UserWarning, match=f"not tried on jax {version}; 0.12.0.1 is"):
        compat.warn_of_newer(version)
    with warnings.catch_warnings(action="error"):
        for tried in ("0.12.7", *compat.CHECKED):
            compat.warn_of_newer(tried)


def test_pip_is_told_the_oldest_version_and_takes_newer_ones():
    bounds = compat.REQUIREMENT.removeprefix("jax").partition(",")[0]
    optional = PROJECT["optional-dependencies"].values()
    found = [
        each.removesuffix(bounds)
        for each in itertools.chain(PROJECT["dependencies"], *optional)
        if each.startswith("jax") and not each.startswith("jaxcomm")
    ]
    assert found == ["jax", "jaxlib", "jax[cuda12]", "jax[cuda13]"]


def test_make_installs_what_ran_the_tests():
    bound = compat.REQUIREMENT.rpartition(",")[2]
    tried = tuple(map(int, compat.CHECKED[-1].split(".")[:2]))
    assert bound == f"<{tried[0]}.{tried[1] + 1}"
    assert TOOL["jaxcomm"]["tried"] == [f"jax{bound}", f"jaxlib{bound}"]


def test_axes_are_not_taken_for_manual_where_jax_does_not_say(make_mesh):
    def lowered_for(**of_context):
        of_context = types.SimpleNamespace(**of_context)
        of_module = types.SimpleNamespace(axis_context=of_context)
        return types.SimpleNamespace(module_context=of_module)

    mesh = make_mesh(a=2, b=4)
    some = lowered_for(mesh=mesh, manual_axes=frozenset("a"))
    assert compat.automatic_axes(some) == {"b"}
    assert compat.automatic_axes(lowered_for(num_devices=8)) == frozenset()
    with pytest.raises(AttributeError, match="manual_axes"):
        compat.automatic_axes(lowered_for(mesh=mesh))
