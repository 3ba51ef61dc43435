"""What launchers of several hosts tell each other, over real connections."""

import contextlib
import os
import pathlib
import socket

import hostile
import ports
import pytest
import waiting

from jaxcomm.launch import link, messages
from jaxcomm.launch.options import Options

SECRET = b"known to launchers"


@pytest.fixture
def address():
    return f"127.0.0.1:{ports.free(2)}"


@pytest.fixture
def start(address):
    """Gives ``start(host)``: the link of a launcher; closes it, and all that it has."""
    made, before = [], os.listdir("/proc/self/fd")

    def start_one(host, hosts=3):
        options = Options(2, "x", hosts=hosts, host=host, coordinator=address)
        made.append(link.Link(options, SECRET))
        return made[-1]

    yield start_one
    for each in reversed(made):
        each.close()
    assert os.listdir("/proc/self/fd") == before


@pytest.fixture
def launcher(address):
    """Gives ``launcher(host)``: the connection of a launcher that says no more."""
    with contextlib.ExitStack() as stack:

        def connect(host, processes=2, secret=SECRET, hosts=3):
            name, _, port = address.rpartition(":")
            made = stack.enter_context(socket.create_connection((name, int(port) + 1)))
            lines = stack.enter_context(made.makefile("rb"))
            word, asked = messages.parse(lines.readline().rstrip())
            assert word == "challenge"
            said = host, hosts, processes, messages.nonce()
            proof = messages.code(secret, "host", asked, *said)
            made.sendall(messages.compose("host", *said, proof))
            return made, lines

        yield connect


def hears(one, *lines):
    found = []
    waiting.until(lambda: found.extend(one.take()) or len(found) >= len(lines), lines)
    assert found == [*lines]


def test_all_hear_of_an_end_also_who_comes_later(start):
    first, second = start(0), start(1)
    second.tell("ended", 2, 137)
    hears(first, ("ended", 2, 137))
    hears(start(2), ("ended", 2, 137))
    first.tell("ended", 0, 1)
    hears(second, ("ended", 0, 1))


def test_a_connection_that_ends_loses_its_host_unless_it_was_done(start, launcher):
    first, third = start(0), start(2)
    in_order, _ = launcher(1)
    in_order.sendall(b"done\n")
    in_order.shutdown(socket.SHUT_RDWR)
    killed, _ = launcher(1)
    killed.shutdown(socket.SHUT_RDWR)
    hears(first, ("lost", 1))
    hears(third, ("lost", 1))


def test_launchers_that_do_not_fit_together_are_refused_and_all_hear_it(
    start, launcher
):
    first, second = start(0), start(1)
    first.tell("ended", 0, 0)
    hears(second, ("ended", 0, 0))
    why = "host 2 was started with --hosts 3 -n 4, and host 0 with --hosts 3 -n 2"
    _, lines = launcher(2, processes=4)
    hears(first, ("refused", why))
    hears(second, ("refused", why))
    assert any(why in line.decode() for line in lines)
    launcher(1)
    hears(first, ("refused", "two launchers were started with --host 1"))


def test_a_host_that_is_silent_is_lost(start, launcher, monkeypatch):
    clock = waiting.Clock()
    monkeypatch.setattr(link, "time", clock)
    first = start(0)
    silent, _ = launcher(1)
    silent.sendall(b"ended 2 0\n")
    hears(first, ("ended", 2, 0))
    clock.advance(5)
    hears(first, ("lost", 1))


def test_host_0_knows_whether_others_need_it(start, launcher):
    first = start(0)
    assert first.are_others_done()
    other, _ = launcher(1)
    waiting.until(lambda: not first.are_others_done())
    other.sendall(b"done\n")
    waiting.until(first.are_others_done)


def closes(connection):
    """Whether the other end closes a connection, whatever it says before."""
    connection.settimeout(waiting.HANG_SECONDS)
    with contextlib.suppress(ConnectionResetError):
        while connection.recv(1 << 16):
            pass
    return True


STRANGE = [
    *(b"ended 2 137\n", b"lost 1\n", b"refused a\n", b"gave-up 0\n", b"done\n"),
    *(b"host 1 3 2\n", b"host " + b"9" * 6000 + b" 3 2\n", b"\xff\xfe\x00\n", b"\n"),
    *(b"GET / HTTP/1.1\r\n", b"beat\n" * 3, b"a" * 70_000),
]
# From a host that has proven itself: of another form, or not its to say.
OUT_OF_PLACE = [
    *(b"ended x y\n", b"ended\n", b"ended 0 1\n", b"ended 6 1\n", b"ended 2 999\n"),
    *(b"ended 2 137\r\n", "ended 2 137\u2028x\n".encode(), b"gave-up 6\n"),
    *(b"lost 1\n", b"lost -5\n", b"lost x\n", b"refused a\n", b"welcome x\n"),
    *(b"host 1 3 2\n", b"ended 2 " + b"1" * 6000 + b"\n", b"a" * 70_000),
]


def test_strangers_are_not_heard_and_disturb_nobody(start, launcher, address):
    first, second = start(0), start(1)
    first.tell("ended", 0, 0)
    hears(second, ("ended", 0, 0))
    name, _, port = address.rpartition(":")
    for said in STRANGE:
        with socket.create_connection((name, int(port) + 1)) as stranger:
            stranger.sendall(said)
            assert closes(stranger), said
    ignorant, lines = launcher(2, secret=b"another secret than theirs")
    assert closes(ignorant)
    assert lines.read() == b""
    # What they said comes before what is said now.
    second.tell("ended", 2, 137)
    hears(first, ("ended", 2, 137))
    assert first.are_others_done() is False


def test_a_host_that_says_what_no_launcher_says_is_lost(start, launcher):
    first = start(0)
    for said in OUT_OF_PLACE:
        known, lines = launcher(1)
        assert lines.readline().startswith(b"welcome ")
        known.sendall(said)
        hears(first, ("lost", 1))


def test_no_answer_of_host_0_serves_another_connection(start, launcher):
    """What one connection proves is of its own challenge."""
    first = start(0)
    seen, _ = launcher(1)
    waiting.until(lambda: not first.are_others_done())
    with socket.create_connection(seen.getpeername()) as replay:
        said = 2, 3, 2, "0" * 32
        replay.sendall(
            messages.compose("host", *said, messages.code(SECRET, "host", "x", *said))
        )
        assert closes(replay)
    seen.sendall(b"ended 2 0\n")
    hears(first, ("ended", 2, 0))


def test_a_launcher_with_another_secret_learns_why(start, address, monkeypatch):
    start(0)
    options = Options(2, "x", hosts=3, host=1, coordinator=address)
    other = link.Link(options, b"another secret than theirs")
    try:
        why = "host 0 has another --secret, or another version of jaxcomm"
        hears(other, ("refused", why))
    finally:
        other.close()


def test_ends_of_thousands_of_processes_block_nobody(start, launcher):
    """The launcher that hears them may be busy, and has something to tell itself."""
    first = start(0, hosts=4096)
    other, lines = launcher(4095, hosts=4096)
    assert lines.readline().startswith(b"welcome ")
    ends = [("ended", 8190 + i % 2, i // 2 % 256) for i in range(70_000)]
    other.sendall(b"".join(messages.compose(*end) for end in ends))
    # All have come, and none was taken.
    waiting.until(lambda: len(first._news) == len(ends))
    first.tell("ended", 0, 0)
    assert first.are_others_done() is False
    hears(first, *ends)
    assert first.take() == []


def test_lines_are_taken_or_refused_by_their_form(pytestconfig):
    proof = messages.code(SECRET, "x")
    lines = [
        messages.compose("challenge", messages.nonce()),
        messages.compose("host", 1, 3, 2, messages.nonce(), proof),
        messages.compose("welcome", proof),
        *(b"beat\n", b"done\n", b"ended 2 137\n", b"lost 1\n", b"gave-up 3\n"),
        messages.compose("refused", "host 2 was started with --hosts 3 -n 4"),
    ]

    def parse(line):
        parsed = messages.parse(line)
        assert messages.compose(*parsed).split() == line.split()

    lines = [line.rstrip() for line in lines]
    number = hostile.count(pytestconfig)
    found = hostile.refused_cleanly(parse, lines, messages.MalformedError, number)
    assert found["taken"]


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda path: path.chmod(0o640), "others may read or write"),
        (lambda path: path.write_text("short"), "holds 5 bytes. Give it 16 to 4096"),
        (lambda path: path.write_bytes(b"a" * 5000), "holds 4097 bytes"),
        (
            lambda path: (path.unlink(), os.mkfifo(path, 0o600)),
            "it is not a regular file",
        ),
        (lambda path: (path.unlink(), path.mkdir(0o700)), "it is not a regular file"),
        (lambda path: path.unlink(), "cannot be read: No such file"),
    ],
)
def test_a_secret_that_others_may_know_is_refused(spoil, said, secret, launch):
    assert messages.read_secret(secret) == b"a secret of tests"
    spoil(pathlib.Path(secret))
    told = {"elastic": True, "hosts": 2, "processes": 1, "secret": secret}
    status, out, err = launch("x", coordinator=f"127.0.0.1:{ports.free(2)}", **told)
    assert (status, out) == (2, "")
    assert "--secret: " in err
    assert said in err
