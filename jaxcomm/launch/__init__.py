"""Start a program as several JAX processes: ``python -m jaxcomm.launch --help``."""
