"""Derivatives, vmap and control flow across processes, against XLA's collectives."""

import catalogue
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm

pytestmark = pytest.mark.multiprocess

# float32 sums of a few dozen terms, in another order than gloo's.
ROUNDING = 2e-5


# One for each kind of transpose.
NAMES = (
    "psum", "pmax", "all_gather", "psum_scatter", "all_to_all_tiled", "ppermute_some",
    "pscan",
)  # fmt: skip


def loss(result):
    """Weighs every element otherwise, so that a misplaced gradient shows."""
    result = jnp.sin(result)
    weights = jnp.linspace(-1.0, 2.0, result.size, dtype=result.dtype)
    return (result.ravel() * weights).sum()


def derivatives(call):
    def of(x):
        def gradient(x):
            return jax.grad(lambda x: loss(call(x)))(x)

        return {
            "first order": gradient(x),
            "forward": jax.jvp(call, (x,), (jnp.cos(x),)),
            "forward over reverse": jax.jvp(gradient, (x,), (jnp.cos(x),)),
        }

    return of


def batched(call):
    def of(x):
        return {
            "leading": jax.vmap(call)(jnp.stack([x, 2 * x, -x])),
            "trailing": jax.vmap(call, in_axes=2, out_axes=1)(
                jnp.stack([x, jnp.exp(x)], axis=2)
            ),
        }

    return of


def both_backends(here, processes, devices, transform):
    mesh = here.mesh(processes, devices)
    if mesh is None:
        return
    choice = catalogue.fixed(mesh.size)
    x = here.values("float32", (mesh.size, mesh.size, 8), 0)
    transform = {"derivatives": derivatives, "batched": batched}[transform]

    def program(backend):
        def call(name):
            case = catalogue.CASES[name]
            return lambda x: case(jaxcomm, x, "i", choice, backend=backend)

        return lambda x: {name: transform(call(name))(x) for name in NAMES}

    found = here.run(mesh, program("host"), x)
    expected = here.run(mesh, program("xla"), x)
    for name in found:
        here.model.assert_near(found[name], expected[name], ROUNDING, name, ROUNDING)


@pytest.mark.parametrize(
    ("processes", "devices", "transform"), [(2, 2, "derivatives"), (3, 1, "batched")]
)
def test_transforms_are_those_of_xla(team, processes, devices, transform):
    team.call(both_backends, processes=processes, devices=devices, transform=transform)


def control_flow(here):
    mesh = here.mesh(3, 2)
    if mesh is None:
        return
    x = here.values("int32", (6, 5), 0) % 100
    steps = 50

    def program(x):
        def step(carry, k):
            carry = (jaxcomm.psum(carry, "i") + k * jaxcomm.ring_shift(carry, "i")) % 97
            return carry, jaxcomm.pmax(carry, "i")

        def turn(state):
            k, total = state
            return k + 1, (total + jaxcomm.all_gather(total, "i").sum(0)) % 89

        looped = jax.lax.scan(step, x, jnp.arange(steps))
        counted = jax.lax.while_loop(lambda state: state[0] < 7, turn, (0, x))[1]
        chosen = jax.lax.cond(
            jaxcomm.psum(x, "i")[0] > 0,
            lambda x: jaxcomm.pscan(x, "i"),
            lambda x: jaxcomm.pbroadcast(x, "i", 3),
            x,
        )
        return *looped, counted, chosen

    found = here.run(mesh, program, x)
    carry, tops = x, []
    for k in range(steps):
        carry = (carry.sum(0) + k * np.roll(carry, 1, 0)) % 97
        tops.append(np.broadcast_to(carry.max(0), carry.shape))
    counted = x
    for _ in range(7):
        counted = (counted + counted.sum(0)) % 89
    chosen = x.cumsum(0) if x.sum(0)[0] > 0 else np.broadcast_to(x[3], x.shape)
    expected = [carry, np.stack(tops, 1), counted, chosen]
    here.identical(mesh, found, [x.astype(np.int32) for x in expected])


def test_loops_and_branches_go_the_same_way_on_every_process(team):
    team.call(control_flow)


def beside_xla(here):
    """Our collectives and XLA's take turns, depend on each other, and do not."""
    mesh = here.mesh(2, 2)
    if mesh is None:
        return
    x = here.values("int32", (4, 3), 0) % 50

    def program(x):
        free = [lib.psum(x + k, "i") for k in range(5) for lib in (jaxcomm, jax.lax)]
        for k in range(10):
            lib = (jaxcomm, jax.lax)[k % 2]
            x = (lib.psum(x, "i") + lib.all_gather(x, "i").sum(0) + k) % 93
        return x, free

    found, free = here.run(mesh, program, x)
    for k in range(5):
        total = np.broadcast_to((x + k).sum(0), x.shape)
        here.identical(mesh, free[2 * k : 2 * k + 2], [total.astype(np.int32)] * 2)
    for k in range(10):
        x = np.broadcast_to((2 * x.sum(0) + k) % 93, x.shape)
    here.identical(mesh, found, x.astype(np.int32))


def test_programs_mix_our_collectives_with_those_of_xla(team):
    team.call(beside_xla)
