"""The command line of ``python -m jaxcomm.bench gpu``."""

import argparse
import os
import re
import sys


def main(arguments: list[str]) -> int:
    """Checks, times, prints a table last; returns the exit status.

    0; 1 if a check failed; 2 if there are too few GPUs.
    """
    parser = argparse.ArgumentParser(
        prog="jaxcomm.bench gpu",
        description="Collectives over NCCL on the GPUs of a process: checked against "
        "XLA's own first, then timed against them, taking turns in one run.",
    )
    parser.add_argument(
        "--ranks", type=int, default=2, help="GPUs to use (%(default)s)"
    )
    parser.add_argument(
        "--tokens", type=int, default=32768, help="of ring attention (%(default)s)"
    )
    parser.add_argument(
        "--checks-only", action="store_true", help="leave out what is timed"
    )
    asked = parser.parse_args(arguments)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax
    from rich.console import Console

    import jaxcomm
    from jaxcomm.bench.gpu import checks, figures, memory
    from jaxcomm.nccl import library

    console = Console(width=None if sys.stdout.isatty() else 160)
    try:
        found = jax.devices("gpu")
    except RuntimeError:
        found = []
    if len(found) < asked.ranks or asked.ranks < 2:
        print(
            f"jaxcomm.bench gpu: {asked.ranks} ranks were asked for and JAX finds "
            f"{len(found)} GPUs; at least 2 are needed, one for each rank",
            file=sys.stderr,
        )
        return 2
    mesh = jax.make_mesh(
        (asked.ranks,), ("i",), axis_types=(jax.sharding.AxisType.Auto,),
        devices=found[: asked.ranks],
    )  # fmt: skip
    console.print(f"{asked.ranks} x {found[0].device_kind}, jax {jax.__version__}")
    console.print(str(library.load()))
    jaxcomm.init(mesh)
    failed = list(checks.failures(mesh))
    for text in failed:
        console.print(f"wrong: {text}", markup=False)
    total = len(checks.DTYPES) * len(checks.calls(mesh.size)[0])
    console.print(f"{total - len(failed)} of {total} collectives and types right")
    loaded = _libraries()
    console.print(f"libnccl in this process: {', '.join(loaded)}")
    if asked.checks_only:
        return int(bool(failed) or len(loaded) != 1)
    rows = []
    memories = list(memory.rows(mesh))
    jaxcomm.init(mesh, "i", lanes=("default", "side"))
    capturing = jaxcomm.CommPolicy(command_buffers=True, lanes=3)
    jaxcomm.init(mesh, "i", lanes="captured", policy=capturing)
    timer = figures.Timer(mesh)
    for part in (
        figures.collectives(timer),
        figures.overlap(timer),
        figures.attention(timer, asked.tokens),
    ):
        rows += part
    console.print(_memory_table(memories))
    console.print(_table(rows))
    return int(bool(failed) or len(loaded) != 1)


def _libraries():
    with open("/proc/self/maps") as maps:
        paths = {line.split()[-1] for line in maps if re.search(r"/libnccl\.so", line)}
    return sorted(paths)


def _memory_table(memories):
    from rich.table import Table

    table = Table(title="device memory, MiB a device")
    for name in ("communicators", "resources", "each", "the mesh's own"):
        table.add_column(name, justify="right")
    for count, shares, each, parent in memories:
        kind = "shared" if shares else "own"
        table.add_row(str(count), kind, f"{each:.0f}", f"{parent:.0f}")
    return table


def _table(rows):
    from rich.table import Table

    table = Table()
    for name in ("what", "jaxcomm, us", "against", "us", "ratio", "asked"):
        table.add_column(
            name, justify="left" if name in ("what", "against") else "right"
        )
    for row in rows:
        table.add_row(
            row.name, f"{row.ours * 1e6:.1f}", row.peer, f"{row.theirs * 1e6:.1f}",
            f"{row.ratio:.2f}", "" if row.least is None else f"{row.least:g}",
        )  # fmt: skip
    return table
