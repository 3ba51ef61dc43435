"""The training step on a mesh: batch over ``data``, sequence over ``context``."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxcomm
from language_model import model, processes

AXES = ("data", "context")
# What a step may raise when a process has ended.
FAILURES = jax.errors.JaxRuntimeError, ValueError, jaxcomm.CommunicatorError


class State(NamedTuple):
    """What a step changes: the parameters, and what the optimizer remembers."""

    params: Any
    optimizer: Any


def make_optimizer(learning_rate: float) -> optax.GradientTransformation:
    """Return AdamW, warmed up over 10 steps and constant then.

    Constant, because a decay towards the last step would make the first N steps of a
    longer run differ from a run of N steps, and ``--resume`` from either.
    """
    rate = optax.schedules.warmup_constant_schedule(
        learning_rate / 10, learning_rate, warmup_steps=10
    )
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=0.01),
    )


def init_state(seed: int, config: model.ModelConfig, optimizer) -> State:
    """Draw the initial state."""
    params = model.init_params(seed, config)
    return State(params, optimizer.init(params))


def update(state: State, grads, optimizer) -> State:
    """Return the state after one step of the optimizer."""
    updates, memory = optimizer.update(grads, state.optimizer, state.params)
    return State(optax.apply_updates(state.params, updates), memory)


class MeshProgram:
    """The compiled training step and evaluation of one mesh.

    Attributes:
      mesh: with the axes ``data`` and ``context``.
      length: tokens of a sequence; need not divide by the ring.
      schedule: how the ring deals the sequence.
      window: tokens that each second layer sees.
      dtype: that the layers compute in.
      rows: sequences of a batch.
    """

    def __init__(
        self,
        mesh,
        length: int,
        schedule: str,
        optimizer,
        window: int,
        microbatches: int | None = None,
        dtype: str = "float32",
        *,
        donates=True,
    ):
        """Describes the program; nothing is compiled yet.

        Unless it ``donates``, the state before a step stays, to take the step again.
        """
        self.mesh = mesh
        self.length = length
        self.schedule = schedule
        self.window = window
        self.dtype = dtype
        self.rows = microbatches or mesh.shape["data"]
        self.replicated = jax.NamedSharding(mesh, jax.P())
        self._split = jax.NamedSharding(mesh, jax.P(*AXES))
        self._layout = jaxcomm.Layout(schedule, mesh.shape["context"], length)

        gradient = (
            self._in_one_order if microbatches else jax.value_and_grad(self._loss)
        )

        def train(state, *dealt):
            loss, grads = gradient(state.params, *dealt)
            return update(state, grads, optimizer), loss

        donated = 0 if donates else ()
        self.train = self._on_mesh(train, (jax.P(), jax.P()), donate_argnums=donated)
        self.evaluate = self._on_mesh(
            lambda state, *dealt: self._loss(state.params, *dealt), jax.P()
        )
        self._largest = jax.jit(
            jax.shard_map(
                lambda flags: jaxcomm.pmax(flags[0, 0], AXES),
                mesh=mesh,
                in_specs=jax.P(*AXES),
                out_specs=jax.P(),
            )
        )

    def _on_mesh(self, function, out_specs, **options):
        in_specs = (jax.P(), *[jax.P(*AXES)] * 3)
        sharded = jax.shard_map(
            function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs
        )
        return jax.jit(sharded, **options)

    def deal(self, batch):
        """Put a batch on the mesh: each rank of the ring gets its tokens.

        Args:
          batch: inputs, targets and documents, int32 (rows, length) each, in natural
            order.

        Returns:
          Inputs and targets, int32 (data, length padded to the ring), and their
          ``jaxcomm.Tokens``, split over the mesh.
        """
        *batch, documents = batch
        batch, tokens = self._layout.reorder(batch, segment_ids=documents)
        return processes.put((*batch, tokens), self._split)

    def in_any_process(self, flag: bool) -> bool:
        """Say whether the flag is set in any process; every process must ask."""
        if processes.count() == 1:
            return flag
        return bool(self._largest_of(int(flag)))

    def smallest(self, number: int) -> int:
        """Return the smallest number of any process; every process must ask."""
        return -self._largest_of(-number)

    def _largest_of(self, number):
        numbers = np.full(self.mesh.devices.shape, number, np.int32)
        return int(
            jaxcomm.raise_if_failed(self._largest(processes.put(numbers, self._split)))
        )

    def adopt(self, state: State) -> State:
        """Put a state that is replicated over a larger mesh on this one, uncopied."""
        here = set(self.mesh.devices.flat)

        def one(array):
            parts = [s.data for s in array.addressable_shards if s.device in here]
            return jax.make_array_from_single_device_arrays(
                array.shape, self.replicated, parts
            )

        return jax.tree.map(one, state)

    def batch_shape(self):
        """Return the shapes of what :meth:`deal` returns."""
        x = np.zeros((self.rows, self._layout.length), np.int32)
        batch, tokens = self._layout.reorder((x, x), segment_ids=x)
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._split),
            (*batch, tokens),
        )

    def _loss(self, params, inputs, targets, tokens):
        """Return the mean loss over the mesh; runs inside shard_map."""
        # Typed as different on every device, the parameters get different gradients;
        # the transpose of this line is one jaxcomm.psum of all their leaves.
        params = jaxcomm.pcast(params, AXES, to="varying")
        return jaxcomm.psum(self._part_of_loss(params, inputs, targets, tokens), AXES)

    def _in_one_order(self, params, *dealt):
        """Return the loss and its gradients, whose bits do not depend on ``data``.

        Microbatches are computed one by one, in one shape. Their gradients are the
        leaves of one tree: first those of a device, then those of the axis ``data``.
        """
        params = jaxcomm.pcast(params, AXES, to="varying")

        def of_one(row):
            row = jax.tree.map(lambda x: x[None], row)
            return jax.value_and_grad(self._part_of_loss)(params, *row)

        sums = jaxcomm.local_sum(jax.lax.map(of_one, dealt))
        # Axis ``data`` last: its devices are neighbours in the order of the sum.
        return jaxcomm.psum(sums, ("context", "data"), reproducible=True)

    def _part_of_loss(self, params, inputs, targets, tokens):
        """Return what the tokens of this device add to the mean loss."""

        def attend(query, key, value, is_windowed):
            return jaxcomm.ring_attention(
                query,
                key,
                value,
                "context",
                tokens,
                is_causal=True,
                strategy="ring",
                local_window_size=(self.window - 1, 0) if is_windowed else None,
            )

        losses = model.next_token_losses(
            params, inputs, targets, tokens.positions, attend, self.dtype
        )
        total = jnp.sum(losses, where=~tokens.is_padding)
        return total / (self.rows * self.length)
