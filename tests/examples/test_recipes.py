"""The recipes run, agree with one device, and print what docs/recipes.md shows."""

import functools
import re
import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "recipes.md").read_text()
# Each takes seconds to compile what other tests compile too.
LONG = {"checkpoint_restart", "equinox_layer", "flax_linen", "flax_nnx"}
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
    """Return what the file of a recipe defines."""
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


def test_a_transformer_in_plain_jit_on_three_axes_is_that_of_one_device():
    """Its loss and gradients; weights are split as in the recipe with a shard_map."""
    theirs = recipe("tensor_context_parallel")
    axes = ("data", "model", "context")
    mesh = jax.make_mesh((2, 2, 2), axes, (jax.sharding.AxisType.Auto,) * 3)
    params, specs = theirs["make_params"](jax.random.key(0))
    words = jax.random.randint(jax.random.key(1), (4, 21), 0, theirs["VOCABULARY"])
    positions = jnp.broadcast_to(jnp.arange(21), words.shape)

    def gradient_of(attend):
        attend = functools.partial(attend, is_causal=True)
        loss = functools.partial(
            theirs["loss_of"], attend=attend, enter=lambda x: x, leave=lambda x: x
        )
        return jax.jit(jax.value_and_grad(loss))

    batch = words, jnp.roll(words, -1, axis=1), positions
    expected = gradient_of(jax.nn.dot_product_attention)(params, *batch)
    place = jax.tree.map(functools.partial(jax.NamedSharding, mesh), specs)
    by_data = jax.NamedSharding(mesh, jax.P("data"))
    split = {"axis_name": "context", "batch_axes": "data", "head_axes": "model"}
    with jax.set_mesh(mesh):
        attend = functools.partial(jaxcomm.dot_product_attention, **split)
        placed = jax.device_put(params, place), *jax.device_put(batch, by_data)
        found = gradient_of(attend)(*placed)
    # Sums of 84 tokens' losses in another order, of float32.
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4),
        found,
        expected,
    )
