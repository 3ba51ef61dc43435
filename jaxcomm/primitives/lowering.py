"""The only file that emits custom calls: a communicator's key and attributes.

What that means for ``jax.export``:

* A program whose collectives have ``backend="xla"``, or are traced where
  ``JAXCOMM_BACKEND`` is ``xla`` or there is no extension, holds no custom call of ours.
  It can be exported for a ``jax.sharding.AbstractMesh``, and called on any devices, in
  any order.
* The ``host`` backend needs a mesh of devices, and JAX wants to be told that nobody
  vouches for its custom calls tomorrow: ``jax.export.export(program, disabled_checks=
  [jax.export.DisabledSafetyCheck.custom_call("jaxcomm.all_reduce")])``, one for each
  target that its refusal names. What comes of it is for the very mesh it was exported
  for: other devices are refused at run time, but the same devices in another order
  keep the ranks they had. In a process that did not trace the program, call
  ``jaxcomm.init(mesh)`` first.
* Only XLA's collectives have symbolic shapes. Ours raise.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Sequence

import jax
import numpy as np

from jaxcomm import compat, config
from jaxcomm._built import _ffi
from jaxcomm.communicator import backends, cache, replica_groups
from jaxcomm.communicator.communicator import Communicator
from jaxcomm.primitives import automatic_axes, nccl_rewrites, tree
from jaxcomm.primitives.call import Call
from jaxcomm.primitives.checksums import recorded, recorded_done, recorded_start
from jaxcomm.primitives.registry import ANY, Bind, Replacement, Rule, Served
from jaxcomm.primitives.rounded import rounded

# The target that ends every split-phase collective.
_DONE = "jaxcomm.done"


def _mean_as_sum(collective, avals, served, *, op: str) -> Replacement | None:
    """Divide sums, for backends that do not average."""
    if op != "mean":
        return None

    def divide(bind, xs):
        return [total / served.size for total in bind(collective.name, xs, op="sum")]

    return divide


def replacement_of(
    served: Served, collective, avals: Sequence, call: Call, own
) -> Replacement | None:
    """Return what is lowered in the place of a call; None if the backend does it.

    Args:
      served: what serves the call.
      collective: that is called.
      avals: its operands' types on one rank.
      call: the call.
      own: the collective's own parameters.
    """
    backend, size = served.backend, served.size
    rules = [REWRITES.get((backend, name)) for name in (ANY, collective.name)]
    # Of two ranks each order is the tree. XLA may begin with a zero, and loses -0.
    is_ordered = size <= (1 if backend == "xla" else 2)
    adds_in_tree = is_ordered or backends.named(backend).adds_in_tree
    if call.reproducible and not adds_in_tree:
        pairs = None
        if (backend, served.platform) == ("xla", "cpu"):
            pairs = tree.in_pairs(collective, avals, call, size, **own)
        by_tree = pairs or tree.in_tree(collective, avals, **own)
        rules.insert(1, lambda *_, **__: by_tree)
    for rule in rules:
        replacement = rule and rule(collective, avals, served, **own)
        if replacement is not None:
            return replacement
    return None


# What replaces a collective over a backend, by both names.
REWRITES: dict[tuple[str, str], Rule] = {
    ("host", "all_reduce"): _mean_as_sum,
    **{("nccl", name): rule for name, rule in nccl_rewrites.RULES.items()},
}

# A collective in terms of JAX functions: from operands to results.
InJax = Callable[[Sequence], Sequence]


def register(collective) -> None:
    """Register how a collective's primitives are lowered on every platform."""

    def with_ours(ctx, *operands, call, **own):
        def results_of(operands):
            return _lower(collective, ctx, operands, call, own)

        return recorded(collective, ctx, operands, call, results_of)

    def fallback(ctx, *operands, call, **own):
        backends.check_xla_serves(call.backend, call.where)

        def results_of(operands):
            return _in_jax(_with_lax(ctx, collective, call, own), ctx, operands)

        return recorded(collective, ctx, operands, call, results_of)

    _register(collective.primitive, with_ours, fallback)


def register_pair(collective) -> None:
    """Register how a split-phase collective is lowered on every platform.

    Where XLA communicates, the start does everything.
    """

    def start(ctx, *operands, paired, call, **own):
        of_results = ctx.replace(avals_out=ctx.avals_out[len(operands) :])
        found = _transport(collective, ctx, ctx.avals_in, call, own)

        def begun(operands):
            if paired and isinstance(found, Communicator):
                operands = _whole(found, ctx, ctx.avals_in, operands)
            results = _emit(found, collective, of_results, operands, call, own, paired)
            return [*operands, *results]

        return recorded_start(ctx, operands, call, begun)

    def start_fallback(ctx, *operands, paired, call, **own):
        backends.check_xla_serves(call.backend, call.where)
        of_results = ctx.replace(avals_out=ctx.avals_out[len(operands) :])
        lax = _with_lax(ctx, collective, call, own)
        return recorded_start(
            ctx, operands, call, lambda xs: [*xs, *_in_jax(lax, of_results, xs)]
        )

    def done(ctx, *operands, leaves, paired, call, **own):
        results = ended(ctx, operands, leaves, paired, call, own)
        return recorded_done(collective, ctx, operands[:leaves], call, results)

    def ended(ctx, operands, leaves, paired, call, own):
        results = operands[leaves : 2 * leaves]
        if not paired:
            return results
        avals = ctx.avals_in[:leaves]
        found = _transport(collective, ctx, avals, call, own)
        if not isinstance(found, Communicator):
            return results
        call = call.replace(name=call.name.removesuffix("_start") + "_done")
        results = _custom_call(
            _Target(_DONE, {leaves + i: i for i in range(leaves)}, True),
            collective,
            found,
            ctx,
            operands,
            avals,
            call,
            own,
        )
        return _whole(found, ctx, ctx.avals_out, results)

    def done_fallback(ctx, *operands, leaves, call, **_):
        results = operands[leaves : 2 * leaves]
        return recorded_done(collective, ctx, operands[:leaves], call, results)

    _register(collective.pair.start, start, start_fallback)
    _register(collective.pair.done, done, done_fallback)


def _whole(comm: Communicator, ctx, avals, arrays):
    """Return arrays of a program that XLA neither slices nor writes in place.

    XLA gives a custom call on a GPU a part of a larger array, in place of a slice. A
    start would then read an array that lives no longer than its other uses, and what a
    done returns would be written by nobody.
    """
    if comm.backend != "nccl":
        return arrays
    ctx = ctx.replace(avals_in=avals, avals_out=avals)
    return _in_jax(jax.lax.optimization_barrier, ctx, arrays)


def _register(primitive, ours, fallback) -> None:
    # The portable twin needs no devices: XLA numbers the ranks along any mesh.
    compat.require_devices_during_lowering(primitive)
    for each in (primitive, primitive.portable):
        # Calls that are recorded have a number each.
        shared = not config.checksums()
        for platform in backends.lowering_platforms():
            compat.register_lowering(each, ours, platform=platform, shared=shared)
        compat.register_lowering(each, fallback, shared=shared)


@dataclasses.dataclass(frozen=True)
class _Target:
    """A custom call target, and what XLA must know of calls to it."""

    name: str
    aliases: dict[int, int]
    # Without a side effect XLA would merge equal starts, or hoist one out of a loop
    # while its done stays.
    has_side_effect: bool = False


def _lower(collective, ctx, operands, call: Call, own):
    """Lower a call: to a custom call of ours, or to JAX functions in its place."""
    found = _transport(collective, ctx, ctx.avals_in, call, own)
    return _emit(found, collective, ctx, operands, call, own)


def _emit(found, collective, ctx, operands, call: Call, own, is_start=False):
    """Lower a call to what carries it."""
    avals = ctx.avals_in
    if not isinstance(found, Communicator):
        return _in_jax(found, ctx, operands)
    found.spec.backend.prepare(found.spec, collective.planner)
    name = found.spec.backend.target(found.spec, collective.planner, is_start)
    target = _Target(name, collective.aliases(len(operands)), is_start)
    return _custom_call(target, collective, found, ctx, operands, avals, call, own)


def _transport(collective, ctx, avals, call: Call, own) -> Communicator | InJax:
    """Return the communicator that carries a call, or what replaces the call."""
    mesh = compat.concrete_mesh(ctx)
    if mesh is None and call.is_portable:
        return _with_lax(ctx, collective, call, own)
    if mesh is None:
        raise ValueError(
            f"{call.where}: this program is lowered for an abstract mesh, which "
            f"has no devices to communicate between. Give jax.shard_map a mesh of "
            f"devices; of a shard_map within another, set it with jax.set_mesh(mesh); "
            f"or choose XLA's collectives with backend='xla'."
        )
    partition = replica_groups.partition(
        replica_groups.grid_of(mesh), call.axes, call.index_groups
    )
    size = max(partition.sizes)
    if size == 1:
        return functools.partial(_alone, collective, call, own)
    backend = call.backend
    automatic = compat.automatic_axes(ctx)
    if automatic:
        automatic_axes.check_left_to_xla(call, partition, automatic)
        backend = "xla"
    comm = cache.for_lowering(mesh, partition, call.lane, backend)
    if automatic:
        automatic_axes.notice(call, partition, automatic, comm)
    if not comm.is_ours:
        return _with_lax(ctx, collective, call, own)
    platform = mesh.devices.flat[0].platform
    served = Served(comm.backend, platform, size, comm.connection.row_mover)
    found = replacement_of(served, collective, avals, call, own)
    if found is None:
        return comm
    call = call.replace(backend=comm.backend, given="varying", to="varying")
    return functools.partial(found, Bind(call))


def _custom_call(
    target: _Target, collective, comm, ctx, operands, avals, call: Call, own
):
    """Emit a custom call that is for a communicator; avals are of what it sends."""
    _check_shapes_known(ctx, call, comm)
    rule = jax.ffi.ffi_lowering(
        target.name,
        operand_output_aliases=target.aliases or None,
        has_side_effect=target.has_side_effect,
    )
    params = collective.planner_params(avals, comm.size, **own)
    with compat.operation_named(ctx, call.in_profiles(avals)):
        return rule(
            ctx,
            *operands,
            collective=collective.planner,
            name=call.name,
            axes=str(call.axes),
            key=np.int64(comm.key),
            program=_program(ctx, comm.key),
            reduce=own.get("op", "sum"),
            params=np.asarray(params, dtype=np.int64),
            part_of=call.part_of,
        )


def _check_shapes_known(ctx, call: Call, comm) -> None:
    """Raise ValueError of symbolic shapes: XLA gives custom calls no others later."""
    for aval in (*ctx.avals_in, *ctx.avals_out):
        if not all(isinstance(count, int) for count in aval.shape):
            raise ValueError(
                f"{call.where}: an array has the symbolic shape {aval.shape}, and the "
                f"backend {comm.backend!r} needs numbers. Export the program for each "
                f"shape, or choose XLA's collectives with backend='xla'."
            )


def _program(ctx, key: int):
    """Return a number for what a program being lowered does in a communicator.

    The same on every process.
    """
    text = f"{key} {compat.program_text(ctx)}"
    digest = hashlib.sha256(text.encode()).digest()
    program = np.frombuffer(digest[:8], np.int64)[0]
    _ffi.begin_program(int(program))
    return program


def _with_lax(ctx, collective, call: Call, own) -> InJax:
    platform = compat.lowering_platform(ctx)

    def communicate(xs):
        served = Served("xla", platform, call.largest_group)
        found = replacement_of(served, collective, xs, call, own)
        if found is not None:
            changes = {"backend": "xla", "given": "varying", "to": "varying"}
            return found(Bind(call.replace(**changes)), xs)
        outs = collective.xla(xs, call, **own)
        # A sum of one rank, which XLA takes away.
        return list(map(rounded, outs)) if call.reproducible else outs

    return communicate


def _alone(collective, call: Call, own, xs):
    """A group of one device exchanges nothing: no communicator is made for it."""
    outs = collective.emulate_all([x[None] for x in xs], 1, **own)
    outs = [out[0] for out in outs]
    return list(map(rounded, outs)) if call.reproducible else outs


def _in_jax(function: InJax, ctx, operands):
    return compat.lower_as(lambda *xs: function(xs), ctx, *operands)
