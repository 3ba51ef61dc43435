"""The recipes run, agree with one device, and print what docs/recipes.md shows."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "recipes.md").read_text()
# Each takes seconds to compile what other tests compile too.
LONG = {"checkpoint_restart", "elastic", "equinox_layer", "flax_linen", "flax_nnx"}
LONG |= {"tensor_context_parallel"}
CASES = [
    pytest.param(path.stem, marks=[pytest.mark.thorough] * (path.stem in LONG))
    for path in sorted((ROOT / "examples" / "recipes").glob("*.py"))
]
NEEDS = {
    "checkpoint_restart": "orbax.checkpoint",
    "equinox_layer": "equinox",
    "flax_linen": "flax",
    "flax_nnx": "flax",
    "plain_jit": "flax equinox",
}


def recipe(name):
    path = ROOT / "examples" / "recipes" / f"{name}.py"
    return runpy.run_path(str(path), run_name="recipe")


def comparable(text):
    """Return lines without figures, which round otherwise, but for counted calls."""
    return [
        line if "collectives of XLA" in line else re.sub(r"\d+(\.\d+)?", "0", line)
        for line in text.splitlines()
    ]


@pytest.mark.parametrize("name", CASES)
def test_a_recipe_prints_what_its_page_shows(name, capfd):
    for module in NEEDS.get(name, "").split():
        pytest.importorskip(module)
    file = f"examples/recipes/{name}.py"
    # In this process, which has eight devices. A recipe raises if results differ.
    recipe(name)["main"]()
    start = PAGE.index(f"```{{literalinclude}} ../{file}")
    shown = re.search(r"^It prints:\n\n```\n(.*?)^```", PAGE[start:], re.M | re.S)
    assert comparable(capfd.readouterr().out) == comparable(shown[1])
