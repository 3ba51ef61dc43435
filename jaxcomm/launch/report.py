"""Who is to blame for a failure, said first; and who was slow in a run without one."""

import contextlib
import pathlib
import socket
import time
from collections.abc import Collection, Sequence

from jaxcomm.diagnostics import seen, still
from jaxcomm.diagnostics.files import merge_files
from jaxcomm.launch import records
from jaxcomm.launch.output import Output

# To read more at the end of a run that went well would take seconds.
_MOST_BYTES_WELL = 1 << 25
_ENDED_WELL = b'"reason": "exit", '
_BEGINNING_BYTES = 1024


class Report:
    """What is said of an attempt.

    Args:
      folder: of the flight records.
      processes: how many there are on all hosts.
      output: where it is said.

    Attributes:
      is_made: whether it was said who is to blame.
    """

    def __init__(self, folder: pathlib.Path, processes: int, output: Output):
        self.is_made = False
        self._folder = folder
        self._processes = processes
        self._output = output
        self._begin = records.now()

    def blame(
        self, found: Sequence[seen.Seen], idle: Collection[int] = frozenset()
    ) -> None:
        """Say who is to blame, and keep for the doctor what the launcher saw.

        Args:
          found: what the launcher saw of its processes.
          idle: those whose CPU time stands still. If any, all processes are described.
        """
        self.is_made = True
        path = seen.path_of(self._folder, socket.gethostname())
        try:
            seen.write(found, self._processes, time.time(), path)
            merged = merge_files(
                [
                    *records.of_run(self._folder, self._begin),
                    *records.rings_of_run(self._folder, self._begin),
                ]
            )
            lines = merged.report().splitlines()
            if idle:
                stacks = {each.process: merged.stacks(each.process) for each in found}
                lines = lines[:1] or [still.verdict(found, idle, stacks)]
                lines += still.lines(found, idle, stacks)
        except Exception as error:
            # The status of the run matters more, and a dying process may write half a
            # file.
            lines = [f"cannot read the flight records: {error!r}"]
        for line in lines:
            self._output.say(line)

    def name_the_slow(self) -> None:
        """Say for whom others waited long, in a run that went well."""
        paths = records.of_run(self._folder, self._begin)
        try:
            if sum(path.stat().st_size for path in paths) > _MOST_BYTES_WELL:
                return
            slow = merge_files(paths).suspect if paths else ""
        except Exception as error:
            slow = f"cannot read the flight records: {error!r}"
        if slow:
            self._output.say(slow)

    def drop_those_that_ended_well(self) -> None:
        """Delete records that processes wrote only since they came to their end."""
        for path in records.of_run(self._folder, self._begin):
            with contextlib.suppress(OSError), path.open("rb") as file:
                if _ENDED_WELL in file.read(_BEGINNING_BYTES):
                    path.unlink()
