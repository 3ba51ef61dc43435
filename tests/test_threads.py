"""C7: threads of one process."""

import sys
import threading

import jaxcomm


def test_threads_that_make_the_same_communicators_make_each_once(make_mesh):
    """C7: look-up and creation are one step."""
    mesh = make_mesh(i=4)
    before = jaxcomm.counters().created
    failures, start = [], threading.Barrier(4)

    def work():
        try:
            for turn in range(60):
                start.wait(60)
                jaxcomm.init(mesh, "i", lanes=f"lane {turn}")
                jaxcomm.counters(), str(jaxcomm.communicators())
        except BaseException as error:
            failures.append(error)
            start.abort()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(interval)
    assert failures == []
    assert jaxcomm.counters().created - before == 60
