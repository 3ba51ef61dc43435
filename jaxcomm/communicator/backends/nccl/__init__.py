"""The backend for NVIDIA GPUs: where NCCL is, how its communicators are made."""
