"""What launchers of several hosts tell each other, over real connections."""

import contextlib
import socket

import ports
import pytest
import waiting

from jaxcomm.launch import link
from jaxcomm.launch.options import Options


@pytest.fixture
def address():
    return f"127.0.0.1:{ports.free(2)}"


@pytest.fixture
def start(address):
    """Gives ``start(host)``: the link of a launcher; closes it."""
    made = []

    def start_one(host):
        made.append(link.Link(Options(2, "x", hosts=3, host=host, coordinator=address)))
        return made[-1]

    yield start_one
    for each in reversed(made):
        each.close()


@pytest.fixture
def launcher(address):
    """Gives ``launcher(host)``: the connection of a launcher that says no more."""
    with contextlib.ExitStack() as stack:

        def connect(host, processes=2):
            name, _, port = address.rpartition(":")
            made = stack.enter_context(socket.create_connection((name, int(port) + 1)))
            made.sendall(f"host {host} 3 {processes}\n".encode())
            return made

        yield connect


def hears(one, *lines):
    found = []
    waiting.until(lambda: found.extend(one.take()) or len(found) >= len(lines), lines)
    assert found == [*lines]


def test_all_hear_of_an_end_also_who_comes_later(start):
    first, second = start(0), start(1)
    second.tell("ended 2 137")
    hears(first, "ended 2 137")
    hears(start(2), "ended 2 137")
    first.tell("ended 0 1")
    hears(second, "ended 0 1")


def test_a_connection_that_ends_loses_its_host_unless_it_was_done(start, launcher):
    first, third = start(0), start(2)
    in_order, killed = launcher(1), launcher(5)
    in_order.sendall(b"done\n")
    in_order.close()
    killed.close()
    hears(first, "lost 5")
    hears(third, "lost 5")


def test_launchers_that_do_not_fit_together_are_refused_and_all_hear_it(
    start, launcher
):
    first, second = start(0), start(1)
    first.tell("ended 0 0")
    hears(second, "ended 0 0")
    text = "refused host 2 was started with --hosts 3 -n 4, and host 0 with --hosts 3"
    other = launcher(2, processes=4)
    hears(first, f"{text} -n 2")
    hears(second, f"{text} -n 2")
    assert any(text in line for line in other.makefile())
    launcher(1)
    hears(first, "refused two launchers were started with --host 1")


def test_a_host_that_is_silent_is_lost(start, launcher, monkeypatch):
    clock = waiting.Clock()
    monkeypatch.setattr(link, "time", clock)
    first = start(0)
    silent = launcher(1)
    silent.sendall(b"ended 2 0\n")
    hears(first, "ended 2 0")
    clock.advance(5)
    hears(first, "lost 1")


def test_host_0_knows_whether_others_need_it(start, launcher):
    first = start(0)
    assert first.are_others_done()
    other = launcher(1)
    waiting.until(lambda: not first.are_others_done())
    other.sendall(b"done\n")
    waiting.until(first.are_others_done)
