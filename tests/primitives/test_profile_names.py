"""Collectives in the traces of ``jax.profiler``: what, over which axes, how much."""

import collections
import gzip
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm


@pytest.fixture
def mesh(make_mesh):
    return make_mesh(data=2, context=4)


@pytest.fixture
def traced(tmp_path):
    """Returns ``traced(program, x)``: how often each event of ours is in a trace."""

    def trace(program, x):
        jax.block_until_ready(program(x))
        with jax.profiler.trace(tmp_path):
            jax.block_until_ready(program(x))
        (file,) = tmp_path.rglob("*.trace.json.gz")
        events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
        return collections.Counter(
            event["name"].rpartition(".")[0]
            for event in events
            if event.get("name", "").startswith("jaxcomm")
        )

    return trace


def over(mesh, call):
    spec = jax.P(tuple(mesh.axis_names))
    return jax.jit(jax.shard_map(call, mesh=mesh, in_specs=spec, out_specs=spec))


def test_a_trace_names_collectives_with_axes_and_bytes(mesh, traced):
    def program(x):
        handle = jaxcomm.ring_shift_start(x, "context")
        total = jaxcomm.psum((x, x[:, :1]), ("data", "context"))
        return handle.done(after=total) + total[0]

    # One rank of eight holds 2 x 1024 floats.
    found = traced(over(mesh, program), np.ones((16, 1024), np.float32))
    assert found == {
        "jaxcomm_psum_data_context_8200B": 8,
        "jaxcomm_ring_shift_start_context_8KiB": 8,
        "jaxcomm_ring_shift_done_context_8KiB": 8,
    }


def test_gradients_and_loops_are_named_too(mesh, traced):
    def loss(x):
        def turn(_, x):
            return jaxcomm.all_gather(x, "context", tiled=True)[: x.shape[0]]

        return jnp.sum(jax.lax.fori_loop(0, 2, turn, x) ** 2)

    program, x = over(mesh, jax.grad(loss)), np.ones((16, 1024), np.float32)
    # The gradient hands in four times as much.
    assert set(traced(program, x)) == {
        "jaxcomm_all_gather_context_8KiB",
        "jaxcomm_all_gather_context_32KiB",
    }
    backward = r'op_name="[^"]*transpose[^"]*/jaxcomm\.all_gather context 32KiB"'
    assert re.search(backward, program.lower(x).compile().as_text())


def test_scopes_and_source_lines_stay(mesh):
    def program(x):
        with jax.named_scope("layer3"):
            return jaxcomm.psum(x, "data") + x

    compiled = over(mesh, program).lower(np.ones((8, 4), np.float32)).compile()
    (line,) = [
        line for line in compiled.as_text().splitlines() if "custom_call_target" in line
    ]
    assert 'op_name="jit(program)/shard_map/layer3/jaxcomm.psum data 16B"' in line
    assert "stack_frame_id=" in line or "source_line=" in line
