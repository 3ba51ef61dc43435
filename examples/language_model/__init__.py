"""``python -m language_model``: train a small language model over a ring of devices."""
