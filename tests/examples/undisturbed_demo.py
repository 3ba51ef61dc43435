"""The demo's steps over fewer and fewer processes, none of which is killed.

Usage: undisturbed_demo.py STEPS (STEP ROWS)...: from each step on with so many rows, by
the first processes, each with the devices of a row.
"""

import dataclasses
import pathlib
import sys

import jax
import numpy as np

from language_model import data, processes, training
from language_model.settings import Settings
from language_model.step import AXES

steps, *numbers = map(int, sys.argv[1 : sys.argv.index("--")])
points = list(zip(numbers[::2], numbers[1::2], strict=True))
settings = Settings(
    data=jax.process_count(), context=2, sequence=61, layers=1, width=16, steps=steps,
    text=pathlib.Path("text.txt"), output=pathlib.Path("none"),
)  # fmt: skip
text = data.load(settings.text, settings.sequence)


def make_mesh(rows, context, backend):
    devices = [d for d in jax.devices() if d.process_index < rows]
    automatic = (jax.sharding.AxisType.Auto,) * 2
    return jax.make_mesh((rows, context), AXES, automatic, devices=devices)


training.make_mesh = make_mesh
run = training.Training(settings, text)
for step, rows in [*points, (steps, 0)]:
    while len(run.losses) < step:
        run.advance()
    if jax.process_index() >= rows:
        break
    smaller = training.Training(dataclasses.replace(settings, data=rows), text)
    state = jax.tree.map(lambda x: np.asarray(x.addressable_shards[0].data), run.state)
    smaller.state = processes.put(state, smaller._program.replicated)
    smaller.losses = run.losses
    run = smaller
if jax.process_index() == 0:
    print("losses", *(loss.hex() for loss in run.losses), flush=True)
