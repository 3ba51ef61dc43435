"""An interrupted cell ends what it waits for: the next cell is not held up."""

import sys

import forked
import pytest

# Rank 1 never comes to the collective: a cell waits for it until the timeout.
SET_UP = """
import signal, threading
import jax
import jax.numpy as jnp
import waiting
import jaxcomm
jax.config.update("jax_num_cpu_devices", 2)
mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
jaxcomm.init(mesh, timeout=waiting.HANG_SECONDS)

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
PROGRAM = f"""
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

shell = InteractiveShell.instance(config=Config(HistoryManager=dict(enabled=False)))
assert shell.run_cell({SET_UP!r}).success
shell.run_cell("threading.Thread(target=interrupt).start()")
cell = shell.run_cell("wrong(x).block_until_ready()")
print(type(cell.error_in_exec).__name__)
shell.run_cell("found = right(x).tolist()")
print(shell.user_ns["found"])
"""


def test_the_cell_after_an_interrupted_one_is_right(tmp_path):
    pytest.importorskip("IPython")
    ended = forked.run(
        [sys.executable, "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-2:] == ["KeyboardInterrupt", "[1.0, 1.0]"]
