"""J5: programs are the same on every process, and one compiled is there for all."""

import hashlib

import jax
import numpy as np
import pytest
from jax._src import cache_key
from jax.experimental.compilation_cache import compilation_cache

import jaxcomm

pytestmark = pytest.mark.multiprocess


def everything(x):
    tree = jaxcomm.psum({"x": x, "n": x.astype("int32")}, ("b", "a"))
    return (
        tree["x"] + jaxcomm.ring_shift(x, ("a", "b")),
        jaxcomm.pscan(x, "a", lane="other"),
        jaxcomm.all_gather(tree["n"], "b", axis=1),
    )


def lowered_text(here, processes):
    mesh = here.mesh(processes, 2, (processes, 2), ("a", "b"))
    if mesh is None:
        return None
    # What differs between processes must not enter the program.
    junk = [bytearray(1000 * here.process + 1) for _ in range(here.process + 1)]
    for _ in junk:
        here.program(mesh, lambda x: x + 1)(here.put(mesh, np.ones(mesh.size)))
    jaxcomm.init(mesh, ["a"], lanes=("default", "other"))
    program = here.program(mesh, everything)
    text = program.lower(here.put(mesh, np.ones((mesh.size, 3), np.float32))).as_text()
    assert "jaxcomm.all_reduce" in text
    return hashlib.sha256(text.encode()).hexdigest()


def test_every_process_lowers_the_same_text(team):
    digests = team.call(lowered_text, processes=3)
    assert digests == [digests[0]] * 3 + [None]


def run_everything(here, without=None, one_key=False):
    """Returns what happened to the compilation cache on the way.

    Args:
      here: this process.
      without: a process that does not use the cache.
      one_key: whether all processes ask it for the same. On CPU JAX makes a process's
        own devices a part of the key (0.10.2), so that only process 0, which alone
        writes, ever finds anything.
    """
    jax.clear_caches()
    jax.config.update("jax_enable_compilation_cache", here.process != without)
    # JAX asks once whether there is one.
    compilation_cache.reset_cache()
    with pytest.MonkeyPatch.context() as patch:
        if one_key:
            patch.setattr(cache_key, "_hash_accelerator_config", lambda *_: None)
        return _run_everything(here)


def _run_everything(here):
    mesh = here.mesh(here.processes, 2, (here.processes, 2), ("a", "b"))
    x = np.arange(mesh.size * 3, dtype=np.float32).reshape(mesh.size, 3)
    operand = here.put(mesh, x)
    events = []
    jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
    program = here.program(mesh, everything)
    for _ in range(2):
        summed, scanned, gathered = here.mine(program(operand))
        total = np.broadcast_to(x.sum(0), x.shape)
        by_row = x.reshape(-1, 2, 3).cumsum(0).reshape(x.shape)
        here.identical(mesh, summed, total + np.roll(x, 1, 0))
        here.identical(mesh, scanned, by_row)
        every = np.stack([total, total], 2).astype(np.int32)
        here.identical(mesh, gathered, every)
    jax.monitoring.clear_event_listeners()
    prefix = "/jax/compilation_cache/cache_"
    return {kind: events.count(prefix + kind) for kind in ("hits", "misses")}


@pytest.fixture
def start_with_cache(start_team, tmp_path):
    """Gives ``start_with_cache()``: two processes with one and the same cache."""
    environment = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    return lambda: start_team(2, 2, environment)


@pytest.fixture
def stored(tmp_path):
    """Gives ``stored()``: the names of what is in the cache."""

    def names():
        files = (tmp_path / "cache").iterdir()
        return sorted(file.name for file in files if "atime" not in file.name)

    return names


def test_the_cache_serves_every_process_of_the_next_run(start_with_cache, stored):
    team = start_with_cache()
    for one_key in (False, True):
        assert team.call(run_everything, one_key=one_key)[0]["misses"] > 0
    written = stored()
    assert written
    team = start_with_cache()
    process_0, _ = team.call(run_everything)
    assert process_0["hits"] > 0
    # Process 1 runs what process 0 compiled.
    for counts in team.call(run_everything, one_key=True):
        assert counts["hits"] > 0
        assert counts["misses"] == 0
    # Process 1 runs what it compiled, beside a process that reads the cache.
    process_0, process_1 = team.call(run_everything, one_key=True, without=1)
    assert process_0["hits"] > 0
    assert process_1["hits"] == 0
    assert stored() == written
