"""The recipes run, agree with one device, and print what docs/recipes.md shows."""

import re
import runpy
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxcomm

# Of what a loss is tried with; the last is not of the sequence.
LENGTH = 8
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "recipes.md").read_text()
# Each takes seconds to compile, or to start processes for, what other tests do too.
LONG = {"checkpoint_restart", "elastic", "equinox_layer", "flax_linen", "flax_nnx"}
LONG |= {"explicit_axes", "hybrid", "plain_jit", "tensor_context_parallel"}
LONG |= {"compare_runs", "rejoin"}
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
    "state_kernel": "mamba2_jax",
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


def losses_of(name):
    """Return a recipe's loss, as a function of targets and tokens, and its targets."""
    of, shape = recipe(name)["loss_of"], (2, LENGTH)
    words = jax.random.randint(jax.random.key(0), shape, 0, 8)
    numbers = jax.random.normal(jax.random.key(1), (*shape, 8))
    if name == "flax_linen":
        return lambda target, tokens: of(numbers, target, tokens), numbers - 1
    if name == "flax_nnx":
        return lambda labels, tokens: of(
            lambda *_: numbers, words, labels, tokens
        ), words
    if name == "equinox_layer":
        each = jax.vmap(lambda *x: of(lambda x, _: x, *x, None))
        return lambda target, tokens: each(numbers, target, tokens), numbers - 1
    params, _ = recipe(name)["make_params"](jax.random.key(2))
    same = dict.fromkeys(["enter", "leave"], lambda x: x)
    same["attend"] = jax.nn.dot_product_attention
    return lambda labels, tokens: of(params, words, labels, tokens, **same), words


@pytest.mark.parametrize(
    "name", ["equinox_layer", "flax_linen", "flax_nnx", "tensor_context_parallel"]
)
def test_the_targets_of_no_kind_of_padding_change_a_loss(name):
    """What reorder added, tokens from lengths on, and negative segment ids."""
    for module in NEEDS.get(name, "").split():
        pytest.importorskip(module)
    loss, targets = losses_of(name)
    loss = jax.jit(loss)
    layout = jaxcomm.Layout("contiguous", 2, LENGTH - 1)
    ids = np.where(np.arange(LENGTH - 1) < 3, -1, 0)
    _, tokens = layout.reorder(
        np.zeros((2, LENGTH - 1)), segment_ids=ids, lengths=LENGTH - 2
    )
    counts = np.arange(LENGTH) // 3 == 1
    of_padding, of_others = (
        np.where(np.reshape(x, (-1, *[1] * (targets.ndim - 2))), 1, 0)
        for x in (~counts, counts)
    )
    before = loss(targets, tokens)
    np.testing.assert_array_equal(loss(targets + of_padding, tokens), before)
    assert np.all(loss(targets + of_others, tokens) != before)
