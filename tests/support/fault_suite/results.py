"""What becomes of results: each rank's is read beside the others', and told."""

import contextlib
import threading

import jax
import numpy as np

from fault_suite import outcomes
from fault_suite.programs import RANKS


class Results:
    """Tells of a case what comes of the results in this process."""

    def __init__(self, case, say):
        self._case = case
        self._tell = say
        self._devices = jax.devices()[:RANKS]

    def join(self, what, array, expected):
        for reader in self.read(what, array, expected):
            reader.join()

    def read(self, what, array, expected):
        """Start to read each rank's result beside the others'; returns the threads."""
        readers = [
            threading.Thread(
                target=self._judge, args=(what, shard, expected[shard.index])
            )
            for shard in array.addressable_shards
        ]
        for reader in readers:
            reader.start()
        return readers

    def _judge(self, what, shard, expected):
        rank = self._devices.index(shard.device)
        try:
            found = np.asarray(shard.data)
        except Exception as error:
            self.row(what, rank, outcomes.RAISED, _text(error))
            return
        if self._case.fault == "spoilt" and rank == 0:
            found = found.copy()
            found.flat[-1] += 1
        self.row(what, rank, *outcomes.judge(found, expected))

    @contextlib.contextmanager
    def judging(self, *whats):
        """Say of a call that raises that all ranks of this process raised."""
        try:
            yield
        except Exception as error:
            for what in whats:
                for rank, device in enumerate(self._devices):
                    if device.process_index == jax.process_index():
                        self.row(what, rank, outcomes.RAISED, _text(error))

    def row(self, what, rank, outcome, text=""):
        self.say("row", what=what, rank=rank, outcome=outcome, text=text)

    def say(self, event, **what):
        self._tell({"event": event, "case": str(self._case), **what})


def _text(error):
    return f"{type(error).__name__}: {error}"
