"""``python -m bench.planning [FILE]``: how far predictions are from what is measured.

FILE is a calibration of this machine (``python -m jaxcomm.doctor --calibrate FILE``).
Without it the sizes of a calibration are measured in turns with those to predict: then
what others do on the machine meanwhile slows both alike. In several processes, started
by ``python -m jaxcomm.launch``, every process takes part and the first prints.
"""

import argparse
import dataclasses
import math
import os
import statistics
from collections.abc import Sequence

import jax
from jax.sharding import AxisType

import jaxcomm
from jaxcomm.doctor import calibrate, check, in_turns
from jaxcomm.planning import MACHINES, Sample

# Bytes of an operand: those to predict, and those of a calibration.
SIZES = 1 << 10, 48 << 10, 512 << 10, 3 << 19, 3 << 20, 6 << 20
KNOWN = calibrate.SIZES
# Bytes of all results together, and of one: see the calibration's.
_MOST_BYTES, _MAPPED_BYTES = 256 << 20, 32 << 20
# The record holds that many operations of 8 ranks, of all sizes.
_ROUNDS = 6
# A few slow rounds must not move a median, so programs run so many times.
_PASSES = 5
_OF = {
    "psum": lambda x: jaxcomm.psum(x, "i"),
    "all_gather": lambda x: jaxcomm.all_gather(x, "i"),
    "psum_scatter": lambda x: jaxcomm.psum_scatter(x, "i", tiled=True),
    "all_to_all": lambda x: jaxcomm.all_to_all(x, "i", 0, 0, tiled=True),
    "ring_shift": lambda x: jaxcomm.ring_shift(x, "i"),
    "pbroadcast": lambda x: jaxcomm.pbroadcast(x, "i", 0),
}


@dataclasses.dataclass(frozen=True)
class Row:
    """One collective at one size.

    Attributes:
      name: of the collective.
      bytes: of a rank's operand.
      predicted, measured: seconds.
    """

    name: str
    bytes: int
    predicted: float
    measured: float

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.predicted / self.measured

    @property
    def is_good(self) -> bool:
        """Whether the ratio is within the bounds of ``Plan.check``."""
        low, high = (0.8, 1.25) if self.bytes >= 1 << 20 else (0.5, 2.0)
        return low <= self.ratio <= high


def rows(
    machine: jaxcomm.Machine | None,
    groups: int,
    rounds: int = _ROUNDS,
    passes: int = _PASSES,
):
    """Run every collective at every size; yield predicted beside measured."""
    size = jax.device_count() // groups
    auto = (AxisType.Auto,) * 2
    mesh = jax.make_mesh((groups, size), ("groups", "i"), axis_types=auto)
    for name, function in _OF.items():
        results = size if name == "all_gather" else 1
        fits = [
            n
            for n in (*SIZES, *KNOWN)
            if mesh.size * results * n <= _MOST_BYTES and results * n < _MAPPED_BYTES
        ]
        timer = in_turns.InTurns(mesh, function, fits)
        took = [timer.measure(rounds) for _ in range(passes)]
        jaxcomm.finalize()
        found = {
            each: statistics.median(s for times in took for s in times.seconds[each])
            for each in fits
        }
        of = machine
        if of is None:
            samples = tuple(
                Sample(
                    *(took[0].collective, took[0].transport, size, mesh.size),
                    *(each, found[each]),
                )
                for each in KNOWN
                if each in found
            )
            table = MACHINES["cpu" if took[0].transport != "nccl" else "gpu"]
            of = dataclasses.replace(table, samples=samples)
        for each in SIZES:
            if each in found:
                x = jax.ShapeDtypeStruct((each // 4,), "float32")
                plan = jaxcomm.plan(mesh, function, x, machine=of)
                (row,) = plan.calls
                # None between no two sizes of the calibration.
                if row.seconds is not None:
                    yield Row(name, each, row.seconds, found[each])


def summary(found: Sequence[Row], least: float, below: float) -> str:
    """Return how good the rows of some sizes are, in a line."""
    ratios = sorted(row.ratio for row in found if least <= row.bytes < below)
    good = sum(row.is_good for row in found if least <= row.bytes < below)
    return (
        f"{len(ratios)} cases, predicted / measured: median "
        f"{statistics.median(ratios):.2f}, {ratios[0]:.2f} to {ratios[-1]:.2f}; "
        f"{good} within the bounds"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.planning")
    parser.add_argument("file", nargs="?", help="a calibration of this machine")
    parser.add_argument("--devices", type=int, help="virtual CPU devices")
    parser.add_argument("--groups", type=int, default=1, help="groups of the mesh")
    asked = parser.parse_args()
    machine = jaxcomm.Machine.load(asked.file) if asked.file else None
    if asked.devices:
        check.use_virtual_devices(asked.devices)
    load = os.getloadavg()[0]
    found = list(rows(machine, asked.groups))
    if jax.process_index() != 0:
        return
    for row in found:
        print(
            f"{row.name:12} {row.bytes:>9} B  predicted {1e6 * row.predicted:9.1f} us  "
            f"measured {1e6 * row.measured:9.1f} us  ratio {row.ratio:5.2f}"
            f"{'' if row.is_good else '  not within'}"
        )
    print(
        f"{jax.process_count()} processes, {jax.device_count()} devices, "
        f"{asked.groups} groups, load {load:.1f} before, "
        f"{'calibrated in turns' if machine is None else machine.source}"
    )
    print("from 1 MiB on:", summary(found, 1 << 20, math.inf))
    print("below:        ", summary(found, 0, 1 << 20))


if __name__ == "__main__":
    main()
