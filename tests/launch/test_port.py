import socket

import ports
import pytest

from jaxcomm.launch import port


def bind(number):
    with socket.socket() as other:
        other.bind(("127.0.0.1", number))


def test_a_reserved_port_is_nobody_else_s_and_the_coordinator_s_to_serve_on():
    with port.reserved(0) as number, port.reserved(0) as another:
        assert number != another
        with pytest.raises(OSError, match="in use"):
            bind(number)
        with socket.socket() as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            server.bind(("127.0.0.1", number))
            server.listen()
            with socket.create_connection(("127.0.0.1", number)):
                connection, _ = server.accept()
                connection.close()


def test_a_port_in_use_is_refused_by_name(launch):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        number = server.getsockname()[1]
        status, out, err = launch("print('ran')", coordinator_port=number)
    assert (status, out) == (2, "")
    assert f"port {number} cannot be had: Address already in use" in err


@pytest.mark.parametrize("after", [0, 1])
def test_a_coordinator_that_host_0_cannot_serve_is_refused(after, launch, secret):
    """Its own port, or the next one."""
    told = {"elastic": True, "hosts": 2, "processes": 1, "secret": secret}
    number = ports.free(2)
    with socket.create_server(("127.0.0.1", number + after)):
        status, out, err = launch(
            "print('ran')", coordinator=f"127.0.0.1:{number}", **told
        )
    assert (status, out) == (2, "")
    taken = f"--coordinator: 127.0.0.1 port {number + after} cannot be had: Address"
    assert taken in err
