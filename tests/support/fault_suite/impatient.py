"""Communicators whose operations time out soon, for operations that never end."""

import waiting

import jaxcomm


def init(mesh, **how):
    """Call ``jaxcomm.init`` with a timeout of ``waiting.EXPIRES_SECONDS``.

    That bounds the creation, too, and a process may be stopped meanwhile. So this
    creates them again until they are there in time.
    """

    def made():
        try:
            return jaxcomm.init(mesh, timeout=waiting.EXPIRES_SECONDS, **how)
        except jaxcomm.CommunicatorError as error:
            if "not done after" not in str(error):
                raise
            jaxcomm.finalize()
            return None

    return waiting.until(made, "communicators that are made in time")
