"""``python -m jaxcomm.demo``: train a small language model over a ring of devices."""
