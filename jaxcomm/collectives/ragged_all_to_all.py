"""All-to-all of slices of different lengths."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxcomm.primitives import batching, lax, request
from jaxcomm.primitives.call import AxisIndexGroups, AxisName, call_of
from jaxcomm.primitives.collective import Collective, define
from jaxcomm.primitives.gathered import filled
from jaxcomm.primitives.request import Request


def ragged_all_to_all(
    operand: ArrayLike,
    output: ArrayLike,
    input_offsets: ArrayLike,
    send_sizes: ArrayLike,
    output_offsets: ArrayLike,
    recv_sizes: ArrayLike,
    *,
    axis_name: AxisName,
    axis_index_groups: AxisIndexGroups = None,
    lane: str | None = None,
    backend: str | None = None,
) -> jax.Array:
    """Send slices of different lengths; a twin of ``jax.lax.ragged_all_to_all``.

    Slice i, ``operand[input_offsets[i]:][:send_sizes[i]]``, goes to device
    ``i // (K / size)`` and is written there at ``output_offsets[i]``. The backends
    ``host`` and ``nccl`` check sizes and bounds when the program runs, and that no two
    slices overlap in a result. They raise on every device, where jax.lax's behaviour is
    undefined. Where operands are gathered, a result is NaN instead, or what JAX fills
    other dtypes with. The backend ``xla`` gathers, and ``nccl`` if a group has no more
    than 8 MiB.

    Args:
      operand: (N, ...) array of any dtype, the slices to send.
      output: (M, ...) array of the same dtype, what the result is where nothing
        arrives.
      input_offsets: (K,) integers, where each slice starts in ``operand``; K is a
        multiple of the axis size.
      send_sizes: (K,) integers, rows of each slice.
      output_offsets: (K,) integers, where each slice starts in its receiver's result:
        ``all_to_all`` of where each receiver wants what it receives.
      recv_sizes: (K,) integers, ``all_to_all`` of ``send_sizes``.
      axis_name: an axis name, or a tuple of names that number the ranks row-major.
      axis_index_groups: groups, of one size, to exchange within. If None, all.
      lane, backend: to use; see :func:`jaxcomm.init` and :func:`jaxcomm.using`.

    Returns:
      (M, ...) array. Slices may overlap in ``operand``, but its gradient is then
      refused as they are in a result, where that of jax.lax is wrong: send copies of
      these rows.

    Raises:
      NameError: if the axis is not bound.
      TypeError: if offsets or sizes are not integers.
      ValueError: if shapes do not fit together.
      jax.errors.JaxRuntimeError: when it runs, if slices do not fit or overlap.

    Example:
      See ``jax.lax.ragged_all_to_all``; arguments and result are the same.
    """
    call = call_of("ragged_all_to_all", axis_name, axis_index_groups, lane, backend)
    size = call.group_size
    rows, result = request.as_arrays((operand, output), call)
    indices = {
        "input_offsets": input_offsets,
        "send_sizes": send_sizes,
        "output_offsets": output_offsets,
        "recv_sizes": recv_sizes,
    }
    length = jnp.shape(input_offsets)
    for what, index in indices.items():
        if not jnp.issubdtype(jnp.result_type(index), jnp.integer):
            raise TypeError(
                f"ragged_all_to_all: {what} must be integers, got "
                f"{jnp.result_type(index)}"
            )
        if jnp.shape(index) != length or len(length) != 1 or length[0] < 1:
            raise ValueError(
                f"ragged_all_to_all: offsets and sizes must be of one shape (K,), K at "
                f"least 1; got {what} of shape {jnp.shape(index)}"
            )
    if length[0] % size != 0:
        raise ValueError(
            f"ragged_all_to_all: {length[0]} slices are not divisible by the {size} "
            f"devices of axes {call.axes}"
        )
    if rows.ndim < 1 or rows.shape[1:] != result.shape[1:]:
        raise ValueError(
            f"ragged_all_to_all: operand and output must agree in all dimensions but "
            f"the first, got {rows.shape} and {result.shape}"
        )
    if rows.dtype != result.dtype:
        raise TypeError(
            f"ragged_all_to_all: operand has dtype {rows.dtype}, output "
            f"{result.dtype}; they must be equal"
        )
    operands = [rows, result, *_of_one_type(indices.values())]
    return _Exchange(RAGGED_ALL_TO_ALL, operands, call).run()


class _Exchange(Request):
    """Several operands, one result: of the type of ``output``, the second."""

    def _unpack(self, outs):
        (out,) = outs
        return out.astype(self._dtypes[1])


def _of_one_type(indices):
    """Make offsets and sizes of one type, whose sums fit into 32 bits at least."""
    indices = [jnp.asarray(index) for index in indices]
    wide = np.result_type(
        *(i.dtype if i.dtype.itemsize >= 4 else np.int32 for i in indices)
    )
    # numpy's type for both uint64 and signed integers is float64.
    wide = wide if wide.kind in "iu" else np.dtype(np.int64)
    wide = jax.dtypes.canonicalize_dtype(wide)
    return [index.astype(wide) for index in indices]


class RaggedAllToAll(Collective):
    """Operands: operand, output, then the four arrays of offsets and sizes."""

    name = "ragged_all_to_all"

    def out_avals(self, avals, size):
        return [avals[1]]

    def aliases(self, num_operands):
        return {1: 0}

    def sent(self, operands):
        return operands[:1]

    def emulate_all(self, xs, size):
        def received(output, rank):
            return _received(xs[0], output, xs[2:], rank)

        return [jax.vmap(received)(xs[1], jnp.arange(size))]

    def xla(self, xs, call):
        def gather(xs):
            return [lax.all_gather(x, call.axes) for x in xs]

        return self.by_gathering(xs, call, gather)

    def by_gathering(self, xs, call, gather):
        """Compute what this rank receives from the operands of all ranks.

        Args:
          gather: from arrays of this rank to those of all ranks along the axes,
            stacked.
        """
        operand, output, *indices = xs
        stacked, rank = _own_group(gather([operand, *indices]), call)
        return [_received(stacked[0], output, stacked[1:], rank)]

    def jvp(self, primals, tangents, **params):
        outs = self.primitive.bind(*primals, **params)
        return outs, self.primitive.bind(*tangents[:2], *primals[2:], **params)

    def batch(self, axis_data, operands, dims, *, call):
        size = axis_data.size
        if axis_data.name not in call.axes and all(dim is None for dim in dims):
            return self.primitive.bind(*operands, call=call), [None]
        xs = [
            jnp.broadcast_to(x, (size, *x.shape))
            if d is None
            else jnp.moveaxis(x, d, 0)
            for x, d in zip(operands, dims, strict=True)
        ]
        if axis_data.name in call.axes:
            zeros = [0] * len(xs)
            return batching.batch_own_axis(self, axis_data, xs, zeros, call=call)
        # The batch becomes more slices: (B, K) indices as K x B, device-major.
        operand, output, input_offsets, send_sizes, output_offsets, recv_sizes = xs
        input_offsets = _within_batch(input_offsets, send_sizes, operand.shape[1])
        output_offsets = _within_batch(output_offsets, send_sizes, output.shape[1])
        (out,) = self.primitive.bind(
            jax.lax.collapse(operand, 0, 2),
            jax.lax.collapse(output, 0, 2),
            *(
                x.T.reshape(-1)
                for x in (input_offsets, send_sizes, output_offsets, recv_sizes)
            ),
            call=call,
        )
        return [out.reshape(output.shape)], [0]


def _own_group(stacked, call):
    """Return the rows of this rank's group, and this rank's number in it."""
    rank = jax.lax.axis_index(call.axes)
    if call.index_groups is None:
        return stacked, rank
    groups = np.array(call.index_groups)
    place = jnp.asarray(np.argsort(groups.ravel()))[rank]
    group = jnp.asarray(groups)[place // call.group_size]
    return [x[group] for x in stacked], place % call.group_size


def _received(operand, output, indices, target):
    """Compute the result of rank ``target``.

    Args:
      operand: of all ranks, stacked.
      output: of the rank.
      indices: offsets and sizes, each of all ranks, stacked.
      target: the rank.
    """
    input_offsets, send_sizes, output_offsets, recv_sizes = indices
    size, count = operand.shape[:2]
    each = input_offsets.shape[1] // size
    expected = recv_sizes[target]
    fits = _fits(input_offsets, send_sizes, count)
    fits &= _fits(output_offsets, send_sizes, output.shape[0])

    def to_target(x):
        """From every rank the slices for the target, in the order of the ranks."""
        return jax.lax.dynamic_slice_in_dim(x, target * each, each, 1).reshape(-1)

    begins, lengths, places, fits = map(
        to_target, (input_offsets, send_sizes, output_offsets, fits)
    )
    # Which slice ends up in each row.
    rows = jnp.arange(output.shape[0], dtype=places.dtype)[None]
    slices = jnp.arange(len(places), dtype=places.dtype)[:, None]
    within = (rows >= places[:, None]) & (rows < (places + lengths)[:, None])
    is_alone = within.sum(0) <= 1
    chosen = jnp.where(within, slices, 0).max(0)
    out = output
    if count > 0:
        source = (chosen // each).astype(places.dtype)
        row = source * count + begins[chosen] + rows[0] - places[chosen]
        sent = jnp.take(jax.lax.collapse(operand, 0, 2), row, 0, mode="clip")
        is_written = within.any(0).reshape(-1, *[1] * (output.ndim - 1))
        out = jnp.where(is_written, sent, output)
    # Nothing can raise here.
    is_fine = (fits & (lengths == expected)).all() & is_alone.all()
    return jnp.where(is_fine, out, filled(output))


def _within_batch(offsets, sizes, rows: int):
    """Return (B, K) offsets as ones into the B arrays of ``rows`` rows, joined.

    Slices that leave their own array begin past the end of all, where the host backend
    refuses them as it does without a batch. Else they would be rows of a neighbour.
    """
    count = offsets.shape[0]
    start = (jnp.arange(count) * rows).astype(offsets.dtype)[:, None]
    beyond = jnp.asarray(count * rows, offsets.dtype)
    return jnp.where(_fits(offsets, sizes, rows), start + offsets, beyond)


def _fits(offsets, sizes, rows: int):
    """Say which slices lie within an array of ``rows`` rows."""
    is_size = (sizes >= 0) & (sizes <= rows)
    return (offsets >= 0) & is_size & (offsets <= rows - sizes)


RAGGED_ALL_TO_ALL = RaggedAllToAll()
define(RAGGED_ALL_TO_ALL)
