"""J5: programs are the same on every process, and one compiled is there for all."""

import hashlib

import jax
import numpy as np
import pytest
from jax._src import cache_key
from jax.experimental.compilation_cache import compilation_cache

import jaxcomm

pytestmark = pytest.mark.multiprocess

PREFIX = "/jax/compilation_cache/cache_"


def everything(x):
    tree = jaxcomm.psum({"x": x, "n": x.astype("int32")}, ("b", "a"))
    return (
        tree["x"] + jaxcomm.ring_shift(x, ("a", "b")),
        jaxcomm.pscan(x, "a", lane="other"),
        jaxcomm.all_gather(tree["n"], "b", axis=1),
    )


def lowered_text(here, mesh):
    # What differs between processes must not enter the program.
    junk = [bytearray(1000 * here.process + 1) for _ in range(here.process + 1)]
    for _ in junk:
        here.program(mesh, lambda x: x + 1)(here.put(mesh, np.ones(mesh.size)))
    jaxcomm.init(mesh, "a", lanes=("default", "other"))
    program = here.program(mesh, everything)
    text = program.lower(here.put(mesh, np.ones((mesh.size, 3), np.float32))).as_text()
    assert "jaxcomm.all_reduce" in text
    return hashlib.sha256(text.encode()).hexdigest()


def test_every_process_lowers_the_same_text(team):
    digests = team.call(lowered_text, at=(3, 2, (3, 2), ("a", "b")))
    assert digests == [digests[0]] * 3 + [None]


def run_everything(here, mesh, folder, without=None):
    """Returns what happened to the compilation cache on the way.

    Args:
      here: this process.
      folder: of the cache.
      without: a process that does not use it.
    """
    options = {
        "jax_enable_compilation_cache": here.process != without,
        "jax_compilation_cache_dir": folder,
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in options}
    events = []
    with pytest.MonkeyPatch.context() as patch:
        # On CPU JAX makes a process's own devices a part of the key (0.10.2), so that
        # only process 0, which alone writes, would ever find anything.
        patch.setattr(cache_key, "_hash_accelerator_config", lambda *_: None)
        jax.clear_caches()
        # JAX asks once whether there is one.
        compilation_cache.reset_cache()
        jax.tree.map(jax.config.update, list(options), list(options.values()))
        jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
        try:
            check_everything(here, mesh)
        finally:
            jax.monitoring.clear_event_listeners()
            jax.tree.map(jax.config.update, list(before), list(before.values()))
            compilation_cache.reset_cache()
    return {kind: events.count(PREFIX + kind) for kind in ("hits", "misses")}


def check_everything(here, mesh):
    x = np.arange(mesh.size * 3, dtype=np.float32).reshape(mesh.size, 3)
    summed, scanned, gathered = here.run(mesh, everything, x)
    total = np.broadcast_to(x.sum(0), x.shape)
    by_row = x.reshape(-1, 2, 3).cumsum(0).reshape(x.shape)
    here.identical(mesh, summed, total + np.roll(x, 1, 0))
    here.identical(mesh, scanned, by_row)
    here.identical(mesh, gathered, np.stack([total, total], 2).astype(np.int32))


def test_the_cache_serves_every_process(team, tmp_path):
    def run(**options):
        at = 2, 2, (2, 2), ("a", "b")
        return team.call(run_everything, at, folder=str(tmp_path), **options)[:2]

    def stored():
        return {f.name for f in tmp_path.iterdir() if "atime" not in f.name}

    assert run()[0]["misses"] > 0
    written = stored()
    assert written
    # Process 1 runs what process 0 compiled.
    for counts in run():
        assert counts["hits"] > 0
        assert counts["misses"] == 0
    # Process 1 runs what it compiled, beside a process that reads the cache.
    process_0, process_1 = run(without=1)
    assert process_0["hits"] > 0
    assert process_1["hits"] == 0
    assert stored() == written
