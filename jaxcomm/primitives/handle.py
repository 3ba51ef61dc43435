"""What a start returns: a handle, good for one done."""

import sys
import warnings
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

from jaxcomm import compat
from jaxcomm.primitives.call import check_array
from jaxcomm.primitives.optimization_barrier import barrier


@jax.tree_util.register_pytree_node_class
class Handle:
    """A collective that a ``*_start`` function began, to be finished by ``done``.

    Call ``done`` once, in the same traced function. A handle cannot be returned,
    carried by a loop or passed to a transformed function, and holds nothing to compute
    with.
    """

    def __init__(
        self,
        text: str,
        travelling: Any,
        finish: Callable[[Any, list[Any]], Any],
    ):
        """Keep ``finish(travelling, waits_for)``, which binds the other primitive."""
        self._text = text
        self._travelling = travelling
        self._finish = finish
        # Weakly: a handle that is forgotten must not keep a trace alive.
        self._trace = weakref.ref(compat.current_trace())
        self._open = True
        # Whether an error said already that it is to be finished.
        self._told = False

    def __repr__(self) -> str:
        """Say which call it is of, and whether it is finished."""
        state = "to finish by its done()" if self._open else "finished"
        return f"<{self._text}, {state}>"

    @property
    def is_under_way(self) -> bool:
        """Whether it was begun in the function being traced, and is not finished."""
        return self._open and self._trace() is compat.current_trace()

    def done(self, *, after: Any = None) -> Any:
        """Finish the collective and return its results.

        Args:
          after: a pytree of arrays to wait for, usually the results of what is computed
            meanwhile. They are not read. If None, nothing more.

        Returns:
          What the function without ``_start`` would have returned.

        Raises:
          TypeError: if a leaf of ``after`` is no array.
          ValueError: if it was finished before, or started in another traced function.

        Example:
          >>> def swap(x):
          ...     handle = jaxcomm.ppermute_start(x, "i", [(0, 1), (1, 0)])
          ...     out = jnp.sin(handle.then(x))
          ...     return handle.done(after=out) + out
          >>> f = jax.shard_map(swap, in_specs=jax.P("i"), out_specs=jax.P("i"))
          >>> jax.jit(f)(jnp.zeros(4)).shape
          (4,)
        """
        if not self._open:
            raise ValueError(
                f"done: {self._text} was finished before; a handle is good for one done"
            )
        self._told = True
        if self._trace() is not compat.current_trace():
            raise ValueError(
                f"done: {self._text} was called in another traced function. Start "
                f"and finish it in one body of jit, scan, while_loop, cond, grad, vmap "
                f"or checkpoint."
            )
        waits_for = [_awaited(leaf, self._text) for leaf in jax.tree.leaves(after)]
        self._open = False
        finish, travelling = self._finish, self._travelling
        del self._finish, self._travelling  # and what they hold
        return finish(travelling, waits_for)

    def then(self, x: Any) -> Any:
        """Return ``x`` for computations that must come after the start.

        XLA chooses the order in which a GPU runs a program: it may compute first and
        start last. Computations on the result of ``then`` cannot come first. On other
        devices ``then`` changes nothing.

        Args:
          x: a pytree of arrays.

        Returns:
          A pytree like ``x``, of the same values.

        Raises:
          TypeError: if a leaf of ``x`` is no array.
          ValueError: if the handle was finished, or is of another traced function.
        """
        if not self.is_under_way:
            raise ValueError(
                f"then: {self._text} was finished, or started in another traced "
                f"function; call it between the start and done"
            )
        leaves, tree = jax.tree.flatten(x)
        for leaf in leaves:
            check_array(leaf, f"then: {self._text}: every leaf of x")
        if not self._travelling or not leaves:
            return x
        self._travelling, leaves = barrier((tuple(self._travelling), tuple(leaves)))
        return jax.tree.unflatten(tree, leaves)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse ``copy``, ``deepcopy`` and ``pickle``: both could be finished."""
        self.tree_flatten()

    def tree_flatten(self) -> NoReturn:
        """Refuse: whoever flattens a handle is about to take it elsewhere.

        A node of a pytree, so that the error says what to do: JAX would refuse a leaf
        by its type alone. The handle stays as it is.
        """
        self._told = True
        raise ValueError(
            f"the handle of {self._text} must stay in the function that called it: "
            f"call its done() there, and return, carry or pass on what that gives"
        )

    @classmethod
    def tree_unflatten(cls, aux: Any, leaves: Any) -> NoReturn:
        """Never called: no handle is ever flattened."""
        raise NotImplementedError

    def __del__(self, _ends: Callable[[], bool] = sys.is_finalizing) -> None:
        """Warn of a start without a done, as Python does of a forgotten coroutine.

        Not while Python ends: it has no modules then that could warn.
        """
        if getattr(self, "_open", False) and not self._told and not _ends():
            warnings.warn(
                f"{self._text} was never finished, so nothing is sent; call its done()",
                RuntimeWarning,
                stacklevel=2,
                source=self,
            )


def _awaited(leaf, text: str):
    check_array(leaf, f"done: {text}: every leaf of after")
    leaf = jnp.asarray(leaf)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return leaf
