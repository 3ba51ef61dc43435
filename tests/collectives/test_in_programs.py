"""Collectives in programs: control flow, donation, nested jit, vmap, eager calls."""

import catalogue
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import over

import jaxcomm

# float32 sums of a few dozen terms in another order than jax.lax's or numpy's.
ROUNDING = 2e-5

CHOICE = catalogue.fixed(4)
RING = [(0, 1), (1, 2), (2, 3), (3, 0)]
SOME = [(0, 2), (3, 1)]


def test_control_flow_carries_collectives(stacked, near, mesh, x):
    def program(lib):
        @jax.jit
        def shared(x):
            return lib.psum(x, "i") + lib.ppermute(x, "i", RING)

        def run(x):
            def step(carry, _):
                carry = lib.ppermute(jnp.sin(carry), "i", RING) + lib.pmean(carry, "i")
                return carry, lib.all_gather(carry.sum(), "i")

            def looped(x):
                return jax.lax.fori_loop(
                    0, 4, lambda k, c: lib.ppermute(c, "i", RING) * 0.5 + x, x
                )

            steps, _ = jax.lax.while_loop(
                lambda state: lib.pmax(state[1].max(), "i") < 50.0,
                lambda state: (state[0] + 1, state[1] * 2),
                (jnp.int32(0), jnp.abs(x)),
            )
            # The same branch everywhere: the predicate is equal on all devices.
            chosen = jax.lax.cond(
                lib.psum(x.sum(), "i") > 1e9,
                lambda x: lib.ppermute(x, "i", RING),
                lambda x: lib.ppermute(x, "i", SOME),
                x,
            )
            return {
                "scan": jax.lax.scan(step, x, length=5),
                "for": looped(x),
                "while": steps,
                "cond": chosen,
                "gradient": jax.grad(
                    lambda x: (jax.lax.scan(step, x, length=3)[0] ** 2).sum()
                )(x),
                "nested": (jax.jit(lambda x: shared(shared(x)))(x * 2), shared(x)),
            }

        return run

    ours = stacked(mesh, program(jaxcomm), x)
    near(ours, stacked(mesh, program(jax.lax), x), ROUNDING, "", ROUNDING)


def test_operands_may_be_donated(mesh, x):
    everywhere = jax.NamedSharding(mesh, jax.P("i"))

    for call in (
        lambda x: jaxcomm.pbarrier(x, "i"),
        lambda x: jaxcomm.pbarrier(jaxcomm.ring_shift(x + 1, "i"), "i"),
    ):
        program = over(mesh, call, jit=False)
        given = jax.device_put(x, everywhere)
        found = jax.jit(program, donate_argnums=0)(given)
        np.testing.assert_array_equal(found, jax.jit(program)(x))
        assert given.is_deleted()


def test_an_operand_that_is_used_again_keeps_its_value(stacked, mesh, x):
    """A barrier hands its operand's buffer on: what else reads it must not notice."""

    def program(x):
        waited = jaxcomm.pbarrier(x, "i")
        jaxcomm.psum(x, "i")  # dead: XLA drops it, on every device alike
        changed = waited.at[0].set(100.0)
        return changed, x, jaxcomm.pbarrier(waited, "i")

    changed, kept, waited = stacked(mesh, program, x)
    np.testing.assert_array_equal(kept, x)
    np.testing.assert_array_equal(waited, x)
    np.testing.assert_array_equal(changed[:, 1:], x[:, 1:])


def test_vmap_over_data_is_a_loop_over_examples(stacked, near, mesh, values):
    x = values("float32", (4, 4, 3, 8))

    def program(x):
        return {
            name: jax.vmap(lambda x: case(jaxcomm, x, "i", CHOICE), 1, 1)(x)  # noqa: B023
            for name, case in catalogue.CASES.items()
        }

    for name, found in stacked(mesh, program, x).items():
        model = catalogue.CASES[name].model(CHOICE)
        examples = [model(x[:, :, b]) for b in range(3)]
        near(found, np.stack(examples, 2), ROUNDING, name, ROUNDING)


@pytest.mark.host_only(reason="names its backends")
def test_a_program_may_put_them_in_the_places_of_their_twins(
    stacked, near, mesh, x, monkeypatch
):
    """``jax.lax.psum = jaxcomm.psum``: where XLA communicates, its own are called."""
    twins = [n for n in jaxcomm.__all__ if hasattr(jax.lax, n) and n[0] != "_"]
    assert {"psum", "all_gather", "pcast"} <= set(twins)

    def program(x):
        terms = jaxcomm.pcast(x, "i", to="unreduced")
        with jaxcomm.using(backend="xla"):
            cases = catalogue.CASES.items()
            found = {n: case(jaxcomm, x, "i", CHOICE) for n, case in cases}
            found |= {
                "constant": jaxcomm.psum(3, "i"),
                "cast": jaxcomm.psum(terms, "i"),
            }
            with jaxcomm.using(reproducible=True):
                found["tree"] = jaxcomm.psum(x, "i"), jaxcomm.pmean(x, "i")
        return found

    expected = stacked(mesh, program, x)
    for name in twins:
        monkeypatch.setattr(jax.lax, name, getattr(jaxcomm, name))
    near(stacked(mesh, program, x), expected, 0)


@pytest.mark.host_only(reason="eager calls are compiled as others are")
def test_eager_shard_map_runs_every_function(stacked, near, mesh_of, values):
    mesh, x = mesh_of((2,), ("i",)), values("float32", (2, 2, 2))

    def program(x):
        return {
            name: case(jaxcomm, x, "i", catalogue.fixed(2))
            for name, case in catalogue.FUNCTIONS.items()
            if name != "pcast"  # Its operand must be equal on all devices.
        }

    eager = stacked(mesh, program, x, jit=False)
    near(eager, stacked(mesh, program, x), ROUNDING, "", ROUNDING)
