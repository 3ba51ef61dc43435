"""``python -m bench gpu``: NCCL on the GPUs of a process, checked and timed."""
