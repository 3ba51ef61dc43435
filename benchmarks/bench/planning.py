"""``python -m bench.planning FILE``: how far predictions are from what is measured.

FILE is a calibration of this machine (``python -m jaxcomm.doctor --calibrate FILE``).
Sizes lie between those of the calibration. In several processes, started by
``python -m jaxcomm.launch``, every process takes part and the first prints.
"""

import argparse
import math
import os
import statistics

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

import jaxcomm
from jaxcomm.doctor import calibrate, check

SIZES = 1 << 10, 48 << 10, 512 << 10, 1 << 20, 3 << 20, 8 << 20
# Bytes of all results together.
_MOST_BYTES = 192 << 20
_CALLS = 15
_OF = {
    "psum": lambda x: jaxcomm.psum(x, "i"),
    "all_gather": lambda x: jaxcomm.all_gather(x, "i"),
    "psum_scatter": lambda x: jaxcomm.psum_scatter(x, "i", tiled=True),
    "all_to_all": lambda x: jaxcomm.all_to_all(x, "i", 0, 0, tiled=True),
    "ring_shift": lambda x: jaxcomm.ring_shift(x, "i"),
    "pbroadcast": lambda x: jaxcomm.pbroadcast(x, "i", 0),
}


def checked(machine: jaxcomm.Machine, groups: int) -> list[dict]:
    """Run every collective at every size; return predicted beside measured."""
    size = jax.device_count() // groups
    auto = (AxisType.Auto,) * 2
    mesh = jax.make_mesh((groups, size), ("groups", "i"), axis_types=auto)
    every = jax.P(("groups", "i"))
    sharding = jax.NamedSharding(mesh, every)
    rows = []
    for name, function in _OF.items():
        for each in SIZES:
            results = size if name == "all_gather" else 1
            if mesh.size * results * each > _MOST_BYTES:
                continue
            whole = np.ones((mesh.size * each // 4,), np.float32)
            x = jax.make_array_from_callback(
                whole.shape, sharding, lambda at, of=whole: of[at]
            )
            program = jax.jit(
                jax.shard_map(
                    lambda x, of=function: jnp.sum(of(x)).reshape(1),
                    mesh=mesh,
                    in_specs=every,
                    out_specs=every,
                    check_vma=False,
                )
            )
            for _ in range(_CALLS):
                jax.block_until_ready(program(x))
            plan = jaxcomm.plan(
                mesh,
                program,
                jax.ShapeDtypeStruct(whole.shape, whole.dtype),
                machine=machine,
            )
            rows += plan.check(calibrate.records(mesh)).to_json()
            jaxcomm.finalize()
    return rows


def _summary(rows: list[dict], least: int, below: float) -> str:
    found = [row for row in rows if least <= row["bytes"] < below and row["ratio"]]
    ratios = sorted(row["ratio"] for row in found)
    good = sum(row["is_good"] for row in found)
    return (
        f"{len(found)} cases, predicted / measured: median "
        f"{statistics.median(ratios):.2f}, {ratios[0]:.2f} to {ratios[-1]:.2f}; "
        f"{good} within the bounds"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.planning")
    parser.add_argument("file", help="a calibration of this machine")
    parser.add_argument("--devices", type=int, help="virtual CPU devices")
    parser.add_argument("--groups", type=int, default=1, help="groups of the mesh")
    asked = parser.parse_args()
    machine = jaxcomm.Machine.load(asked.file)
    if asked.devices:
        check.use_virtual_devices(asked.devices)
    load = os.getloadavg()[0]
    rows = checked(machine, asked.groups)
    if jax.process_index() != 0:
        return
    for row in rows:
        print(
            f"{row['collective']:12} {row['bytes']:>9} B  predicted "
            f"{1e6 * row['predicted']:9.1f} us  measured "
            f"{1e6 * row['measured']:9.1f} us  ratio {row['ratio']:5.2f}  "
            f"{'' if row['is_good'] else 'NOT within'}"
        )
    print(
        f"{jax.process_count()} processes, {jax.device_count()} devices, "
        f"{asked.groups} groups, load {load:.1f} before"
    )
    print("from 1 MiB on:", _summary(rows, 1 << 20, math.inf))
    print("below:        ", _summary(rows, 0, 1 << 20))


if __name__ == "__main__":
    main()
