"""Attention over a sequence that is split across a ring of devices."""
