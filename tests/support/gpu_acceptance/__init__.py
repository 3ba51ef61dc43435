"""Whether jaxcomm over NCCL is right and steady: rows that say so, part by part.

``tests/gpu`` runs the parts on GPUs, and over the stand-in on CPU devices.
"""

from gpu_acceptance import checks, lengths, soak, steady

PARTS = {
    "checks": checks.rows,
    "lengths": lengths.rows,
    "soak": soak.rows,
    "steady": steady.rows,
}
