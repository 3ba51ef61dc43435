"""An interrupted cell ends what it waits for: the next cell is not held up."""

import subprocess
import sys

import forked
import pytest
import waiting

# Rank 1 never comes to the collective: a cell waits for it until the timeout.
SET_UP = """
import signal, threading
import jax
import jax.numpy as jnp
import waiting
import jaxcomm
jax.config.update("jax_num_cpu_devices", 2)
mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
jaxcomm.init(mesh, timeout=9 * waiting.HANG_SECONDS)  # longer than the test

def over(call):
    spec = jax.P("i")
    return jax.jit(jax.shard_map(
        call, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
    ))

def alone(x):
    is_first = jax.lax.axis_index("i") == 0
    return jax.lax.cond(is_first, lambda x: jaxcomm.psum(x, "i"), lambda x: x, x)

right, wrong, x = over(lambda x: jaxcomm.psum(x, "i")), over(alone), jnp.arange(2.0)
right(x).block_until_ready()

def interrupt():
    waits = lambda: jaxcomm.communicators()[0].stats()["in_flight"]
    waiting.until(waits)
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
"""
CELLS = [
    SET_UP,
    "threading.Thread(target=interrupt).start()",
    "wrong(x).block_until_ready()",
    "print(right(x).tolist())",
]
IN_IPYTHON = f"""
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

shell = InteractiveShell.instance(config=Config(HistoryManager=dict(enabled=False)))
for cell in {CELLS!r}:
    ended = shell.run_cell(cell)
    print(type(ended.error_in_exec).__name__)
"""
TYPED = "".join(f"exec({cell!r})\n" for cell in CELLS)


def test_the_cell_after_an_interrupted_one_is_right(tmp_path):
    pytest.importorskip("IPython")
    ended = forked.run(
        [sys.executable, "-c", IN_IPYTHON],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=waiting.HANG_SECONDS,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-3:] == [
        "KeyboardInterrupt", "[1.0, 1.0]", "NoneType"
    ]  # fmt: skip


def test_so_is_what_is_typed_at_a_prompt():
    ended = subprocess.run(
        [sys.executable, "-iq"],
        input=TYPED,
        capture_output=True,
        text=True,
        timeout=waiting.HANG_SECONDS,
    )
    assert "KeyboardInterrupt" in ended.stderr
    assert ended.stdout.splitlines() == ["[1.0, 1.0]"], ended.stderr
