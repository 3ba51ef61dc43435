"""A collective that is checked and ready to be run, whole or split-phase."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from jaxcomm import compat
from jaxcomm.primitives import arguments
from jaxcomm.primitives.call import Call
from jaxcomm.primitives.collective import Collective
from jaxcomm.primitives.handle import Handle
from jaxcomm.primitives.pvary import vary


def _same(results):
    return results


class Request:
    """What a public function made of its arguments.

    ``psum`` runs what ``psum_start`` starts.
    """

    def __init__(
        self,
        collective: Collective,
        x: Any,
        call: Call,
        *,
        finish: Callable[[Any], Any] = _same,
        **params,
    ):
        """Keep a pytree of arrays, the call and the collective's own parameters.

        ``finish`` makes the user's result of the results.
        """
        leaves, self._tree = jax.tree.flatten(x)
        self._dtypes = [leaf.dtype for leaf in leaves]
        self._operands = vary([arguments.to_carrier(leaf) for leaf in leaves], call)
        self._collective, self._call, self._finish = collective, call, finish
        self._params = {"call": call, **params}

    def run(self):
        """Return the results."""
        if not self._operands:
            return self._unpack([])
        return self._unpack(
            self._collective.primitive.bind(*self._operands, **self._params)
        )

    def start(self) -> Handle:
        """Begin the collective; the handle's ``done`` returns the results."""
        if not self._operands:
            return Ready(self._call, self._unpack([])).start()
        # Outside of jit each call is a program.
        params = {**self._params, "paired": compat.is_staging()}
        operands, pair = self._operands, self._collective.pair

        def finish(travelling, waits_for):
            outs = pair.done.bind(
                *travelling, *waits_for, leaves=len(operands), **params
            )
            return self._unpack(outs)

        kinds = ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in operands)
        text = f"{self._call.name}({kinds}) over axes {self._call.axes}"
        is_send = self._collective.name == "permute"
        travelling = pair.start.bind(*operands, **params)
        return Handle(
            text, travelling, finish, sends_for=self._call if is_send else None
        )

    def _unpack(self, outs):
        outs = [
            out.astype(dtype) if arguments.has_carrier(dtype) else out
            for out, dtype in zip(outs, self._dtypes, strict=True)
        ]
        return self._finish(jax.tree.unflatten(self._tree, outs))


@dataclasses.dataclass(frozen=True)
class Ready:
    """A result that needs no communication; stands in for a :class:`Request`."""

    call: Call
    result: Any

    def run(self):
        """Return the result."""
        return self.result

    def start(self) -> Handle:
        """Return a handle whose ``done`` returns the result."""
        text = f"{self.call.name} over axes {self.call.axes}"
        return Handle(text, (), lambda travelling, waits_for: self.result)
