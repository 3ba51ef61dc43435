"""How the launchers of several hosts tell each other which processes have ended.

The launcher of host 0 listens at the port after the coordinator's. All others connect
to it, and it passes on what they tell. A launcher that is killed closes its connection;
one whose host has stopped falls silent. Both lose all processes of that host. A
launcher whose options do not fit those of host 0 is refused, and the job ends.
"""

import contextlib
import os
import re
import selectors
import socket
import threading
import time

from jaxcomm.launch import port
from jaxcomm.launch.options import Options

_BEAT_SECONDS = 1.0
# Then survivors learn of a host that has stopped within five seconds.
_SILENT_SECONDS = 4.0
_LOOK_SECONDS = 0.1
# A launcher that reads nothing for so long is lost.
_SEND_SECONDS = 1.0


class _Peer:
    """A connection to another launcher; ``host`` is -1 until it has said which."""

    def __init__(self, connection: socket.socket, host: int):
        connection.settimeout(_SEND_SECONDS)
        self.connection = connection
        self.host = host
        self.heard = time.monotonic()
        self.is_done = False
        self._partial = b""

    def lines(self) -> list[str]:
        """Return the lines that have come whole.

        Raises:
          OSError: the connection has ended.
        """
        chunk = self.connection.recv(1 << 16)
        if not chunk:
            raise ConnectionResetError
        self.heard = time.monotonic()
        *whole, self._partial = (self._partial + chunk).split(b"\n")
        return [line.decode(errors="replace") for line in whole]


class Link:
    """This launcher's connections. A thread serves them.

    Args:
      options: say which host this is, and where host 0 is.

    Raises:
      PortTaken: host 0 cannot serve there.
    """

    def __init__(self, options: Options):
        host, number = options.coordinator_address
        self._address = host, number + 1
        self._host = options.host
        self._shape = options.hosts, options.processes
        self._listener: socket.socket | None = None
        if self._host == 0:
            self._listener = port.bound(*self._address)
            self._listener.listen()
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        self._lock = threading.RLock()
        # What follows requires _lock.
        self._peers: list[_Peer] = []
        self._said: list[str] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name="jaxcomm-link", daemon=True
        )
        self._thread.start()

    def fileno(self) -> int:
        return self._read

    def tell(self, line: str) -> None:
        """Tell all other launchers, also those that connect later."""
        with self._lock:
            self._said.append(line)
            self._send(line)

    def take(self) -> list[str]:
        """Return what others told since the last call.

        Also ``lost <host>``, and ``refused <why>`` if options do not fit together.
        """
        try:
            return os.read(self._read, 1 << 16).decode().splitlines()
        except BlockingIOError:
            return []

    def are_others_done(self) -> bool:
        """Return whether no other launcher needs this one."""
        with self._lock:
            return all(peer.is_done for peer in self._peers)

    def close(self) -> None:
        """Leave: this host's processes have ended."""
        with self._lock:
            self._send("done")
        self._is_over.set()
        self._thread.join()
        with self._lock:
            for peer in self._peers:
                peer.connection.close()
        if self._listener is not None:
            self._listener.close()
        os.close(self._read)
        os.close(self._write)

    def _run(self):
        beat = time.monotonic()
        while not self._is_over.is_set():
            if self._host and not self._peers:
                self._connect()
            with selectors.DefaultSelector() as selector:
                if self._listener is not None:
                    selector.register(self._listener, selectors.EVENT_READ, None)
                for peer in self._peers:
                    selector.register(peer.connection, selectors.EVENT_READ, peer)
                ready = selector.select(_LOOK_SECONDS)
            with self._lock:
                for key, _ in ready:
                    if key.data is None:
                        self._accept()
                    else:
                        self._receive(key.data)
                now = time.monotonic()
                if now - beat >= _BEAT_SECONDS:
                    beat = now
                    self._send("beat")
                for peer in list(self._peers):
                    if now - peer.heard > _SILENT_SECONDS and not peer.is_done:
                        self._lose(peer)

    def _connect(self):
        try:
            connection = socket.create_connection(self._address, _SEND_SECONDS)
        except OSError:
            # Host 0 may start later.
            self._is_over.wait(_LOOK_SECONDS)
            return
        with self._lock:
            self._peers.append(_Peer(connection, 0))
            self._send("host {} {} {}".format(self._host, *self._shape))
            for line in self._said:
                self._send(line)

    # All that follows requires _lock.

    def _accept(self):
        with contextlib.suppress(OSError):
            peer = _Peer(self._listener.accept()[0], -1)  # pyright: ignore
            self._peers.append(peer)
            for line in self._said:
                self._send(line, [peer])

    def _receive(self, peer):
        try:
            lines = peer.lines()
        except OSError:
            self._lose(peer)
            return
        for line in lines:
            word, _, rest = line.partition(" ")
            if word == "host":
                self._welcome(peer, rest)
            elif word == "done":
                peer.is_done = True
            elif word in ("ended", "lost", "refused"):
                self._pass_on(line, peer)

    def _welcome(self, peer, said):
        form = re.fullmatch(r"(\d+) (\d+) (\d+)", said)
        if form is None:
            return
        host, *shape = map(int, form.groups())
        if tuple(shape) != self._shape:
            ours, theirs = map("--hosts {0[0]} -n {0[1]}".format, (self._shape, shape))
            why = f"host {host} was started with {theirs}, and host 0 with {ours}"
        elif host in (0, *(other.host for other in self._peers)):
            why = f"two launchers were started with --host {host}"
        else:
            peer.host = host
            return
        self._pass_on(f"refused {why}", None)

    def _pass_on(self, line, source):
        os.write(self._write, f"{line}\n".encode())
        if self._host == 0:
            self._said.append(line)
            self._send(line, [peer for peer in self._peers if peer is not source])

    def _lose(self, peer):
        with contextlib.suppress(ValueError):
            self._peers.remove(peer)
        peer.connection.close()
        if not peer.is_done and peer.host >= 0:
            self._pass_on(f"lost {peer.host}", peer)

    def _send(self, line, peers=None):
        for peer in list(self._peers if peers is None else peers):
            try:
                peer.connection.sendall(f"{line}\n".encode())
            except OSError:
                self._lose(peer)
