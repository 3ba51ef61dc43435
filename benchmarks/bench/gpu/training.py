"""A training step of examples/language_model over data x context, and on one GPU."""

import dataclasses
import importlib.util
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

import jaxcomm
from bench import units
from bench.gpu import sizes
from bench.gpu.rows import Figure, Finding
from bench.gpu.timer import Timer, thunk

_NEEDED = "language_model", "optax"
_WINDOW = 1024
_LEARNING_RATE = 3e-4
_CALLS = 3
# Of the gradients of an array, by their norm: layers compute in bfloat16.
_TOLERANCE = 0.05
# FLOP/s of dense products in bfloat16, as NVIDIA tells them.
_PEAKS = {"H100": 989e12, "H200": 989e12}


@dataclasses.dataclass(frozen=True)
class Model:
    """What is trained: layers see all tokens and a window by turns."""

    layers: int
    width: int
    heads: int
    key_heads: int
    tokens: int

    def flops(self, parameters: int, window: int) -> float:
        """Returns those of a step for one sequence: three times the forward pass.

        Args:
          parameters: that are multiplied with each token.
          window: tokens that each second layer sees.

        >>> Model(2, 8, 2, 1, 100).flops(parameters=10, window=100)
        966000.0
        """
        # A token of a causal layer sees half of all tokens, on average.
        seen = {False: self.tokens / 2, True: min(window, self.tokens / 2)}
        keys = sum(seen[number % 2 == 0] for number in range(self.layers))
        of_token = 2 * parameters + 4 * self.width * keys
        return 3.0 * self.tokens * of_token


def rows(timer: Timer) -> Iterator[Figure | Finding]:
    """Yields whether gradients are one GPU's, the time of a step, and rates."""
    lacking = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if lacking:
        text = f"not measured: {', '.join(lacking)} cannot be imported"
        yield timer.finding("training", text)
        return
    from language_model import model as network
    from language_model import step

    model = Model(*timer.sizes.model)
    data = 2 if timer.size % 2 == 0 and timer.size > 2 else 1
    shape = data, timer.size // data
    optimizer = step.make_optimizer(_LEARNING_RATE)
    config = network.ModelConfig(
        model.layers, model.width, model.heads, model.key_heads
    )
    state = step.init_state(0, config, optimizer)
    batch = _batch(data, model.tokens)

    # Keys and gradients travel at once. XLA runs a program of CPU devices in no fixed
    # order, and NCCL, or its stand-in, pairs calls by their order.
    is_cpu = timer.mesh.devices.flat[0].platform == "cpu"
    backend = "host" if is_cpu else "nccl"

    def program(devices: np.ndarray, rows: int | None = None) -> Any:
        mesh = jax.sharding.Mesh(
            devices, step.AXES, axis_types=(jax.sharding.AxisType.Auto,) * 2
        )
        jaxcomm.init(mesh, "context", step.AXES, backend=backend)
        return step.MeshProgram(
            mesh, model.tokens, "zigzag", optimizer, _WINDOW, rows, "bfloat16",
            donates=False,
        )  # fmt: skip

    ours = program(timer.mesh.devices.reshape(shape))
    given = (_put(state, ours.replicated), *ours.deal(batch))
    name = (
        f"{model.layers} layers of width {model.width}, sequences of "
        f"{sizes.length(model.tokens)}, {shape[0]} data x {shape[1]} context"
    )
    found, difference, theirs = _moments(ours.train(*given)), 0.0, None
    if jax.process_index() == 0:
        # One sequence after the other.
        one = program(np.array(jax.local_devices()[:1]).reshape(1, 1), data)
        theirs = thunk(one.train, _put(state, one.replicated), *one.deal(batch))
        difference = _difference(found, _moments(theirs()))
    yield timer.finding(
        f"gradients of {name}",
        f"they differ from one GPU's by {difference:.1e}, relatively",
        difference <= _TOLERANCE,
    )
    figure = timer.compare(
        f"a step of {name}", thunk(ours.train, *given),
        f"one GPU, {data} sequences, divided by {timer.size}", theirs,
        calls=_CALLS, alone=True, share=1 / timer.size,
    )  # fmt: skip
    yield figure
    # The embedding is looked up.
    looked_up = network.VOCABULARY * model.width
    parameters = network.count_params(state.params) - looked_up
    flops = data * model.flops(parameters, _WINDOW)
    yield _rates(timer, name, figure.ours, data * model.tokens, flops)
    plan = jaxcomm.plan(ours.mesh, ours.train, *given, backend=backend)
    yield timer.finding(
        f"jaxcomm.plan of a step of {name}",
        f"a rank sends {units.size(int(plan.step_bytes))}; communicators take "
        f"{units.size(plan.device_bytes)}",
        step_bytes=plan.step_bytes,
        device_bytes=plan.device_bytes,
    )


def _batch(count, tokens):
    """Returns inputs, targets and documents, int32 (count, tokens) each."""
    text = np.random.default_rng(0).integers(256, size=(count, tokens + 1), dtype="i4")
    return text[:, :-1], text[:, 1:], np.zeros((count, tokens), np.int32)


def _put(tree, sharding):
    def one(x):
        x = np.asarray(x)
        return jax.make_array_from_callback(x.shape, sharding, x.__getitem__)

    return jax.tree.map(one, tree)


def _moments(stepped) -> list[np.ndarray]:
    """Returns what the optimizer keeps of the first gradients."""
    state, _ = stepped
    kept = (np.asarray(x.addressable_data(0)) for x in jax.tree.leaves(state.optimizer))
    return [x.astype(np.float64) for x in kept if x.ndim > 0]


def _difference(found, expected) -> float:
    norm = np.linalg.norm
    pairs = zip(found, expected, strict=True)
    return max(float(norm(a - b) / norm(b)) for a, b in pairs)


def _rates(timer, name, seconds, tokens, flops):
    kind = timer.mesh.devices.flat[0].device_kind
    values = {"tokens_per_second": tokens / seconds}
    text = f"{tokens / seconds:,.0f} tokens/s"
    peak = next((peak for of, peak in _PEAKS.items() if of in kind), None)
    if peak is not None:
        values["model_flops_utilisation"] = flops / seconds / peak / timer.size
        text += f", {values['model_flops_utilisation']:.2f} of the GPUs' FLOP/s"
    return timer.finding(f"rate of {name}", text, **values)
