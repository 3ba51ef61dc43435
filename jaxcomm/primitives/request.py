"""A collective whose operands are checked, ready to be run, whole or split-phase."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxcomm import compat
from jaxcomm.primitives.call import Call, PyTree, check_array
from jaxcomm.primitives.collective import Collective
from jaxcomm.primitives.pvary import vary
from jaxcomm.primitives.split_phase import Handle

# Types with several elements to a byte travel as the next wider type, which holds
# every value of theirs.
_CARRIERS = {
    "int1": np.int8,
    "uint1": np.uint8,
    "int2": np.int8,
    "uint2": np.uint8,
    "int4": np.int8,
    "uint4": np.uint8,
    "float4_e2m1fn": ml_dtypes.bfloat16,
}


def check_leaves(x, call: Call) -> None:
    """Raise TypeError if a leaf of the pytree is no array of numbers, and no number."""
    for leaf in jax.tree.leaves(x):
        check_array(leaf, f"{call.where}: every leaf of x")
        dtype = getattr(leaf, "dtype", None)
        if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.extended):
            raise TypeError(
                f"{call.where}: x has dtype {dtype}; send "
                f"jax.random.key_data(x) and wrap what arrives in "
                f"jax.random.wrap_key_data"
            )


def as_arrays(x, call: Call):
    """Return the pytree with arrays for leaves."""
    check_leaves(x, call)

    def as_array(leaf):
        leaf = jnp.asarray(leaf)
        if leaf.dtype.name.startswith("float6_"):
            raise TypeError(
                f"{call.where}: x has dtype {leaf.dtype}, which XLA cannot hand "
                f"to a custom call; cast it first, to bfloat16 without loss"
            )
        return leaf

    return jax.tree.map(as_array, x)


def summed(x: PyTree, call: Call) -> Call:
    """Return the call of a sum, which also takes operands that are unreduced."""
    if not compat.checks_varying_axes():
        return call
    axes = frozenset(call.axes)
    kinds = map(compat.kinds_of, jax.tree.leaves(x))
    found = {bool(each.unreduced & axes) for each in kinds}
    if True not in found:
        return call
    if call.index_groups is not None:
        raise NotImplementedError(
            f"{call.where}: x is unreduced, which axis_index_groups cannot divide; "
            f"leave them out"
        )
    if False in found:
        raise ValueError(
            f"{call.where}: some leaves of x are unreduced and others are not; make "
            f"one call for each kind"
        )
    return call.replace(given="unreduced")


def kind_of(x: jax.Array, call: Call) -> str:
    """Return how an array is typed over the axes of a call.

    Returns:
      ``"varying"``, ``"unreduced"``, ``"reduced"`` or ``"invarying"``.
    """
    found = compat.kinds_of(x)._asdict()

    def kind(axis):
        return next((name for name in found if axis in found[name]), "invarying")

    kinds = {kind(axis) for axis in call.axes}
    if len(kinds) > 1:
        raise ValueError(
            f"{call.where}: x is {' and '.join(sorted(kinds))} over different axes; "
            f"make one call for each kind. Its type is {jax.typeof(x)}."
        )
    return kinds.pop()


def count_bools(x):
    """Return the pytree with bools as int32, the type jax.lax counts them in."""

    def count(leaf):
        is_bool = getattr(leaf, "dtype", None) == jnp.bool_ or isinstance(leaf, bool)
        return jnp.asarray(leaf, jnp.int32) if is_bool else leaf

    return jax.tree.map(count, x)


def has_carrier(dtype) -> bool:
    """Say whether arrays of this type travel as a wider one."""
    return dtype.name in _CARRIERS


def to_carrier(leaf):
    """Return the array in the type it travels as."""
    carrier = _CARRIERS.get(leaf.dtype.name)
    return leaf if carrier is None else leaf.astype(carrier)


def _ready(operands, call: Call) -> list:
    return vary(operands, call) if any(map(call.lacking, operands)) else operands


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
        self._operands = _ready([to_carrier(leaf) for leaf in leaves], call)
        self._collective, self._call, self._finish = collective, call, finish
        self._params = {"call": call, **params}

    @classmethod
    def ready(cls, collective: Collective, call: Call, result: Any) -> "Request":
        """Return a request for a result that needs no communication."""
        return cls(collective, (), call, finish=lambda _: result)

    def run(self):
        """Return the results."""
        outs = self._operands and self._collective.primitive.bind(
            *self._operands, **self._params
        )
        return self._unpack(outs)

    def start(self) -> Handle:
        """Begin the collective; the handle's ``done`` returns the results."""
        if not self._operands:
            text = f"{self._call.name} over axes {self._call.axes}"
            return Handle(text, (), lambda travelling, waits_for: self._unpack([]))
        # Outside of jit each call is a program.
        params = {**self._params, "paired": compat.is_staging()}
        operands, pair = self._operands, self._collective.pair

        def finish(travelling, waits_for):
            waits_for = map(to_carrier, waits_for)
            outs = pair.done.bind(
                *travelling, *waits_for, leaves=len(operands), **params
            )
            return self._unpack(outs)

        kinds = ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in operands)
        text = f"{self._call.name}({kinds}) over axes {self._call.axes}"
        return Handle(text, pair.start.bind(*operands, **params), finish)

    def _unpack(self, outs):
        outs = [
            out.astype(dtype) if has_carrier(dtype) else out
            for out, dtype in zip(outs, self._dtypes, strict=True)
        ]
        return self._finish(jax.tree.unflatten(self._tree, outs))


P = ParamSpec("P")


def public(make: Callable[Concatenate[str, P], Request]) -> Callable[P, Any]:
    """Make the function that users call of one that makes its request.

    ``make`` takes the function's name, then the arguments of users.
    """
    return _called(make, make.__name__, Request.run)


def start_of(whole: Callable[P, Any], doc: str) -> Callable[P, Handle]:
    """Make the start of a :func:`public` function, with the same arguments."""
    make: Any = whole
    start = _called(make.__wrapped__, f"{make.__name__}_start", Request.start, Handle)
    start.__doc__ = doc
    return start


def _called(make, name: str, then, result: Any = PyTree) -> Callable:
    signature = inspect.signature(make)
    _, *parameters = signature.parameters.values()
    signature = signature.replace(parameters=parameters, return_annotation=result)

    @functools.wraps(make)
    def called(*args, **options):
        try:
            made = make(name, *args, **options)
        except TypeError:
            _check_arguments(name, signature, args, options)
            raise
        return then(made)

    function: Any = called
    function.__name__ = function.__qualname__ = name
    function.__signature__ = signature
    function.__annotations__ = {
        **{each.name: each.annotation for each in parameters},
        "return": result,
    }
    return function


def _check_arguments(name: str, signature, args, options) -> None:
    """Raise TypeError if the arguments do not fit, as Python does for a function."""
    try:
        signature.bind(*args, **options)
    except TypeError as error:
        raise TypeError(f"{name}() {error}") from None
