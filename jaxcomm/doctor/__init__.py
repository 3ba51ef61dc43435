"""``python -m jaxcomm.doctor``: what jaxcomm finds on this machine."""
