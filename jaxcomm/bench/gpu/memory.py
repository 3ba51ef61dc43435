"""What communicators cost on a device."""

from collections.abc import Iterator

import jaxcomm
from jaxcomm.bench import units
from jaxcomm.bench.gpu.rows import Finding
from jaxcomm.bench.gpu.timer import Timer

COUNTS = 1, 2, 4, 8


def rows(timer: Timer) -> Iterator[Finding]:
    """Yields bytes of one device for communicators that share and that do not.

    The communicators are lanes over the same axis.
    """
    for shares in (True, False):
        for count in COUNTS:
            jaxcomm.finalize()
            policy = jaxcomm.CommPolicy(share=shares, lanes=count)
            lanes = [f"lane {n}" for n in range(count)]
            jaxcomm.init(timer.mesh, "i", lanes=lanes, policy=policy)
            report = jaxcomm.memory_report()
            here = len(timer.mesh.local_devices)
            each = sum(row.device_bytes for row in report) / here / count
            parent = report[0].parent_bytes / here
            kind = "sharing" if shares else "with resources of their own"
            yield timer.finding(
                f"lanes {kind}, {count} of them, on a device",
                f"{units.size(int(each))} each, {units.size(int(parent))} the mesh's",
                each_bytes=each,
                parent_bytes=parent,
            )
