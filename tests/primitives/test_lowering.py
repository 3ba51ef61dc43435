"""What a program is compiled to: one custom call, the same everywhere, cacheable."""

import os
import re
import subprocess
import sys

import catalogue
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm

X = np.arange(32, dtype=np.float32).reshape(8, 4)


def program_over(mesh, call):
    spec = jax.P(tuple(mesh.axis_names))
    return jax.jit(jax.shard_map(call, mesh=mesh, in_specs=spec, out_specs=spec))


def compiled_text(mesh, call, x=X):
    return program_over(mesh, call).lower(x).compile().as_text()


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


def test_no_xla_collective_is_left_beside_ours(make_mesh):
    mesh = make_mesh(i=4)

    def program(x):
        def loss(x):
            # Without our pvary the product would insert JAX's, and with it XLA's psum.
            mean = jaxcomm.pcast(jaxcomm.pmean(x, "i"), "i", to="varying")
            return (jaxcomm.all_gather(mean * x, "i") ** 2).sum()

        return jax.grad(loss)(x)

    text = compiled_text(mesh, program)
    for op in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "permute("):
        assert op not in text.replace("jaxcomm", ""), op


def test_the_gradient_of_shared_parameters_is_one_call_for_all_leaves(make_mesh):
    """pvary's transpose: every parameter's gradient is summed together."""
    mesh = make_mesh(i=4)
    weights = {"a": np.ones(4, np.float32), "b": np.ones((), np.float32)}

    def local(w, x):
        def loss(w):
            w = jaxcomm.pcast(w, "i", to="varying")
            return (jnp.sin(x @ w["a"]) * w["b"]).sum()

        return jax.grad(loss)(w)

    program = jax.jit(
        jax.shard_map(
            local, mesh=mesh, in_specs=(jax.P(), jax.P("i")), out_specs=jax.P()
        )
    )
    text = program.lower(weights, X).compile().as_text()
    assert text.count("custom_call_target=") == 1
    assert "all-reduce(" not in text
    found = program(weights, X)
    expected = jax.grad(lambda w: (jnp.sin(X @ w["a"]) * w["b"]).sum())(weights)
    # Sums of 8 float32 terms in two orders.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5), found, expected)


def test_all_calls_are_pure_so_that_dead_ones_vanish(make_mesh):
    def program(x):
        jaxcomm.psum(x, "i")
        return x + 1

    assert "custom_call" not in compiled_text(make_mesh(i=4), program)


IN_A_PROCESS = r"""
import hashlib
import sys
import jax
import numpy as np
import jaxcomm

mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
if sys.argv[1:]:  # So that addresses and counters differ.
    junk = [jaxcomm.init(mesh, lanes=("default", "other")), bytearray(1 << 20)]


def call(x):
    tree = jaxcomm.psum({"x": x, "n": x.astype("int32")}, ("b", "a"))
    return tree["x"] + jaxcomm.ring_shift(x, "b"), jaxcomm.pscan(x, "a", lane="other")


jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
events = []
jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
spec = jax.P(("a", "b"))
program = jax.jit(jax.shard_map(call, mesh=mesh, in_specs=spec, out_specs=spec))
lowered = program.lower(np.ones((8, 4), np.float32))
found = lowered.compile()(np.ones((8, 4), np.float32))
np.testing.assert_array_equal(found[0], np.full((8, 4), 9.0))
print("digest", hashlib.sha256(lowered.as_text().encode()).hexdigest())
print("hits", events.count("/jax/compilation_cache/cache_hits"))
print("misses", events.count("/jax/compilation_cache/cache_misses"))
"""


def test_a_program_is_the_same_in_the_next_process_which_finds_it_compiled(tmp_path):
    """No pointer, process id or counter enters the program."""
    env = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(tmp_path)}

    def run(*arguments):
        done = subprocess.run(
            [sys.executable, "-c", IN_A_PROCESS, *arguments],
            env=env, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        entries = {p.name for p in tmp_path.iterdir() if "atime" not in p.name}
        return dict(line.split() for line in done.stdout.splitlines()), entries

    first, stored = run()
    second, still = run("with junk")
    assert second["digest"] == first["digest"]
    assert stored
    assert still == stored  # nothing was compiled that was not there
    assert second["misses"] == "0"
    assert int(second["hits"]) > int(first["hits"])


def test_barrier_hands_its_operands_buffer_on(make_mesh, as_users_compile):
    """Nothing is copied but what XLA must not overwrite: here the donated argument."""
    program = program_over(make_mesh(i=4), lambda x: jaxcomm.pbarrier(x + 1, "i"))
    big = np.ones((8, 1 << 16), np.float32)
    compiled = program.lower(big).compile(compiler_options=as_users_compile)
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < big.nbytes // 8
    np.testing.assert_array_equal(program(big), big + 1)


def test_programs_over_two_orders_of_devices_differ(make_mesh):
    """The key of the communicator is in the program."""
    mesh = make_mesh(i=4)
    crossed = jax.sharding.Mesh(
        mesh.devices[::-1], mesh.axis_names, axis_types=mesh.axis_types
    )
    straight, other = (
        program_over(m, lambda x: jaxcomm.psum(x, "i")).lower(X).as_text()
        for m in (mesh, crossed)
    )
    assert straight != other


def test_a_shard_map_within_another_finds_the_mesh_that_was_set(make_mesh):
    mesh = make_mesh(a=2, b=4)

    def outer(x):
        x = jaxcomm.ppermute(x, "a", [(0, 1), (1, 0)])
        inner = jax.shard_map(
            lambda x: jaxcomm.psum(x, "b"),
            in_specs=jax.P("b"),
            out_specs=jax.P(),
            axis_names={"b"},
        )
        return inner(x)

    program = jax.jit(
        jax.shard_map(
            outer,
            mesh=mesh,
            in_specs=jax.P("a"),
            out_specs=jax.P("a"),
            axis_names={"a"},
        )
    )
    x = np.arange(8, dtype=np.float32)
    with pytest.raises(ValueError, match=r"set it with jax\.set_mesh\(mesh\)"):
        program(x)
    with jax.set_mesh(mesh):
        np.testing.assert_array_equal(program(x), [22, 6])


def test_where_xla_communicates_it_reduces_by_its_own_reductions(make_mesh):
    mesh = make_mesh(i=4)
    for name in ("psum", "pmax", "pmin"):
        call = getattr(jaxcomm, name)
        text = (
            program_over(mesh, lambda x, c=call: c(x, "i", backend="xla"))
            .lower(X)
            .as_text()
        )
        assert "stablehlo.all_reduce" in text, name
        assert "stablehlo.all_gather" not in text, name


def test_a_ragged_exchange_writes_into_its_output(make_mesh):
    case = catalogue.CASES["ragged_all_to_all"]

    def program(x):
        return case(jaxcomm, x, "i", catalogue.fixed(4))

    text = compiled_text(make_mesh(i=4), program, np.ones((16, 8), np.float32))
    assert "output_to_operand_aliasing={{}: (1, {})}" in text
