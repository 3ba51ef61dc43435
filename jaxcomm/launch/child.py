"""What each process runs first: it joins the others, then becomes the user's program.

Started by path, not as a module: importing jaxcomm imports jax, which must not happen
before the program has had its say in ``os.environ``. For the same reason only the
standard library is imported here, and jax is met when the program imports it.
"""

import contextlib
import ctypes
import functools
import importlib.machinery
import importlib.util
import inspect
import io
import os
import pathlib
import pkgutil
import select
import signal
import sys
import types
from typing import NoReturn

_PR_SET_PDEATHSIG = 1
# The launcher asks all processes what they do. It takes a second.
_RELEASED_SECONDS = 5.0
_PLACE = {"JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"}
_OPTIONS = ("--reports", "--released", "--launcher")
_USAGE = """\
To start one process by hand, in a terminal or on a host of its own:
  JAX_COORDINATOR_ADDRESS=host:port JAX_NUM_PROCESSES=n JAX_PROCESS_ID=i \\
    python -m jaxcomm.launch.child (script.py | -m module) [arguments ...]
To start all of this host at once: python -m jaxcomm.launch --help"""


def die_with(launcher: int) -> None:
    """Ask for SIGKILL at the launcher's end, however it ends. Linux only."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:
        # It had ended before we asked.
        os.kill(os.getpid(), signal.SIGKILL)


def place() -> dict:
    """Return the arguments of jax.distributed.initialize for this process."""
    numbers = {}
    for name in ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID"):
        try:
            numbers[name] = int(os.environ[name])
        except ValueError:
            sys.exit(f"{name}={os.environ[name]!r} is no number.\n{_USAGE}")
    address = os.environ["JAX_COORDINATOR_ADDRESS"]
    if ":" not in address:
        sys.exit(f"JAX_COORDINATOR_ADDRESS={address!r} is no host:port.\n{_USAGE}")
    return {
        "coordinator_address": address,
        "num_processes": numbers["JAX_NUM_PROCESSES"],
        "process_id": numbers["JAX_PROCESS_ID"],
    }


class AfterImport:
    """Finds one module as Python does, and calls a function once it is imported."""

    def __init__(self, name, action):
        self._name = name
        self._action = action

    def find_spec(self, name, path=None, target=None):
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_then_act(module):
            execute(module)
            self._action()

        spec.loader.exec_module = execute_then_act
        return spec


def join(report=lambda news: None) -> None:
    """Make jax.distributed.initialize() know its arguments, and call it if nobody does.

    Arguments that the program gives itself stay; how to detect a cluster is settled.
    ``report("ready")`` is called once this process knows the devices of all others.
    """
    import jax

    from jaxcomm import compat, config
    from jaxcomm._built import ABSENCE
    from jaxcomm.communicator import extension, hosts, membership, presence

    ours = place()
    if "JAXCOMM_LAUNCHED" in os.environ and not ABSENCE:
        extension.answer_early(ours["process_id"], ours["num_processes"])
    if folder := os.environ.get("JAXCOMM_WATCH_DIR"):
        from jaxcomm.launch.compiled import Compiled

        with contextlib.suppress(OSError):
            name = f"nccl-{ours['process_id']}.programs"
            Compiled(pathlib.Path(folder, name)).keep()
    is_elastic = os.environ.get("JAXCOMM_ELASTIC") == "1"
    if is_elastic:

        def give_up(process):
            report(f"gave-up {process} {hosts.starts().get(process, 0)}")

        presence.tell_of_given_up(give_up)
        membership.tell_of_joining(lambda: report("joined"))
    process = os.getpid()
    initialize = jax.distributed.initialize
    signature = inspect.signature(initialize)

    @functools.wraps(initialize)
    def initialize_here(*arguments, **options):
        given = signature.bind_partial(*arguments, **options).arguments
        given |= {key: ours[key] for key in ours if given.get(key) is None}
        given["cluster_detection_method"] = "deactivate"
        address = given["coordinator_address"]
        if address != ours["coordinator_address"]:
            if is_elastic:
                raise ValueError(
                    f"jax.distributed.initialize: coordinator_address={address!r} was "
                    f"asked for, and the launcher serves at "
                    f"{ours['coordinator_address']!r}. Leave the argument out"
                )
            # Not where the launcher's variable says: nobody looks for it there.
            given.setdefault("coordinator_bind_address", address)
        if is_elastic:
            with compat.jobs_store_served_elsewhere():
                initialize(**given)
            if given["process_id"] == 0 and config.starts():
                compat.forget_topology()
        else:
            initialize(**given)

    def initialize_if_needed():
        # A forked copy of the process has no place of its own among the others.
        if os.getpid() == process and not jax.distributed.is_initialized():
            initialize_here()

    os.register_at_fork(after_in_child=_let_sigterm_end)
    jax.distributed.initialize = initialize_here
    compat.around_start_of_devices(initialize_if_needed, lambda: report("ready"))


def _let_sigterm_end():
    """Let SIGTERM end a forked child, unless the program has a handler of its own.

    JAX takes the signal for a notice, and the child would inherit that.
    """
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def script(path: str) -> tuple:
    """Return code and attributes of ``__main__``, as for ``python path``."""
    path = os.path.abspath(path)
    if pkgutil.get_importer(path) is not None:
        # A folder or an archive.
        _enter(path)
        spec = importlib.machinery.PathFinder.find_spec("__main__", [path])
        if spec is None:
            _refuse(path, "a folder or archive is run by its __main__.py; it has none")
        return _of(spec, path)
    _enter(os.path.dirname(os.path.realpath(path)))
    with io.open_code(path) as file:
        code = pkgutil.read_code(file)
    if code is None:
        with io.open_code(path) as file:
            code = compile(file.read(), path, "exec", dont_inherit=True)
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    return code, {"__file__": path, "__loader__": loader, "__package__": None}


def module(name: str) -> tuple:
    """Return code and attributes of ``__main__``, as for ``python -m name``."""
    _enter(os.getcwd())
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except ModuleNotFoundError as error:
        _refuse(name, error)
    code, attributes = _of(spec, name)
    sys.argv[0] = attributes["__file__"]
    return code, attributes


def _enter(folder):
    """Let imports begin in a folder; the first one so far is that of this file."""
    if not sys.flags.safe_path:
        sys.path[0] = folder
    # Run from its source tree, the launcher may know a jaxcomm that the program's own
    # path does not lead to.
    if importlib.util.find_spec("jaxcomm") is None:
        sys.path.append(str(pathlib.Path(__file__).resolve().parents[2]))


def _of(spec, name):
    if spec is None:
        _refuse(name, "no such module")
    get_code = getattr(spec.loader, "get_code", None)
    code = get_code(spec.name) if get_code else None
    if code is None:
        _refuse(name, "it is not a Python program")
    return code, {
        "__spec__": spec,
        "__file__": spec.origin,
        "__loader__": spec.loader,
        "__package__": spec.parent,
    }


def _refuse(name, reason) -> NoReturn:
    sys.exit(f"{sys.executable}: cannot run {name}: {reason}")


def run(read, report) -> None:
    """Execute the program as ``__main__``, telling of its end before it ends.

    JAX leaves a process only when the others do too: the status would come too late.
    After a failure ``report`` returns once the launcher has named whom it suspects.
    """
    main = types.ModuleType("__main__")
    try:
        code, attributes = read()
        main.__dict__.update(attributes)
        sys.modules["__main__"] = main
        exec(code, main.__dict__)
    except SystemExit as error:
        report(status_of(error) or "done")
        raise
    except BaseException as error:
        report(status_of(error))
        _hide_our_frames(error)
        raise
    report("done")


def status_of(error: BaseException) -> int:
    """Return the status that the interpreter will end with."""
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    if not isinstance(error, SystemExit):
        return 1
    code = error.code or 0
    return code & 0xFF if isinstance(code, int) else 1


def _hide_our_frames(error):
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals is globals():
        trace = trace.tb_next
    show = sys.excepthook

    def show_without_our_frames(kind, value, _):
        show(kind, value.with_traceback(trace), trace)

    sys.excepthook = show_without_our_frames


def main() -> None:
    """Join, then run the program; the launcher's words come before the program's."""
    words = sys.argv[1:]
    given = {}
    while words and words[0].startswith("--"):
        name, _, value = words.pop(0).partition("=")
        if name == "--help":
            print(_USAGE)
            sys.exit(0)
        if name not in _OPTIONS or not value.isdecimal():
            sys.exit(_USAGE)
        given[name] = int(value)
    is_module = words[:1] == ["-m"]
    sys.argv = words[is_module:]
    if not (sys.argv and os.environ.keys() >= _PLACE):
        sys.exit(_USAGE)
    process = os.getpid()
    # Now: the program may change the environment.
    number = os.environ["JAX_PROCESS_ID"]

    def report(news):
        # Not for a copy of this process that the program has forked.
        if news and "--reports" in given and os.getpid() == process:
            with contextlib.suppress(BrokenPipeError):
                line = f"{number} {news}\n"
                os.write(given["--reports"], line.encode())
                if isinstance(news, int):
                    select.select([given["--released"]], [], [], _RELEASED_SECONDS)

    if "--launcher" in given:
        die_with(given["--launcher"])
        for name in ("--reports", "--released"):
            os.set_inheritable(given[name], False)
    if "jax" in sys.modules:
        # Started by hand with -m.
        join(report)
    else:
        sys.meta_path.insert(0, AfterImport("jax", functools.partial(join, report)))
    run(functools.partial(module if is_module else script, sys.argv[0]), report)


if __name__ == "__main__":
    main()
