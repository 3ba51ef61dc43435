"""Another user of this host reads, writes and ends nothing of a job."""

import json
import os
import pathlib
import sys
import tempfile

import forked
import pytest
import waiting

pytestmark = pytest.mark.multiprocess

ADDS = """
import jax, jaxcomm
import numpy as np
mesh = jax.make_mesh((2,), ("i",), (jax.sharding.AxisType.Auto,))
spec = jax.NamedSharding(mesh, jax.P("i"))
add = jax.jit(jax.shard_map(lambda x: jaxcomm.psum(x, "i"), mesh=mesh,
                            in_specs=jax.P("i"), out_specs=jax.P()))
def step():
    x = jax.make_array_from_callback((2,), spec, lambda k: np.ones(2, np.float32)[k])
    return float(jaxcomm.raise_if_failed(add(x))[0])
assert step() == 2
tell(f"ready-{i}", f"{os.getpid()} {os.environ['JAX_COORDINATOR_ADDRESS']}")
hear("attacked")
assert step() == 2
print("process", i, "is well")
"""

# What another user tries, a line each; what it can do, it prints.
ATTACKS = """
import glob, json, os, signal, socket, sys
from jaxlib import _jax

pids, address, files, seconds = json.loads(sys.argv[1])
os.setgroups([])
os.setgid(65534)
os.setuid(65534)

def tries(what, act):
    try:
        act()
    except OSError as error:
        print("refused", what, type(error).__name__, flush=True)
    except Exception as error:
        print("refused", what, str(error)[:80], flush=True)
    else:
        print("DONE", what, flush=True)

for pid in pids:
    for name in "fd", "map_files":
        tries(f"{pid} {name}", lambda: os.listdir(f"/proc/{pid}/{name}"))
    for name in "environ", "maps", "mem":
        tries(f"{pid} {name}", lambda: open(f"/proc/{pid}/{name}", "rb").read(1))
    tries(f"{pid} signal", lambda: os.kill(int(pid), signal.SIGUSR1))
for path in files:
    tries(f"read {path}", lambda: os.listdir(path) if os.path.isdir(path)
          else open(path, "rb").read(1))
    tries(f"write {path}", lambda: open(path + "/x" * os.path.isdir(path), "ab"))
for path in glob.glob("/dev/shm/jaxcomm-*"):
    tries(f"read {path}", lambda: open(path, "rb"))
if address.startswith("unix:"):
    tries("connect", lambda: socket.socket(socket.AF_UNIX).connect(address[5:]))
client = _jax.get_distributed_runtime_client(address, 1, init_timeout=seconds)
tries("join", client.connect)
"""


@pytest.fixture
def open_to_all(monkeypatch):
    """A folder for temporary files as most hosts have it: everybody may enter."""
    with tempfile.TemporaryDirectory(dir="/tmp") as path:
        os.chmod(path, 0o1777)
        monkeypatch.setenv("TMPDIR", path)
        yield pathlib.Path(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user, too")
@pytest.mark.parametrize(
    "words", [pytest.param([], marks=pytest.mark.thorough), ["--elastic"]]
)
def test_another_user_reads_writes_and_ends_nothing(
    words, started, program, notes, open_to_all
):
    launcher = started("-n2", *words, program(ADDS))
    ready = [notes / f"ready-{i}" for i in range(2)]
    waiting.until(lambda: all(each.exists() for each in ready), process=launcher)
    pids, addresses = zip(*(each.read_text().split() for each in ready), strict=True)
    files = [str(each) for each in open_to_all.rglob("*")]
    assert files
    given = json.dumps([pids, addresses[0], files, int(waiting.EXPIRES_SECONDS)])
    found = forked.run(
        [sys.executable, "-c", ATTACKS, given],
        capture_output=True,
        text=True,
        timeout=waiting.HANG_SECONDS,
    )
    (notes / "attacked").touch()
    out, err = waiting.ended(launcher)
    assert found.stdout.count("refused") >= 2 * 6 + len(files) + 1, found
    assert "DONE" not in found.stdout
    assert (launcher.returncode, out.count("is well")) == (0, 2), err
    assert list(open_to_all.iterdir()) == []
