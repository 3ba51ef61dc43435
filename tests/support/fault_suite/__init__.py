"""Faults injected into real programs, over GPUs or over the stand-in for NCCL."""
