"""Collectives in two halves, with a computation in between.

    arriving = jaxcomm.ppermute_start(block, "ring", pairs)
    out = attend(query, block)
    block = jaxcomm.ppermute_done(arriving, after=out)

What is common to all: ``start`` begins the transfer and returns a handle; ``done``
takes it and returns what the collective without ``_start`` would have returned. Both
stand in one traced function: a handle cannot be returned, carried by a loop, passed to
a transformed function, finished twice, or finished in the body of another function than
it was started in; each is an error when the program is traced. A handle that is never
finished is a ``RuntimeWarning``. If nobody uses the results, JAX drops both halves.

Until ``done``, XLA keeps the operands and the memory of the results, no longer.
``after`` are arrays that ``done`` waits for without reading them: give it what is to be
computed while the transfer is under way, or XLA may wait for the transfer first. They
are computed as they stand, not fused away; choose something that is stored anyway.

The halves differentiate like the collective: the gradient of a pair is a pair, begun
where the gradient of the results is known and finished where that of ``x`` is wanted.

Which backends overlap: on ``host`` a transfer is under way beside the computation in
every program that XLA:CPU runs concurrently (more than 8 operations, not all on arrays
of 512 bytes or less). On ``nccl`` it is under way on a stream of the lane's own;
compute from ``handle.then(x)`` there, or XLA may start the transfer last. What NCCL has
not, such as sums of narrow floats over more than two ranks, is done whole. ``xla`` does
the whole collective in ``start`` and leaves overlap to XLA. So do devices that are
alone in their group, and eager calls, outside of jit.
"""

from jaxcomm.collectives import all_gather as gathers
from jaxcomm.collectives import all_reduce as sums
from jaxcomm.collectives import all_to_all as exchanges
from jaxcomm.collectives import permute as permutes
from jaxcomm.collectives import reduce_scatter as scatters
from jaxcomm.communicator import replica_groups
from jaxcomm.primitives import define, split_phase
from jaxcomm.primitives import handle as _handle


def ppermute_start(x, axis_name, perm, *, lane=None, backend=None):
    """Begins :func:`jaxcomm.ppermute`, of the same arguments.

    Returns:
      A handle for :func:`ppermute_done`, in the same traced function.

    Raises:
      NameError: if the axis is not bound.
      TypeError: if ``perm`` is no sequence of pairs of integers.
      ValueError: if an index is out of range or stands twice on one side.

    Example:
      >>> # block is [0.] and [1.] on the 2 devices of "i"
      >>> arriving = jaxcomm.ppermute_start(block, "i", [(0, 1), (1, 0)])
      >>> out = compute(*arriving.then([block]))
      >>> jaxcomm.ppermute_done(arriving, after=out)  # doctest: +SKIP
      Array([1., 0.], dtype=float32)
    """
    return permutes.permute_by(
        perm, "ppermute_start", x, axis_name, lane, backend, bind=_handle.start
    )


def ppermute_done(handle, *, after=None):
    """Ends what :func:`ppermute_start` began.

    Args:
      handle: what ``ppermute_start`` returned; good for one call.
      after: a pytree of arrays to wait for, usually the results of what is computed
        meanwhile. Not read. If None, nothing more.

    Returns:
      What :func:`jaxcomm.ppermute` would have returned.

    Raises:
      TypeError: if it is no handle, or a leaf of ``after`` is no array.
      ValueError: if the handle is another function's, was finished before, or comes
        from another traced function.

    Example:
      >>> block = jaxcomm.ppermute_done(arriving, after=out)  # doctest: +SKIP
    """
    return _handle.done("ppermute_done", handle, after)


def ring_shift_start(x, axis_name, shift=1, *, lane=None, backend=None):
    """Begins :func:`jaxcomm.ring_shift`, of the same arguments.

    Returns:
      A handle for :func:`ring_shift_done`, in the same traced function.

    Raises:
      NameError: if the axis is not bound.
      TypeError: if ``shift`` is no integer.

    Example:
      >>> arriving = jaxcomm.ring_shift_start((key, value), "i")
      >>> out = attend(query, key, value)
      >>> key, value = jaxcomm.ring_shift_done(arriving, after=out)  # doctest: +SKIP
    """
    pairs = permutes.ring_pairs(axis_name, shift, "ring_shift_start")
    return permutes.permute_by(
        pairs, "ring_shift_start", x, axis_name, lane, backend, bind=_handle.start
    )


def ring_shift_done(handle, *, after=None):
    """Ends what :func:`ring_shift_start` began; see :func:`ppermute_done`.

    Example:
      >>> block = jaxcomm.ring_shift_done(arriving, after=out)  # doctest: +SKIP
    """
    return _handle.done("ring_shift_done", handle, after)


def psum_start(x, axis_name, *, axis_index_groups=None, lane=None, backend=None):
    """Begins :func:`jaxcomm.psum`, of the same arguments.

    Returns:
      A handle for :func:`psum_done`, in the same traced function.

    Raises:
      NameError: if the axis is not bound.
      ValueError: if ``axis_index_groups`` do not hold every index once.

    Example:
      >>> arriving = jaxcomm.psum_start(grads, "data")
      >>> norm = compute(activations)
      >>> grads = jaxcomm.psum_done(arriving, after=norm)  # doctest: +SKIP
    """
    axes = replica_groups.canonical_axes(axis_name)
    x = define.count_bools(x)
    outcome = sums.reduce_all(
        "psum_start", "sum", x, axes, axis_index_groups, lane, backend,
        bind=_handle.start,
    )  # fmt: skip
    return _handle.started("psum_start", axes, outcome)


def psum_done(handle, *, after=None):
    """Ends what :func:`psum_start` began; see :func:`ppermute_done`.

    Example:
      >>> grads = jaxcomm.psum_done(arriving, after=norm)  # doctest: +SKIP
    """
    return _handle.done("psum_done", handle, after)


def all_gather_start(
    x, axis_name, *, axis_index_groups=None, axis=0, tiled=False, to="varying",
    lane=None, backend=None,
):  # fmt: skip
    """Begins :func:`jaxcomm.all_gather`, of the same arguments.

    Returns:
      A handle for :func:`all_gather_done`, in the same traced function.

    Raises:
      NameError: if the axis is not bound.
      ValueError: as :func:`jaxcomm.all_gather`.

    Example:
      >>> arriving = jaxcomm.all_gather_start(next_weights, "data", tiled=True)
      >>> x = layer(weights, x)
      >>> weights = jaxcomm.all_gather_done(arriving, after=x)  # doctest: +SKIP
    """
    outcome = gathers.gather_all(
        "all_gather_start", x, axis_name, axis_index_groups, axis, tiled, to, lane,
        backend, bind=_handle.start,
    )  # fmt: skip
    return _handle.started("all_gather_start", axis_name, outcome)


def all_gather_done(handle, *, after=None):
    """Ends what :func:`all_gather_start` began; see :func:`ppermute_done`.

    Example:
      >>> weights = jaxcomm.all_gather_done(arriving, after=x)  # doctest: +SKIP
    """
    return _handle.done("all_gather_done", handle, after)


def psum_scatter_start(
    x, axis_name, *, scatter_dimension=0, axis_index_groups=None, tiled=False,
    lane=None, backend=None,
):  # fmt: skip
    """Begins :func:`jaxcomm.psum_scatter`, of the same arguments.

    Returns:
      A handle for :func:`psum_scatter_done`, in the same traced function.

    Raises:
      NameError: if the axis is not bound.
      ValueError: if ``scatter_dimension`` does not fit the axis size.

    Example:
      >>> leaving = jaxcomm.psum_scatter_start(grads, "data", tiled=True)
      >>> more = backward(activations)
      >>> grads = jaxcomm.psum_scatter_done(leaving, after=more)  # doctest: +SKIP
    """
    outcome = scatters.scatter_sum(
        "psum_scatter_start", x, axis_name, scatter_dimension, axis_index_groups, tiled,
        lane, backend, bind=_handle.start,
    )  # fmt: skip
    return _handle.started("psum_scatter_start", axis_name, outcome)


def psum_scatter_done(handle, *, after=None):
    """Ends what :func:`psum_scatter_start` began; see :func:`ppermute_done`.

    Example:
      >>> grads = jaxcomm.psum_scatter_done(leaving, after=more)  # doctest: +SKIP
    """
    return _handle.done("psum_scatter_done", handle, after)


def all_to_all_start(
    x, axis_name, split_axis, concat_axis, *, axis_index_groups=None, tiled=False,
    lane=None, backend=None,
):  # fmt: skip
    """Begins :func:`jaxcomm.all_to_all`, of the same arguments.

    Returns:
      A handle for :func:`all_to_all_done`, in the same traced function.

    Raises:
      NameError: if the axis is not bound.
      ValueError: if the size of ``split_axis`` does not fit the axis size.

    Example:
      >>> arriving = jaxcomm.all_to_all_start(tokens, "experts", 0, 0, tiled=True)
      >>> shared = shared_expert(x)
      >>> tokens = jaxcomm.all_to_all_done(arriving, after=shared)  # doctest: +SKIP
    """
    outcome = exchanges.exchange(
        "all_to_all_start", x, axis_name, split_axis, concat_axis, axis_index_groups,
        tiled, lane, backend, bind=_handle.start,
    )  # fmt: skip
    return _handle.started("all_to_all_start", axis_name, outcome)


def all_to_all_done(handle, *, after=None):
    """Ends what :func:`all_to_all_start` began; see :func:`ppermute_done`.

    Example:
      >>> tokens = jaxcomm.all_to_all_done(arriving, after=shared)  # doctest: +SKIP
    """
    return _handle.done("all_to_all_done", handle, after)


for _collective in (
    permutes.permute,
    sums.all_reduce,
    gathers.all_gather_impl,
    scatters.reduce_scatter,
    exchanges.all_to_all_impl,
):
    split_phase.define(_collective)
