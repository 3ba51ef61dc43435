"""Collectives in the traces of ``jax.profiler``: what, over which axes, how much."""

import collections
import gzip
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import over

import jaxcomm


@pytest.fixture
def mesh(make_mesh):
    return make_mesh(data=2, context=4)


def test_a_trace_names_collectives_with_axes_and_bytes(mesh, tmp_path):
    def program(x):
        def loss(x):
            def turn(_, x):
                return jaxcomm.all_gather(x, "context", tiled=True)[: x.shape[0]]

            return jnp.sum(jax.lax.fori_loop(0, 2, turn, x) ** 2)

        handle = jaxcomm.ring_shift_start(x, "context")
        total = jaxcomm.psum((x, x[:, :1]), ("data", "context"))
        return handle.done(after=total) + total[0] + jax.grad(loss)(x)

    # One rank of eight holds 2 x 1024 floats. The gradient hands in four times as much.
    program, x = over(mesh, program), np.ones((16, 1024), np.float32)
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
