"""What communicators cost on a device."""

import jaxcomm


def rows(mesh, counts=(1, 2, 4, 8)):
    """Yields (communicators, whether they share, MiB of each, MiB of the mesh's own).

    MiB are those of one device. The communicators are lanes over the same axis.
    """
    for shares in (True, False):
        for count in counts:
            jaxcomm.finalize()
            policy = jaxcomm.CommPolicy(share=shares, lanes=count)
            lanes = [f"lane {n}" for n in range(count)]
            jaxcomm.init(mesh, "i", lanes=lanes, policy=policy)
            report = jaxcomm.memory_report()
            unit = (1 << 20) * mesh.size
            mine = sum(row.device_bytes for row in report)
            yield count, shares, mine / unit / count, report[0].parent_bytes / unit
    jaxcomm.finalize()
