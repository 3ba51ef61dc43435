"""Measure jaxcomm against jax.lax: ``python -m jaxcomm.bench --help``."""
