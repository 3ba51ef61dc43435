"""Tells the processes of an elastic job which of them have ended, on any host.

They read it in a file, whose lines are a process and its status: a process sees others
end on its own host alone.
"""

import pathlib
import time

from jaxcomm.launch import messages
from jaxcomm.launch.link import Link
from jaxcomm.launch.options import Options
from jaxcomm.launch.output import Output

# For processes: see jaxcomm.config.
VARIABLE = "JAXCOMM_ENDED"
# Of a process whose host was lost, as if it had been killed.
_LOST = 137
_LOOK_SECONDS = 0.05


class Ends:
    """The ends of a job's processes; to be entered.

    Attributes:
      is_of_many_hosts: whether processes of other hosts are among them.
      variables: of the environment of processes.
      is_cut_off: whether host 0 was lost, and with it the store of the job.
      refusal: why the launchers of the hosts do not fit together; "" if they do.

    Args:
      options: what was asked for.
      output: for messages.
      folder: of the run, for the file.
    """

    def __init__(self, options: Options, output: Output, folder: pathlib.Path):
        self.is_of_many_hosts = options.hosts > 1
        self.is_cut_off = False
        self.refusal = ""
        self.variables: dict[str, str] = {}
        self._options = options
        self._folder = folder
        self._output = output
        self._told: set[int] = set()
        self._link: Link | None = None

    def __enter__(self):
        if self.is_of_many_hosts:
            secret = messages.read_secret(self._options.secret)
            self._link = Link(self._options, secret)
        if self._options.elastic:
            path = self._folder / "ended"
            path.write_bytes(b"")  # Of this attempt.
            self.variables[VARIABLE] = str(path)
        return self

    def __exit__(self, *exception):
        if self._link is not None:
            self._link.close()

    def fileno(self) -> int:
        assert self._link is not None
        return self._link.fileno()

    def tell(self, number: int, status: int) -> None:
        """Tell all processes, of all hosts, that one of this host has ended."""
        self._write(number, status)
        if self._link is not None:
            self._link.tell("ended", number, status)

    def tell_given_up(self, number: int) -> None:
        """Tell the launchers of other hosts that one of them has to end a process."""
        if self._link is not None:
            self._link.tell("gave-up", number)

    def take(self) -> tuple[list[tuple[int, int, str]], list[int]]:
        """Return what other hosts told since the last call.

        Returns:
          Ends: process, status, how. "" says no more of how than the status. And the
          processes that others gave up.
        """
        assert self._link is not None
        found, given_up = [], []
        for word, *rest in self._link.take():
            if word == "ended":
                found.append((*rest, ""))
            elif word == "gave-up":
                given_up += rest
            elif word == "refused":
                self.refusal = rest[0]
            elif word == "lost":
                host = rest[0]
                self.is_cut_off = self.is_cut_off or host == 0
                how = f"was lost with host {host}"
                of_host = self._options.of_host(host)
                found += [(number, _LOST, how) for number in of_host]
        found = [end for end in found if end[0] not in self._told]
        for number, status, _ in found:
            self._write(number, status)
        return found, given_up

    def wait_for_others(self, is_over) -> None:
        """Serve other hosts until they are done, or ``is_over()``."""
        if self._link is None or self._options.host:
            return
        if not self._link.are_others_done():
            self._output.say("waiting for the processes of other hosts")
        while not (self._link.are_others_done() or is_over()):
            time.sleep(_LOOK_SECONDS)

    def _write(self, number, status):
        self._told.add(number)
        if self.variables:
            with open(self.variables[VARIABLE], "a") as file:
                file.write(f"{number} {status}\n")
