"""Measure jaxcomm against jax.lax: ``python -m bench --help``."""
