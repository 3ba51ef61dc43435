"""What a collective's start gives its user: a handle, good for one done."""

import warnings
import weakref

import jax
import jax.numpy as jnp

from jaxcomm import compat
from jaxcomm.communicator import cache, replica_groups
from jaxcomm.communicator.lane import DEFAULT_LANE
from jaxcomm.primitives import arguments, define
from jaxcomm.primitives.collective import Collective
from jaxcomm.primitives.optimization_barrier import barrier

# Sends that were begun, for as long as they are not finished; and the axes and lanes
# whose users know that they wait for one another.
_sends: weakref.WeakSet = weakref.WeakSet()
_told: set[tuple] = set()


@jax.tree_util.register_pytree_node_class
class Handle:
    """A collective that was begun and is not finished.

    Hand it to the done of the start it came from, once, in the same traced function.
    It cannot be returned, carried by a loop or passed to a transformed function, and
    there is nothing in it to compute with.
    """

    def __init__(self, start: str, text: str, travelling, finish):
        """Keeps ``finish(done, travelling, after)``, which binds the other half."""
        # Of a send: its axes and lane.
        self.way: tuple[tuple, str] | None = None
        self._start = start
        self._text = text
        self._travelling = travelling
        self._finish = finish
        # Weakly: a handle that is forgotten must not keep a trace alive.
        self._trace = weakref.ref(compat.current_trace())
        self._open = True

    def __repr__(self):
        """Says which call it is of, and what finishes it."""
        state = f"to finish by {self._done}" if self._open else "finished"
        return f"<{self._text}, {state}>"

    @property
    def is_under_way(self) -> bool:
        """Whether it was begun in the function being traced, and is not finished."""
        return self._open and self._trace() is compat.current_trace()

    @property
    def _done(self) -> str:
        return "jaxcomm." + self._start.removesuffix("_start") + "_done"

    def finish(self, done: str, after):
        """Returns the results, for the function ``done``.

        Raises:
          ValueError: if it is of another function, was finished before, or was started
            in another traced function.
        """
        if done != self._done.removeprefix("jaxcomm."):
            raise ValueError(f"{done}: this is the handle of {self._text}; finish it "
                             f"by {self._done}")  # fmt: skip
        if not self._open:
            raise ValueError(
                f"{done}: {self._text} was finished before; a handle is good for one "
                f"{self._done}"
            )
        self._open = False
        if self._trace() is not compat.current_trace():
            raise ValueError(
                f"{done}: {self._text} was called in another traced function. Start "
                f"and finish it in one body of jit, scan, while_loop, cond, grad, vmap "
                f"or checkpoint."
            )
        finish, travelling = self._finish, self._travelling
        del self._finish, self._travelling  # and what they hold
        return finish(done, travelling, after)

    def then(self, x):
        """Returns ``x`` for computations that are to come after the start.

        A GPU does what a program holds in one order, which XLA chooses: it may compute
        first and start last. What is computed from the result of this cannot come
        first. On other devices it changes nothing.

        Args:
          x: a pytree of arrays.

        Returns:
          A pytree like ``x``, of the same values.

        Raises:
          ValueError: if the handle was finished, or is of another traced function.

        Example:
          >>> arriving = jaxcomm.ppermute_start(block, "i", pairs)  # doctest: +SKIP
          >>> out = compute(arriving.then(block))  # doctest: +SKIP
          >>> block = jaxcomm.ppermute_done(arriving, after=out)  # doctest: +SKIP
        """
        if not self.is_under_way:
            raise ValueError(
                f"then: {self._text} was finished, or started in another traced "
                f"function; call it between the start and {self._done}"
            )
        leaves, tree = jax.tree.flatten(x)
        if not self._travelling or not leaves:
            return x
        self._travelling, leaves = barrier((tuple(self._travelling), tuple(leaves)))
        return jax.tree.unflatten(tree, leaves)

    def tree_flatten(self):
        """Refuses: whoever flattens a handle is about to take it elsewhere."""
        self._open = False
        raise ValueError(
            f"the handle of {self._text} must stay in the function that called it: "
            f"call {self._done} there, and return, carry or pass on what that gives"
        )

    @classmethod
    def tree_unflatten(cls, aux, leaves):
        """Never called: no handle is ever flattened."""
        raise NotImplementedError

    def __del__(self):
        """Warns of a start without a done, as Python does of a forgotten coroutine."""
        if getattr(self, "_open", False):
            warnings.warn(
                f"{self._text} was never finished, so nothing is sent; call "
                f"{self._done}",
                RuntimeWarning,
                stacklevel=2,
                source=self,
            )


def start(
    collective: Collective, x, axes, *, name: str, index_groups=None,
    invariant: bool = False, lane: str | None = None, backend: str | None = None,
    finish=lambda results: results, **params,
) -> Handle:  # fmt: skip
    """Does what ``define.bind`` does, by halves.

    Returns:
      A handle whose done gives ``finish(results)``.
    """
    axes = replica_groups.canonical_axes(axes)
    operands, unpack = define.pack(x, axes, name, lane=lane, backend=backend)
    if not operands:
        return _ready(name, axes, finish(x))
    params |= {
        "axes": axes,
        "index_groups": index_groups,
        "invariant": invariant,
        "lane": lane,
        "backend": backend,
        "name": name,
        # Outside of jit each call is a program.
        "paired": compat.is_staging(),
    }
    travelling = collective.pair.start.bind(*operands, **params)

    def finish_with(done, travelling, after):
        waits_for = [_awaited(leaf, done) for leaf in jax.tree.leaves(after)]
        outs = collective.pair.done.bind(
            *travelling, *waits_for, leaves=len(operands), **params
        )
        return finish(unpack(outs))

    kinds = ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in operands)
    text = f"{name}({kinds}) over axes {axes}"
    handle = Handle(name, text, travelling, finish_with)
    if collective.name == "permute":
        handle.way = axes, DEFAULT_LANE if lane is None else lane
        _warn_of_sends_abreast(text, *handle.way)
        _sends.add(handle)
    return handle


def _warn_of_sends_abreast(text, axes, lane):
    """Says once that independent sends in one lane of NCCL's wait for one another."""
    way = axes, lane
    if way in _told or not any(
        other.way == way and other.is_under_way for other in _sends
    ):
        return
    if not any(
        member.orders_lanes and (member.axes, member.lane) == way
        for member in cache.communicators()
    ):
        return
    _told.add(way)
    warnings.warn(
        f"{text}: another send is under way in lane {lane!r}, and NCCL does the "
        f"operations of a lane one after the other. Send both in one call, as a tuple; "
        f"or give one of them a lane of its own, lane='other', of which "
        f"jaxcomm.init(mesh, lanes=('default', 'other')) makes the communicator",
        RuntimeWarning,
        stacklevel=5,
    )


def started(name: str, axes, outcome) -> Handle:
    """Returns a handle, also of what needed no communication."""
    if isinstance(outcome, Handle):
        return outcome
    return _ready(name, replica_groups.canonical_axes(axes), outcome)


def done(name: str, handle, after):
    """Finishes a handle, for the function ``name``.

    Raises:
      TypeError: if it is no handle, or ``after`` holds something that is no array.
      ValueError: see :meth:`Handle.finish`.
    """
    if not isinstance(handle, Handle):
        start = name.removesuffix("_done") + "_start"
        raise TypeError(
            f"{name}: expected the handle that jaxcomm.{start} returns, got "
            f"{type(handle).__name__}"
        )
    return handle.finish(name, after)


def _ready(name, axes, value):
    text = f"{name} over axes {axes}"
    return Handle(name, text, (), lambda done, travelling, after: value)


def _awaited(leaf, done):
    if not isinstance(leaf, (jax.Array, int, float, complex)) and not hasattr(
        leaf, "dtype"
    ):
        raise TypeError(
            f"{done}: every leaf of after must be an array, got {type(leaf).__name__}"
        )
    leaf = jnp.asarray(leaf)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return arguments.to_carrier(leaf)
