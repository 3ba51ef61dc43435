"""How the launchers of several hosts tell each other which processes have ended.

The launcher of host 0 listens at the port after the coordinator's. All others connect
to it, and it passes on what they tell. A launcher that is killed closes its connection;
one whose host has stopped falls silent. Both lose all processes of that host. A
launcher whose options do not fit those of host 0 is refused, and the job ends. Who does
not know the secret of the job, or says what no launcher says, is not heard.
"""

import collections
import contextlib
import os
import selectors
import socket
import threading
import time
from typing import Any

from jaxcomm.launch import messages, port
from jaxcomm.launch.options import Options

_BEAT_SECONDS = 1.0
# Then survivors learn of a host that has stopped within five seconds.
_SILENT_SECONDS = 4.0
_LOOK_SECONDS = 0.1
# A launcher that reads nothing for so long is lost.
_SEND_SECONDS = 1.0
# That have connected and not proven yet who they are.
_MOST_STRANGERS = 64
_LARGEST_STATUS = 255


class _Peer:
    """A connection to another launcher.

    Attributes:
      host: its number; -1 until it has proven that it knows the secret.
      asked: the nonce that its proof is to be of.
      knows_us: whether it has got our proof.
    """

    def __init__(self, connection: socket.socket):
        connection.settimeout(_SEND_SECONDS)
        self.connection = connection
        self.host = -1
        self.asked = messages.nonce()
        self.since = self.heard = time.monotonic()
        self.is_done = False
        self.knows_us = False
        self._partial = b""

    def lines(self) -> list[bytes]:
        """Return the lines that have come whole.

        Raises:
          OSError: the connection has ended.
          MalformedError: a line is longer than any.
        """
        chunk = self.connection.recv(1 << 16)
        if not chunk:
            raise ConnectionResetError
        self.heard = time.monotonic()
        *whole, self._partial = (self._partial + chunk).split(b"\n")
        if len(self._partial) > messages.LONGEST_BYTES:
            raise messages.MalformedError
        return whole


class Link:
    """This launcher's connections. A thread serves them.

    Args:
      options: say which host this is, and where host 0 is.
      secret: of the job. Launchers with another one are not heard.

    Raises:
      PortTaken: host 0 cannot serve there.
    """

    def __init__(self, options: Options, secret: bytes):
        host, number = options.coordinator_address
        self._address = host, number + 1
        self._host = options.host
        self._shape = options.hosts, options.processes
        self._options = options
        self._secret = secret
        self._listener: socket.socket | None = None
        if self._host == 0:
            self._listener = port.bound(*self._address)
            self._listener.listen()
        # It holds a byte if there is news: a pipe of text would be full some day, and
        # the thread would wait in it with the lock that the reader needs.
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        self._lock = threading.RLock()
        # What follows requires _lock.
        self._peers: list[_Peer] = []
        self._said: list[tuple[Any, ...]] = []
        self._news: collections.deque[tuple[Any, ...]] = collections.deque()
        self._is_over = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name="jaxcomm-link", daemon=True
        )
        self._thread.start()

    def fileno(self) -> int:
        return self._read

    def tell(self, *words: Any) -> None:
        """Tell all other launchers, also those that connect later."""
        with self._lock:
            self._said.append(words)
            self._send(words)

    def take(self) -> list[tuple[Any, ...]]:
        """Return what others told since the last call, see :mod:`messages`."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._read, 1 << 16)
        with self._lock:
            taken, self._news = self._news, collections.deque()
        return list(taken)

    def are_others_done(self) -> bool:
        """Return whether no other launcher needs this one."""
        with self._lock:
            return all(peer.is_done for peer in self._peers if peer.host >= 0)

    def close(self) -> None:
        """Leave: this host's processes have ended."""
        with self._lock:
            self._send(("done",))
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
                    elif key.data in self._peers:
                        self._receive(key.data)
                now = time.monotonic()
                if now - beat >= _BEAT_SECONDS:
                    beat = now
                    self._send(("beat",))
                for peer in list(self._peers):
                    heard = peer.heard if peer.host >= 0 else peer.since
                    if now - heard > _SILENT_SECONDS and not peer.is_done:
                        self._lose(peer)

    def _connect(self):
        try:
            connection = socket.create_connection(self._address, _SEND_SECONDS)
        except OSError:
            # Host 0 may start later.
            self._is_over.wait(_LOOK_SECONDS)
            return
        with self._lock:
            self._peers.append(_Peer(connection))

    # All that follows requires _lock.

    def _accept(self):
        with contextlib.suppress(OSError):
            peer = _Peer(self._listener.accept()[0])  # pyright: ignore
            strangers = [other for other in self._peers if other.host < 0]
            for other in strangers[: len(strangers) + 1 - _MOST_STRANGERS]:
                self._lose(other)
            self._peers.append(peer)
            self._send(("challenge", peer.asked), [peer])

    def _receive(self, peer):
        try:
            for line in peer.lines():
                self._hear(peer, *messages.parse(line))
        except (OSError, messages.MalformedError):
            self._lose(peer)

    def _hear(self, peer, word, *rest):
        """Act on what a peer says.

        Raises:
          MalformedError: a launcher of that host does not say this, now or ever.
        """
        if peer.host < 0:
            answer = self._welcome if self._host == 0 else self._introduce
            answer(peer, word, *rest)
        elif word == "done":
            peer.is_done = True
        elif word in self._heard_from(peer.host) and self._is_in_range(
            peer.host, word, *rest
        ):
            if word != "beat":
                self._pass_on((word, *rest), peer)
        else:
            raise messages.MalformedError

    def _heard_from(self, host):
        of_all = "beat", "ended", "gave-up"
        return of_all if host else (*of_all, "lost", "refused")

    def _is_in_range(self, host, word, *rest):
        if word == "ended":
            of_host = self._options.of_host(host)
            known = of_host if host else range(self._options.total)
            return rest[0] in known and rest[1] <= _LARGEST_STATUS
        if word == "gave-up":
            return rest[0] < self._options.total
        return word != "lost" or 0 < rest[0] < self._options.hosts

    def _introduce(self, peer, word, *rest):
        """Prove to host 0 that this launcher knows the secret, and have it prove so."""
        if word == "challenge":
            said = self._host, *self._shape, peer.asked
            proof = messages.code(self._secret, "host", rest[0], *said)
            self._send(("host", *said, proof), [peer])
            peer.knows_us = True
        elif word == "welcome" and messages.is_code(
            rest[0], self._secret, "welcome", peer.asked
        ):
            peer.host = 0
            for words in self._said:
                self._send(words, [peer])
        else:
            raise messages.MalformedError

    def _welcome(self, peer, word, *rest):
        if word != "host":
            raise messages.MalformedError
        host, *shape, asked, proof = rest
        said = "host", peer.asked, host, *shape, asked
        if not messages.is_code(proof, self._secret, *said):
            raise messages.MalformedError
        self._send(("welcome", messages.code(self._secret, "welcome", asked)), [peer])
        for words in self._said:
            self._send(words, [peer])
        if tuple(shape) != self._shape:
            ours, theirs = map("--hosts {0[0]} -n {0[1]}".format, (self._shape, shape))
            why = f"host {host} was started with {theirs}, and host 0 with {ours}"
        elif host in (0, *(other.host for other in self._peers)):
            why = f"two launchers were started with --host {host}"
        else:
            peer.host = host
            return
        self._pass_on(("refused", why), None)
        self._send(("refused", why), [peer])

    def _pass_on(self, words, source):
        self._tell_launcher(words)
        if self._host == 0:
            self._said.append(words)
            self._send(words, source=source)

    def _tell_launcher(self, words):
        self._news.append(words)
        if len(self._news) == 1:
            os.write(self._write, b"!")

    def _lose(self, peer):
        if peer not in self._peers:
            return
        self._peers.remove(peer)
        peer.connection.close()
        if peer.host >= 0:
            if not peer.is_done:
                self._pass_on(("lost", peer.host), peer)
        elif self._host and peer.knows_us:
            why = "host 0 has another --secret, or another version of jaxcomm"
            self._tell_launcher(("refused", why))
            self._is_over.set()

    def _send(self, words, peers=None, source=None):
        """Say something to some peers, or to all that are known but its source."""
        if peers is None:
            peers = [p for p in self._peers if p.host >= 0 and p is not source]
        for peer in peers:
            try:
                peer.connection.sendall(messages.compose(*words))
            except OSError:
                self._lose(peer)
