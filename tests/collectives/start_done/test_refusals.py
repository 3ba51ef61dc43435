"""What is refused while tracing: halves that are parted."""

import copy
import os
import pickle
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from waiting import HANG_SECONDS

import jaxcomm

pytestmark = pytest.mark.host_only(
    reason="refused when traced, before there is a backend"
)
RING = [(0, 1), (1, 2), (2, 3), (3, 0)]


@pytest.fixture
def trace(mesh):
    def run(call):
        return jax.jit(
            jax.shard_map(
                call, mesh=mesh, in_specs=jax.P("i"), out_specs=jax.P("i"),
                check_vma=False,
            )
        ).trace(jnp.arange(4.0))  # fmt: skip

    return run


def _start(x):
    return jaxcomm.ppermute_start(x, "i", RING)


def _done_inside(run):
    """Calls ``run(x, done)``, where ``done()`` ends what was begun outside."""

    def call(x):
        handle = _start(x)
        return run(x, lambda: handle.done())

    return call


def _start_inside(run):
    """Calls ``run(x, start)``, and ends outside what ``start(x)`` began."""

    def call(x):
        kept = []

        def start(x):
            kept.append(_start(x))
            return x

        run(x, start)
        return kept.pop().done()

    return call


CROSSINGS = {
    "into scan": _done_inside(
        lambda x, done: jax.lax.scan(lambda c, _: (done(), None), x, None, 2)[0]
    ),
    "out of scan": _start_inside(
        lambda x, start: jax.lax.scan(lambda c, _: (start(c), None), x, None, 2)
    ),
    "into while": _done_inside(
        lambda x, done: jax.lax.while_loop(lambda c: c[0] < 1, lambda c: done(), x)
    ),
    "into cond": _done_inside(
        lambda x, done: jax.lax.cond(x[0] > 0, lambda x: done(), lambda x: x, x)
    ),
    "into jit": _done_inside(lambda x, done: jax.jit(lambda x: done())(x)),
    "out of jit": _start_inside(lambda x, start: jax.jit(start)(x)),
    "into grad": _done_inside(lambda x, done: jax.grad(lambda x: done().sum())(x)),
    "out of grad": _start_inside(
        lambda x, start: jax.grad(lambda x: start(x).sum())(x)
    ),
    "into vmap": _done_inside(lambda x, done: jax.vmap(lambda x: done())(x)),
    "into checkpoint": _done_inside(
        lambda x, done: jax.checkpoint(lambda x: done())(x)
    ),
}


@pytest.mark.parametrize("how", CROSSINGS)
def test_a_done_in_another_function_than_its_start(trace, how):
    with pytest.raises(ValueError, match=r"ppermute_start.*another traced function"):
        trace(CROSSINGS[how])


PASSINGS = {
    "returned": _start,
    "returned from jit": lambda x: jax.jit(_start)(x).done(),
    "returned from vmap": lambda x: jax.vmap(_start)(x).done(),
    "carried": lambda x: jax.lax.fori_loop(0, 2, lambda k, c: c, (x, _start(x)))[0],
    "given to jit": lambda x: jax.jit(lambda x, h: x)(x, _start(x)),
    "returned from cond": lambda x: jax.lax.cond(x[0] > 0, _start, _start, x),
    "differentiated": lambda x: jax.grad(_start)(x[0]),
    "copied": lambda x: copy.copy(_start(x)).done(),
    "copied deeply": lambda x: copy.deepcopy([_start(x)])[0].done(),
    "pickled": lambda x: pickle.loads(pickle.dumps(_start(x))).done(),
    "waited for": lambda x: _start(x).done(after=[_start(x)]),
}


@pytest.mark.filterwarnings("ignore:.*was never finished:RuntimeWarning")
@pytest.mark.parametrize("how", PASSINGS)
def test_a_handle_that_is_about_to_leave(trace, how):
    with pytest.raises(ValueError, match=r"ppermute_start\(.*must stay in the func"):
        trace(PASSINGS[how])


def test_a_finished_handle_is_refused(trace):
    def call(x, end):
        handle = _start(x)
        return end(handle, handle.done())

    finished = r"ppermute_start\(float32\[1\]\).*was finished"
    with pytest.raises(ValueError, match=f"^done: {finished} before"):
        trace(lambda x: call(x, lambda handle, _: handle.done()))
    with pytest.raises(ValueError, match=f"^then: {finished}"):
        trace(lambda x: call(x, lambda handle, y: handle.then(y)))


@pytest.mark.filterwarnings("ignore:.*was never finished:RuntimeWarning")
def test_a_handle_is_no_array_and_an_object_nothing_to_wait_for(trace):
    with pytest.raises(TypeError, match="unsupported operand"):
        trace(lambda x: _start(x) + x)
    with pytest.raises(ValueError, match=r"call its done\(\) there"):
        trace(lambda x: jnp.sin(_start(x)))
    with pytest.raises(TypeError, match=r"leaf of after must be an array, got str"):
        trace(lambda x: _start(x).done(after="x"))
    with pytest.raises(TypeError, match=r"after must be an array, got ndarray of dtyp"):
        trace(lambda x: _start(x).done(after=np.array([None])))
    with pytest.raises(TypeError, match=r"^then: ppermute_start.*array, got str"):
        trace(lambda x: _start(x).then("x"))


def test_a_handle_that_outlives_python_says_nothing(mesh):
    program = """
import jax, jax.numpy as jnp, jaxcomm
def call(x):
    handle = jaxcomm.ring_shift_start(x, "i")
    raise RuntimeError("kept with its frames")
mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
split = jax.P("i")
try: jax.shard_map(call, mesh=mesh, in_specs=split, out_specs=split)(jnp.ones(2))
except RuntimeError as error: kept = error
"""
    flags = f"{os.environ['QUICK_XLA_FLAGS']} --xla_force_host_platform_device_count=2"
    done = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | {"XLA_FLAGS": flags},
        capture_output=True, text=True, timeout=HANG_SECONDS, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


def test_a_start_without_a_done_is_a_warning_and_sends_nothing(mesh):
    def call(x):
        _start(x)
        return x * 2

    program = jax.jit(
        jax.shard_map(call, mesh=mesh, in_specs=jax.P("i"), out_specs=jax.P("i"))
    )
    with pytest.warns(RuntimeWarning, match=r"ppermute_start.*was never finished"):
        lowered = program.lower(jnp.arange(4.0))
    assert 'custom_call_target="jaxcomm' not in lowered.compile().as_text()


def test_arguments_are_checked_under_the_name_of_the_start(trace):
    with pytest.raises(ValueError, match=r"^ppermute_start over"):
        trace(lambda x: jaxcomm.ppermute_start(x, "i", [(0, 9)]))
    with pytest.raises(ValueError, match=r"^psum_scatter_start"):
        trace(lambda x: jaxcomm.psum_scatter_start(x, "i"))
    for start in (jaxcomm.psum_start, jaxcomm.ring_shift_start):
        with pytest.raises(NameError, match="unbound axis name: nowhere"):
            trace(lambda x, start=start: start(x, "nowhere"))


def test_nothing_to_send_is_finished_at_once(trace):
    def call(x):
        assert jaxcomm.psum_start(1, "i").done() == 4
        assert jaxcomm.psum_start(x, ()).done() is x
        assert jaxcomm.all_gather_start([], "i").done() == []
        return x

    trace(call)
