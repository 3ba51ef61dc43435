"""What is refused while tracing: halves that are parted."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import over

import jaxcomm

pytestmark = pytest.mark.host_only(
    reason="refused when traced, before there is a backend"
)


@pytest.fixture
def trace(mesh):
    return lambda call: over(mesh, call, check_vma=False).trace(jnp.arange(4.0))


def _start(x):
    return jaxcomm.ppermute_start(x, "i", [(0, 1), (1, 2), (2, 3), (3, 0)])


def _done_inside(run):
    """Calls ``run(x, done)``, where ``done()`` ends what was begun outside."""
    return lambda x: run(x, _start(x).done)


def _start_inside(run):
    """Calls ``run(x, start)``, and ends outside what ``start(x)`` began."""

    def call(x):
        kept = []
        run(x, lambda x: kept.append(_start(x)) or x)
        return kept.pop().done()

    return call


def _end_twice(end):
    def call(x):
        handle = _start(x)
        return end(handle, handle.done())

    return call


INTO = {
    "scan": lambda x, done: jax.lax.scan(lambda c, _: (done(), None), x, None, 2)[0],
    "while": lambda x, done: jax.lax.while_loop(
        lambda c: c[0] < 1, lambda c: done(), x
    ),
    "cond": lambda x, done: jax.lax.cond(x[0] > 0, lambda x: done(), lambda x: x, x),
    "jit": lambda x, done: jax.jit(lambda x: done())(x),
    "grad": lambda x, done: jax.grad(lambda x: done().sum())(x),
    "vmap": lambda x, done: jax.vmap(lambda x: done())(x),
    "checkpoint": lambda x, done: jax.checkpoint(lambda x: done())(x),
}
OUT_OF = {
    "scan": lambda x, start: jax.lax.scan(lambda c, _: (start(c), None), x, None, 2),
    "jit": lambda x, start: jax.jit(start)(x),
    "grad": lambda x, start: jax.grad(lambda x: start(x).sum())(x),
}
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
CROSSED = "ppermute_start.*another traced function"
FINISHED = r"ppermute_start\(float32\[1\]\).*was finished"
LEAF = r"leaf of after must be an array, got "
REFUSALS = [
    *(
        (f"into {how}", _done_inside(run), ValueError, CROSSED)
        for how, run in INTO.items()
    ),
    *(
        (f"out of {how}", _start_inside(run), ValueError, CROSSED)
        for how, run in OUT_OF.items()
    ),
    *(
        (how, call, ValueError, r"ppermute_start\(.*must stay in the func")
        for how, call in PASSINGS.items()
    ),
    ("done twice", _end_twice(lambda handle, y: handle.done()), ValueError,
     f"^done: {FINISHED} before"),
    ("then when done", _end_twice(lambda handle, y: handle.then(y)), ValueError,
     f"^then: {FINISHED}"),
    ("added", lambda x: _start(x) + x, TypeError, "unsupported operand"),
    ("an operand", lambda x: jnp.sin(_start(x)), ValueError, r"call its done\(\) the"),
    ("after a text", lambda x: _start(x).done(after="x"), TypeError, f"{LEAF}str"),
    ("after objects", lambda x: _start(x).done(after=np.array([None])), TypeError,
     f"{LEAF}ndarray of dtyp"),
    ("then a text", lambda x: _start(x).then("x"), TypeError,
     "^then: ppermute_start.*array, got str"),
    ("waited for as in torch", lambda x: _start(x).wait(), AttributeError,
     r"^ppermute_start\(float32\[1\]\).* has no wait: its done\(\) finishes it"),
    # Arguments are checked under the name of the start.
    ("no such rank", lambda x: jaxcomm.ppermute_start(x, "i", [(0, 9)]), ValueError,
     "^ppermute_start over"),
    ("no such shape", lambda x: jaxcomm.psum_scatter_start(x, "i"), ValueError,
     "^psum_scatter_start"),
    ("no such axis", lambda x: jaxcomm.psum_start(x, "nowhere"), NameError,
     "unbound axis name: nowhere"),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*was never finished:RuntimeWarning")
@pytest.mark.parametrize(
    ("call", "error", "message"),
    [pytest.param(*case, id=how) for how, *case in REFUSALS],
)
def test_a_handle_stays_with_its_start_and_is_finished_once(
    trace, call, error, message
):
    with pytest.raises(error, match=message):
        trace(call)


@pytest.mark.parametrize(
    "look",
    [
        lambda handle: jax.tree.structure({"handle": handle}),
        lambda handle: copy.copy(handle),
        lambda handle: jax.jit(lambda: handle.done())(),
        lambda handle: handle.done(after="x"),
        lambda handle: jnp.sin(handle),
    ],
)
def test_a_refusal_leaves_the_handle_as_it_is(mesh, look):
    """A debugging print is no end of a call."""

    def call(x):
        handle = _start(x)
        with pytest.raises((TypeError, ValueError), match=r"ppermute_start\("):
            look(handle)
        assert "to finish by its done()" in repr(handle)
        return handle.done(after=handle.then(x))

    found = over(mesh, call)(jnp.arange(4.0))
    np.testing.assert_array_equal(found, [3, 0, 1, 2])


def test_a_start_without_a_done_is_a_warning_and_sends_nothing(mesh):
    program = over(mesh, lambda x: (_start(x), x * 2)[1])
    with pytest.warns(RuntimeWarning, match=r"ppermute_start.*was never finished"):
        lowered = program.lower(jnp.arange(4.0))
    assert 'custom_call_target="jaxcomm' not in lowered.compile().as_text()


@pytest.mark.parametrize(
    "part", [jax.tree.structure, lambda handle: jax.jit(lambda: handle.done())()]
)
def test_who_was_told_in_an_error_is_not_warned_as_well(trace, part):
    """A warning would be an error here, of an object that nobody holds."""
    with pytest.raises(ValueError, match="ppermute_start"):
        trace(lambda x: part(_start(x)))


def test_nothing_to_send_is_finished_at_once(trace):
    def call(x):
        assert jaxcomm.psum_start(1, "i").done() == 4
        assert jaxcomm.psum_start(x, ()).done() is x
        assert jaxcomm.all_gather_start([], "i").done() == []
        return x

    trace(call)
