"""What XLA makes of the two halves, and what they keep alive."""

import re

import jax
import jax.numpy as jnp
import pytest
from models import over

import jaxcomm

pytestmark = pytest.mark.host_only(
    reason="XLA sees custom calls, whatever carries them out"
)

RING = [(0, 1), (1, 2), (2, 3), (3, 0)]


def _start(x):
    return jaxcomm.ppermute_start(x, "i", RING)


@pytest.fixture
def compiled(mesh, as_users_compile):
    return lambda call, *operands: (
        over(mesh, call, options=as_users_compile).lower(*operands).compile()
    )


def _targets(text):
    return re.findall(r'custom_call_target="(jaxcomm[^"]*)"', text)


PAIR = ["jaxcomm.permute.start", "jaxcomm.done"]


def _using(use):
    def call(x):
        handle = jaxcomm.ppermute_start((x, x + 1), "i", RING)
        y = jnp.sin(x) @ x.T @ x
        return use(handle.done(after=y)[1], x, y)

    return call


def _twice(x):
    first = _start(x)
    y = jnp.sin(x) @ x.T
    moved = first.done(after=y)
    second = _start(x)
    y = jnp.cos(y) @ y.T
    return moved + second.done(after=y) + y.sum()


@pytest.mark.parametrize(
    ("call", "left"),
    [
        (_using(lambda moved, x, y: y), []),
        (_using(lambda moved, x, y: moved), PAIR),
        # On a GPU the buffers of a start without its done would be used again.
        (
            _using(
                lambda moved, x, y: (
                    y.sum() + jax.lax.select(jnp.zeros(moved.shape, bool), moved, x)
                )
            ),
            PAIR,
        ),
        (jax.vmap(lambda x: _start(x).done(after=jnp.sin(x))), PAIR),
        (_twice, 2 * PAIR),
    ],
    ids=["unused", "used", "unused as XLA alone sees", "under vmap", "equal starts"],
)
def test_a_program_holds_both_halves_or_none(compiled, call, left):
    text = compiled(call, jnp.ones((64, 16))).as_text()
    assert sorted(_targets(text)) == sorted(left)


@pytest.mark.parametrize("where", ["once", "loop", "unchanged by the loop"])
def test_done_takes_operands_and_results_without_a_copy(compiled, where):
    def step(x, y):
        handle = _start(x)
        y = jnp.sin(y) @ y.T
        return handle.done(after=y) + y.sum()

    def call(x):
        x = x @ x.T
        if where == "once":
            return step(x, x)
        of_carry = where == "loop"
        return jax.lax.fori_loop(0, 3, lambda k, y: step(y if of_carry else x, y), x)

    text = compiled(call, jnp.ones((64, 16))).as_text()
    # Both in one computation.
    (text,) = (part for part in text.split("\n\n") if "jaxcomm.permute.start" in part)
    (line,) = (line for line in text.splitlines() if '"jaxcomm.done"' in line)
    (start,) = (line for line in text.splitlines() if '"jaxcomm.permute.start"' in line)
    operand = re.search(r"custom-call\((%[\w.-]+)\)", start).group(1)
    result = re.search(r"(%[\w.-]+) = ", start).group(1)
    # Both of them themselves: a buffer in flight is never copied, nor used otherwise.
    assert f"custom-call({operand}, {result}, " in line
    assert "output_to_operand_aliasing={{}: (1, {})}" in line
