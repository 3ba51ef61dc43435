"""The recipes run, agree with one device, and print what docs/recipes.md shows."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "recipes.md").read_text()
# Each takes seconds to compile what other tests compile too.
LONG = {"checkpoint_restart", "equinox_layer", "flax_linen", "flax_nnx"}
LONG |= {"tensor_context_parallel"}
CASES = [
    pytest.param(
        path, id=path.stem, marks=[pytest.mark.thorough] if path.stem in LONG else []
    )
    for path in sorted((ROOT / "examples" / "recipes").glob("*.py"))
]
NEEDS = {
    "checkpoint_restart": "orbax.checkpoint",
    "equinox_layer": "equinox",
    "flax_linen": "flax",
    "flax_nnx": "flax",
}


def shown(name):
    """Return what the page says that a recipe prints."""
    start = PAGE.index(f"```{{literalinclude}} ../examples/recipes/{name}.py")
    found = re.search(r"^It prints:\n\n```\n(.*?)^```", PAGE[start:], re.M | re.S)
    assert found, f"docs/recipes.md does not show what {name} prints"
    return found.group(1).splitlines()


def comparable(line):
    """Return a line without figures, which round otherwise, but for counted calls."""
    return line if "collectives of XLA" in line else re.sub(r"\d+(\.\d+)?", "0", line)


@pytest.mark.parametrize("path", CASES)
def test_a_recipe_prints_what_its_page_shows(path, capfd):
    if path.stem in NEEDS:
        pytest.importorskip(NEEDS[path.stem])
    # In this process, which has eight devices. A recipe raises if results differ.
    runpy.run_path(str(path), run_name="recipe")["main"]()
    printed = capfd.readouterr().out.splitlines()
    assert list(map(comparable, printed)) == list(map(comparable, shown(path.stem)))


def test_figures_do_not_count_but_calls_do():
    assert comparable("loss 1.25") == comparable("loss 3")
    calls = "the step: {} calls of jaxcomm, 0 collectives of XLA"
    assert comparable(calls.format(1)) != comparable(calls.format(2))
