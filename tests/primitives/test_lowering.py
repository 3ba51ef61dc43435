"""What a program is compiled to: one custom call, the same everywhere."""

import collections
import gzip
import json
import re

import catalogue
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import over

import jaxcomm

X = np.arange(32, dtype=np.float32).reshape(8, 4)


def compiled_text(mesh, call, x=X):
    return over(mesh, call).lower(x).compile().as_text()


CALLS = {n: case for n, case in catalogue.FUNCTIONS.items() if case.target}
CALLS.pop("ragged_all_to_all")  # It takes no leaves.


@pytest.mark.parametrize("name", CALLS)
def test_many_leaves_travel_in_one_custom_call_with_a_readable_name(make_mesh, name):
    """Profilers show the instruction's name and the op_name."""
    mesh = make_mesh(i=4)
    case = CALLS[name]

    def program(x):
        # Products in between keep XLA from seeing one leaf in another.
        leaves = [x, x * 2, (x * 3).astype(jnp.bfloat16), x[:, :4] - 1]
        return case(jaxcomm, leaves, "i", catalogue.fixed(4))

    text = compiled_text(mesh, program, np.ones((16, 8), np.float32))
    calls = re.findall(r'custom-call\(.*custom_call_target="([^"]+)"', text)
    assert calls == [f"jaxcomm.{case.target}"]
    (line,) = [line for line in text.splitlines() if "custom_call_target" in line]
    # Two of 128 bytes, two of 64.
    assert re.search(rf'op_name="[^"]*/jaxcomm\.{name} i 384B"', line)
    assert re.search(rf"jaxcomm_{name}_i_384B\S* =", line)
    assert f'name = "{name}"' in line
    assert "('i',)" in line


def test_the_gradient_of_shared_parameters_is_one_call_for_all_leaves(make_mesh):
    """pvary's transpose: every parameter's gradient is summed together."""
    weights = {"a": np.ones(4, np.float32), "b": np.ones((), np.float32)}

    def local(w, x):
        def loss(w):
            w = jaxcomm.pcast(w, "i", to="varying")
            return (jnp.sin(x @ w["a"]) * w["b"]).sum()

        return jax.grad(loss)(w)

    program = over(make_mesh(i=4), local, (jax.P(), jax.P("i")), jax.P())
    text = program.lower(weights, X).compile().as_text()
    assert text.count("custom_call_target=") == 1
    assert "all-reduce(" not in text
    found = program(weights, X)
    expected = jax.grad(lambda w: (jnp.sin(X @ w["a"]) * w["b"]).sum())(weights)
    # Sums of 8 float32 terms in two orders.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5), found, expected)


def test_all_calls_are_pure_so_that_dead_ones_vanish(make_mesh):
    text = compiled_text(make_mesh(i=4), lambda x: (jaxcomm.psum(x, "i"), x + 1)[1])
    assert "custom_call" not in text


def test_barrier_hands_its_operands_buffer_on(make_mesh, as_users_compile):
    """Nothing is copied but what XLA must not overwrite: here the donated argument."""
    program = over(make_mesh(i=4), lambda x: jaxcomm.pbarrier(x + 1, "i"))
    big = np.ones((8, 1 << 16), np.float32)
    compiled = program.lower(big).compile(compiler_options=as_users_compile)
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < big.nbytes // 8
    np.testing.assert_array_equal(program(big), big + 1)


def test_a_shard_map_within_another_finds_the_mesh_that_was_set(make_mesh):
    mesh, split = make_mesh(a=2, b=4), jax.P("a")

    def outer(x):
        inner = jax.shard_map(
            lambda x: jaxcomm.psum(x, "b"),
            in_specs=jax.P("b"),
            out_specs=jax.P(),
            axis_names={"b"},
        )
        return inner(jaxcomm.ppermute(x, "a", [(0, 1), (1, 0)], backend="xla"))

    program = jax.jit(
        jax.shard_map(
            outer, mesh=mesh, in_specs=split, out_specs=split, axis_names={"a"}
        )
    )
    x = np.arange(8, dtype=np.float32)
    with pytest.raises(ValueError, match=r"set it with jax\.set_mesh\(mesh\)"):
        program(x)
    with jax.set_mesh(mesh):
        np.testing.assert_array_equal(program(x), [22, 6])
    # Within, no axis is left to XLA.
    found = {each.axes: each.backend for each in jaxcomm.communicators()}
    assert found == {("a",): "xla", ("b",): "host"}


def test_where_xla_communicates_it_reduces_by_its_own_reductions(make_mesh):
    calls = jaxcomm.psum, jaxcomm.pmax, jaxcomm.pmin
    program = over(make_mesh(i=4), lambda x: [c(x, "i", backend="xla") for c in calls])
    text = program.lower(X).as_text()
    assert text.count("stablehlo.all_reduce") == 3
    assert "stablehlo.all_gather" not in text


def test_a_barrier_of_xla_is_not_optimized_away(make_mesh, as_users_compile):
    program = over(
        make_mesh(i=4), lambda x: jaxcomm.pbarrier(jnp.sin(x), "i", backend="xla") + 1
    )
    compiled = program.lower(X).compile(compiler_options=as_users_compile)
    assert compiled.as_text().count(" all-reduce(") == 1
    np.testing.assert_allclose(compiled(X), np.sin(X) + 1, rtol=1e-6)
    # Of any dtype, under strict promotion.
    wait = over(make_mesh(i=4), lambda x: jaxcomm.pbarrier(x, "i", backend="xla"))
    for dtype in (bool, np.complex64, jnp.bfloat16, jnp.uint4):
        x = jnp.asarray(X).astype(dtype)
        assert wait(x).dtype == x.dtype
        np.testing.assert_array_equal(wait(x), x)


def test_a_ragged_exchange_writes_into_its_output(make_mesh):
    case, choice = catalogue.CASES["ragged_all_to_all"], catalogue.fixed(4)
    text = compiled_text(
        make_mesh(i=4), lambda x: case(jaxcomm, x, "i", choice), np.ones((16, 8))
    )
    assert "output_to_operand_aliasing={{}: (1, {})}" in text


def test_a_trace_names_collectives_with_axes_and_bytes(make_mesh, tmp_path):
    def program(x):
        def loss(x):
            def turn(_, x):
                return jaxcomm.all_gather(x, "context", tiled=True)[: x.shape[0]]

            return jnp.sum(jax.lax.fori_loop(0, 2, turn, x) ** 2)

        handle = jaxcomm.ring_shift_start(x, "context")
        total = jaxcomm.psum((x, x[:, :1]), ("data", "context"))
        return handle.done(after=total) + total[0] + jax.grad(loss)(x)

    # One rank of eight holds 2 x 1024 floats. The gradient hands in four times as much.
    program = over(make_mesh(data=2, context=4), program)
    x = np.ones((16, 1024), np.float32)
    jax.block_until_ready(program(x))
    with jax.profiler.trace(tmp_path):
        jax.block_until_ready(program(x))
    (file,) = tmp_path.rglob("*.trace.json.gz")
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    names = [e["name"] for e in events if e.get("name", "").startswith("jaxcomm")]
    assert collections.Counter(name.rpartition(".")[0] for name in names) == {
        "jaxcomm_psum_data_context_8200B": 8,
        "jaxcomm_ring_shift_start_context_8KiB": 8,
        "jaxcomm_ring_shift_done_context_8KiB": 8,
        "jaxcomm_all_gather_context_8KiB": 16,
        "jaxcomm_all_gather_context_32KiB": 16,
    }
    backward = r'op_name="[^"]*transpose[^"]*/jaxcomm\.all_gather context 32KiB"'
    assert re.search(backward, program.lower(x).compile().as_text())
