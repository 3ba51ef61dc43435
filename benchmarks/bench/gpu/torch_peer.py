"""torch in the same processes: its NCCL collectives, and its ``context_parallel``.

torch is no dependency. It makes communicators of its own, and needs a process for each
rank.
"""

# pyright: reportMissingImports=false

import contextlib
import datetime
import types
from collections.abc import Iterator, Sequence

import jax
import numpy as np

import jaxcomm
from bench import units
from bench.gpu.attention import attend_in_zigzag, forward_and_backward
from bench.gpu.rows import Figure, Finding
from bench.gpu.sizes import MOST_ALONE, calls_in_a_round, length
from bench.gpu.timer import Timer, local, thunk
from jaxcomm.attention.kernels import cudnn

_SPLIT = jax.P(None, "i")
_TIMEOUT = datetime.timedelta(seconds=60)
# Of the largest number in the result; both compute in bfloat16.
_TOLERANCE = 0.02


def rows(timer: Timer) -> Iterator[Figure | Finding]:
    """Yields whether results agree, and figures: collectives, then attention."""
    reason = _reason(timer)
    if reason:
        yield timer.finding("torch", f"not measured: {reason}")
        return
    jaxcomm.init(timer.mesh, "i")
    with _process_group(timer) as torch:
        yield from _collectives(timer, torch)
        yield from _attention(timer, torch)


def _reason(timer):
    if timer.mesh.devices.flat[0].platform == "cpu":
        return "torch's NCCL needs GPUs"
    if jax.process_count() != timer.size:
        return f"torch needs a process for each rank: --processes {timer.size}"
    try:
        import torch
    except ImportError as error:
        return f"torch cannot be imported: {error}"
    if not torch.cuda.is_available():
        return "torch finds no GPU"
    # Else jaxcomm's own kernels would stand for cuDNN's.
    return cudnn.fused_attention_reason(timer.sizes.heads[2])


@contextlib.contextmanager
def _process_group(timer):
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(jax.local_devices()[0].local_hardware_id or 0)
    rank, size = jax.process_index(), timer.size
    if rank == 0:
        store = dist.TCPStore(
            "127.0.0.1", 0, size, is_master=True, timeout=_TIMEOUT,
            wait_for_workers=False,
        )  # fmt: skip
        timer.agree(store.port)
    else:
        store = dist.TCPStore("127.0.0.1", timer.agree(0)[0], size, timeout=_TIMEOUT)
    dist.init_process_group(
        "nccl", store=store, rank=rank, world_size=size, timeout=_TIMEOUT,
        device_id=torch.device("cuda", torch.cuda.current_device()),
    )  # fmt: skip
    try:
        yield torch
    finally:
        dist.destroy_process_group()


def _tensor(torch, array):
    """Returns a copy of what this process holds of an array."""
    (shard,) = array.addressable_shards
    return torch.from_dlpack(jax.block_until_ready(shard.data)).clone()


def _launching(torch, call):
    """Returns a thunk of torch's whose result ``jax.block_until_ready`` waits for."""
    launched = types.SimpleNamespace(block_until_ready=torch.cuda.synchronize)

    def launch():
        call()
        return launched

    return launch


def _collectives(timer, torch):
    version = ".".join(map(str, torch.cuda.nccl.version()))
    peer = f"torch {torch.__version__.split('+')[0]}, NCCL {version}"
    for size in (timer.sizes.small, timer.sizes.large):
        count = -(-size // (4 * timer.size)) * timer.size
        x = timer.random((timer.size, count))
        given = _tensor(torch, x)
        yield timer.compare(
            f"x + 1 of {units.size(size)}, which sends nothing",
            thunk(timer.program(_plus_one), x), peer,
            _launching(torch, thunk(_plus_one, given)),
        )  # fmt: skip
        del given
        for name, (ours, theirs) in _calls(timer, torch.distributed).items():
            program = timer.program(ours)
            given = _tensor(torch, x)
            out = theirs(given)
            torch.cuda.synchronize()
            found = np.allclose(
                local(program(x)).ravel(), out.cpu().numpy().ravel(), atol=1e-5
            )
            text = "the results agree" if found else "the results differ"
            what = f"{name} {units.size(size)}"
            yield timer.finding(f"{what}, as torch has it", text, bool(found))
            yield timer.compare(
                what, thunk(program, x), peer,
                _launching(torch, thunk(theirs, given)),
            )  # fmt: skip
            del given, out
        del x


def _plus_one(x):
    return x + 1


def _calls(timer, dist):
    """Returns ours and torch's. Its sum overwrites its operand, which saves memory."""
    size, rank = timer.size, jax.process_index()

    def all_reduce(x):
        dist.all_reduce(x)
        return x

    def all_gather(x):
        out = x.new_empty(size * x.numel())
        dist.all_gather_into_tensor(out, x.ravel())
        return out

    def reduce_scatter(x):
        out = x.new_empty(x.numel() // size)
        dist.reduce_scatter_tensor(out, x.ravel())
        return out

    def all_to_all(x):
        out = x.new_empty(x.numel())
        dist.all_to_all_single(out, x.ravel())
        return out

    def send_and_receive(x):
        out = x.new_empty(x.shape)
        ops = [
            dist.P2POp(dist.isend, x, (rank + 1) % size),
            dist.P2POp(dist.irecv, out, (rank - 1) % size),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        return out

    return {
        "psum": (lambda x: jaxcomm.psum(x, "i"), all_reduce),
        "ppermute": (lambda x: jaxcomm.ppermute(x, "i", timer.ring), send_and_receive),
        "all_gather": (lambda x: jaxcomm.all_gather(x, "i", tiled=True), all_gather),
        "psum_scatter": (
            lambda x: jaxcomm.psum_scatter(x, "i", scatter_dimension=1, tiled=True),
            reduce_scatter,
        ),
        "all_to_all": (
            lambda x: jaxcomm.all_to_all(x, "i", 1, 0, tiled=True),
            all_to_all,
        ),
    }


def _attention(timer, torch):
    """Yields causal ring attention by cuDNN against torch's, of as many key heads."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    mesh = init_device_mesh("cuda", (timer.size,))
    for tokens in timer.sizes.up_to(MOST_ALONE):
        # torch wants to cut something, and so learns the length.
        whole = torch.zeros(tokens, device="cuda")
        with (
            sdpa_kernel(SDPBackend.CUDNN_ATTENTION),
            context_parallel(mesh, buffers=[whole], buffer_seq_dims=[0]),
        ):
            yield from _attention_of(timer, torch, tokens)


def _attention_of(timer, torch, tokens):
    from torch.nn import functional

    heads, _, size = timer.sizes.heads
    drawn = timer.random((3, tokens, heads, size), "bfloat16", _SPLIT)
    block = jax.jit(lambda x: (x[:1], x[1:2], x[2:]))(drawn)
    # Heads before tokens. Each rank's are at positions dealt in zigzag, for both.
    theirs = [
        _tensor(torch, x).transpose(1, 2).contiguous().requires_grad_() for x in block
    ]

    ours = timer.program(attend_in_zigzag, _SPLIT)
    gradients = forward_and_backward(ours)

    def attend_theirs():
        return functional.scaled_dot_product_attention(*theirs, is_causal=True)

    def forward():
        with torch.no_grad():
            return attend_theirs()

    def both():
        return torch.autograd.grad(attend_theirs().float().sum(), theirs)

    name = f"causal ring attention {length(tokens)}, {heads} key heads"
    results = [local(x)[0] for x in (ours(*block), *gradients(*block)[1])]
    expected = [
        x.detach().transpose(1, 2).float().cpu().numpy() for x in (forward(), *both())
    ]
    error = largest_difference(results, expected)
    text = f"differs by {error:.1e} of the largest number"
    yield timer.finding(f"{name}, as torch has it", text, error < _TOLERANCE)
    del results, expected
    for what, mine, other, least in (
        ("forward", ours, forward, 1.15),
        ("forward and backward", gradients, both, 1.05),
    ):
        yield timer.compare(
            f"{name}, {what}", thunk(mine, *block),
            "torch's context_parallel (cuDNN)", _launching(torch, other),
            calls=calls_in_a_round(tokens), least=least,
        )  # fmt: skip


def largest_difference(ours: Sequence, theirs: Sequence) -> float:
    """Returns the largest difference of two arrays, as a part of their largest number.

    What is not a number in either differs by NaN, which is below nothing.
    """
    found = []
    for mine, other in zip(ours, theirs, strict=True):
        mine = np.asarray(mine, np.float32)
        found.append(np.abs(mine - other).max() / np.abs(other).max())
    return float(np.max(found))
