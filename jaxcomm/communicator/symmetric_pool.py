"""Arrays in memory that the other GPUs of a mesh can reach directly."""

import functools
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm import compat
from jaxcomm._built import ABSENCE, _ffi
from jaxcomm.communicator import cache
from jaxcomm.communicator.backends.nccl import agreement, registration
from jaxcomm.communicator.communicator import Communicator
from jaxcomm.errors import CommunicatorError

# DLPack's type codes, by numpy's kind; bfloat16 has its own.
_CODES = {"b": 6, "i": 0, "u": 1, "f": 2, "c": 5}
_BFLOAT16 = 4
# XLA lets go of a deleted array shortly after the program that used it.
_RELEASE_SECONDS, _POLL_SECONDS = 1.0, 0.01


class SymmetricPool:
    """Memory of equal size on every GPU of a mesh, for arrays that NCCL need not copy.

    jaxcomm allocates it with ``ncclMemAlloc`` and registers it as a window with every
    communicator of the ``nccl`` backend on these devices, now and whenever one is made.
    It registers once for each, never in a call. If NCCL refuses, collectives work as
    without it, and :meth:`registrations` says why.

    A collective uses the pool if its operand and its result both lie in it. XLA puts a
    result there only in place of a donated array. So donate a second array of the pool,
    as below, and let the two change roles.
    ``Communicator.stats()["symmetric_calls"]`` counts the calls that used it.

    If only one of operand and result lies in the pool, sends (``ppermute``,
    ``all_to_all``, ``gather``, ``scatter``) raise, because NCCL may hang. Sends that
    copy engines do are allowed, unless a rank is late for them. Give every process
    arrays of the pool, or none: NCCL assumes that all ranks hold an array in a window
    if one does. CPU devices copy donated arrays. There, with the stand-in for NCCL of
    the tests, no result lies in a pool.

    Every process of the mesh makes the same pools, and takes the same arrays from
    them, in the same order. :meth:`reset` takes back the memory of all arrays at once.
    After :func:`jaxcomm.grow`, make pools anew: a process that came back has none, so
    earlier ones are registered no more.

    Args:
      mesh: a ``jax.sharding.Mesh`` of NVIDIA GPUs.
      bytes_per_device: how much to allocate on each device.

    Raises:
      TypeError: if mesh is not a concrete mesh.
      ValueError: if the size is not a positive integer.
      CommunicatorError: if NCCL cannot serve the devices or cannot allocate so much, or
        the processes do not agree.

    Source: NCCL's user guide, "Window registration" and "Zero-copy".

    Example:
      >>> pool = jaxcomm.SymmetricPool(mesh, 64 << 20)  # doctest: +SKIP
      >>> x, spare = pool.device_put(x), pool.device_put(x)  # doctest: +SKIP
      >>> def hop(spare, x):
      ...     return jaxcomm.ring_shift(x, "i")
      >>> hop = jax.jit(
      ...     jax.shard_map(hop, mesh=mesh, in_specs=jax.P("i"), out_specs=jax.P("i")),
      ...     donate_argnums=0,
      ...     keep_unused=True,
      ... )  # doctest: +SKIP
      >>> x, spare = hop(spare, x), x  # doctest: +SKIP
      >>> pool.registrations()  # doctest: +SKIP
      {<Communicator axes=('i',) ...>: 'window'}
    """

    def __init__(self, mesh: jax.sharding.Mesh, bytes_per_device: int):
        """Allocate the memory and register it with the live communicators."""
        if not isinstance(mesh, jax.sharding.Mesh):
            raise TypeError(
                f"SymmetricPool: mesh must be a jax.sharding.Mesh, got "
                f"{type(mesh).__name__}"
            )
        is_integer = isinstance(bytes_per_device, int | np.integer)
        if (
            not is_integer
            or isinstance(bytes_per_device, bool)
            or not (0 < bytes_per_device < 1 << 62)
        ):
            raise ValueError(
                f"SymmetricPool: bytes_per_device must be a positive integer, got "
                f"{bytes_per_device!r}"
            )
        with cache.turn():
            self._make(mesh, int(bytes_per_device))

    def _make(self, mesh: jax.sharding.Mesh, bytes_per_device: int) -> None:
        refusal = ABSENCE or agreement.refusal(mesh)
        if refusal:
            raise CommunicatorError(f"SymmetricPool: {refusal}")
        self.mesh = mesh
        self.closed = False
        # By the key of the communicator.
        self._how: dict[int, str] = {}
        # Why it is not registered with others.
        self._why_not = "CommPolicy(symmetric=False)"
        ordinals = [device.local_hardware_id for device in mesh.local_devices]
        refused = None
        try:
            self.memory = _ffi.symmetric_memory(ordinals, bytes_per_device)
        except RuntimeError as error:
            refused = str(error)
        agreement.check_none_refused(mesh, "SymmetricPool", refused)
        self.number = registration.add(self)
        try:
            self._register(
                [
                    member.key
                    for member in cache.communicators()
                    if self._is_beside(member)
                    if member.policy is not None and member.policy.symmetric
                ]
            )
        except BaseException:
            self.close()
            raise

    @property
    def bytes(self) -> int:
        """Its size on each device."""
        return self.memory.bytes

    @property
    def used_bytes(self) -> int:
        """What arrays took of :attr:`bytes` since the last :meth:`reset`."""
        return self.memory.used_bytes

    @property
    def local_bytes(self) -> int:
        """Its size on all devices of this process."""
        return self.bytes * len(self.mesh.local_devices)

    def is_registered_with(self, key: int) -> bool:
        """Return whether the collectives of a communicator's key may use it."""
        return registration.is_registered(self._how.get(key, ""))

    def registrations(self) -> dict[Communicator, str]:
        """Return how it is registered with each live communicator on its devices.

        ``"window"``: NCCL's symmetric memory; ``"buffer: ..."``: by
        ``ncclCommRegister``, and why not as a window; else why it is not registered.
        """
        return {
            member: self._how.get(member.key, self._why_not)
            for member in cache.communicators()
            if not self.closed and self._is_beside(member)
        }

    def zeros(self, shape: Any, dtype: Any = "float32", spec: Any = None) -> jax.Array:
        """Return an array of zeros that lies in the pool.

        Args:
          shape: of the whole array.
          dtype: its type.
          spec: a ``jax.P`` that says how it is split over the mesh; replicated if None.

        Raises:
          TypeError: if ``spec`` is no ``jax.P``.
          ValueError: if DLPack has no such type (it has bool, integers and floats of 8
            to 64 bits, bfloat16 and complex numbers; no float8, nothing of 2 or 4
            bits), the shape does not divide, or the pool is closed or has too little
            left.

        Example:
          >>> pool.zeros((8, 1024), "bfloat16", jax.P("i")).shape  # doctest: +SKIP
          (8, 1024)
        """
        spec = jax.P() if spec is None else spec
        if not isinstance(spec, jax.P):
            raise TypeError(
                f"SymmetricPool.zeros: spec must be a jax.P or None, got {spec!r}"
            )
        sizes = shape if isinstance(shape, list | tuple) else (shape,)
        if not all(isinstance(size, int | np.integer) and size >= 0 for size in sizes):
            raise ValueError(
                f"SymmetricPool.zeros: shape must be of integers that are not "
                f"negative, got {shape!r}"
            )
        return self._array(
            tuple(map(int, sizes)),
            jax.dtypes.canonicalize_dtype(dtype),
            spec,
            lambda device: 0,
        )

    def device_put(self, x: jax.Array) -> jax.Array:
        """Return a copy of an array that lies in the pool, split alike.

        Args:
          x: a ``jax.Array`` with a ``NamedSharding`` on the pool's devices.

        Raises:
          TypeError: if it is not.
          ValueError: as for :meth:`zeros`.

        Example:
          >>> x = pool.device_put(x)  # doctest: +SKIP
        """
        sharding = getattr(x, "sharding", None)
        if (
            not isinstance(sharding, jax.sharding.NamedSharding)
            or not isinstance(sharding.mesh, jax.sharding.Mesh)
            or list(sharding.mesh.devices.flat) != list(self.mesh.devices.flat)
        ):
            raise TypeError(
                f"SymmetricPool.device_put: x must be a jax.Array with a NamedSharding "
                f"on the devices of the pool, {list(self.mesh.devices.flat)}; got "
                f"{sharding or type(x).__name__}. Call jax.device_put(x, "
                f"jax.NamedSharding(mesh, spec)) first"
            )
        jax.block_until_ready(x)
        parts = {part.device: part.data for part in x.addressable_shards}
        return self._array(
            x.shape, x.dtype, sharding.spec,
            lambda device: parts[device].unsafe_buffer_pointer(),
        )  # fmt: skip

    def reset(self) -> None:
        """Take the memory of all arrays back; every process calls it.

        Raises:
          ValueError: if some of them still exist after a second.
        """
        self._check_open()
        _once_empty("reset", self.memory.reset)

    def close(self) -> None:
        """Deregister and free the memory. Closing twice is harmless.

        Raises:
          ValueError: if some of its arrays still exist after a second.
        """
        if self.closed:
            return
        _once_empty("close", self.memory.close)
        self.closed = True
        self._how.clear()

    def __repr__(self) -> str:
        """Say in one line how much there is and what is used."""
        state = "closed" if self.closed else f"{self.used_bytes} used"
        return f"<SymmetricPool {self.bytes} bytes on each device, {state}>"

    def _leave_out(self, why: str) -> None:
        """Be registered with no communicator any more, and say why."""
        self._how.clear()
        self._why_not = why

    def register_with(self, key: int) -> None:
        """Register it with a communicator; called when that is made."""
        self._register([key])

    def _register(self, keys: list[int]) -> None:
        self._how |= registration.register(self, keys)

    def _is_beside(self, member: Communicator) -> bool:
        """Return whether a communicator of NCCL's joins the pool's devices."""
        ids = tuple(sorted(device for group in member.groups for device in group))
        is_made = member.world is not None
        return is_made and ids == registration.device_ids(self.mesh)

    def _check_open(self):
        if self.closed:
            raise ValueError("the SymmetricPool is closed; make another")

    def _array(self, shape, dtype, spec, source_of):
        self._check_open()
        kind = getattr(dtype, "kind", "")
        code = _BFLOAT16 if dtype == jnp.bfloat16 else _CODES.get(kind)
        if code is None:
            raise ValueError(
                f"SymmetricPool: arrays of {dtype} cannot be made, since DLPack has no "
                f"such type; make one of integers of that size and use "
                f"jax.lax.bitcast_convert_type"
            )
        sharding = jax.NamedSharding(self.mesh, spec)
        part = sharding.shard_shape(shape)
        bytes_of_part = math.prod(part) * dtype.itemsize
        try:
            offset = self.memory.take(bytes_of_part)
        except RuntimeError as error:
            raise ValueError(f"SymmetricPool: {error}") from None
        made = functools.partial(
            _ffi.symmetric_block, self.memory, offset=offset, shape=part,
            dtype_code=code, dtype_bits=8 * dtype.itemsize,
        )  # fmt: skip
        parts = []
        for device in self.mesh.local_devices:
            ordinal = device.local_hardware_id
            if bytes_of_part:
                self.memory.fill(ordinal, offset, source_of(device), bytes_of_part)
            of_device = jnp.zeros((), jnp.int8, device=device)
            place = of_device.__dlpack_device__()  # pyright: ignore
            block = made(ordinal=ordinal, dlpack_device=place)
            parts.append(compat.from_dlpack(block, device))
        return jax.make_array_from_single_device_arrays(shape, sharding, parts)


def _once_empty(what: str, take_back: Callable[[], None]) -> None:
    """Take memory back as soon as no array lies in it."""
    deadline = time.monotonic() + _RELEASE_SECONDS
    while True:
        # Before the look: who was stopped meanwhile looks once more.
        is_last = time.monotonic() > deadline
        try:
            return take_back()
        except RuntimeError as error:
            if is_last:
                raise ValueError(
                    f"SymmetricPool.{what}: {error}; delete them, and wait for the "
                    f"programs that use them"
                ) from None
        time.sleep(_POLL_SECONDS)
