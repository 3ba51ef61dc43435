"""Run ``python -m bench``: see ``--help``."""

import datetime
import importlib.util
import sys

from bench import devices, options

_WRONG_USE = 2
# As a shell reports a program that SIGINT ended.
_INTERRUPTED = 130


def main(asked: options.Options) -> int:
    """Measure, print, write; return the exit status.

    0, also where a target is missed; 1 if a case failed; 130 after Ctrl-C.
    """
    # These need rich, whose absence _parse has reported by now.
    from rich.console import Console

    from bench import plan, report, run, table
    from bench.own_process import Processes

    # A pipe has no width; tables must not be cut to a guess.
    width = None if sys.stdout.isatty() else 200
    console = Console(width=width)
    started = datetime.datetime.now(datetime.UTC)
    machine = report.machine()
    rows, session, interrupted = [], None, False
    try:
        devices.simulate(asked.most_devices)
        console.print(_heading(machine, report.versions()), highlight=False)
        session = plan.session(asked, asked.most_devices)
        for roofline in session.rooflines:
            console.print(_roofline(roofline), highlight=False)
        with Processes(asked) as processes:
            run.run(processes.cases(), session, rows, Console(stderr=True))
    except KeyboardInterrupt:
        interrupted = True
    for renderable in table.tables(rows, console.width):
        console.print(renderable)
    if interrupted:
        console.print(f"Interrupted; {len(rows)} rows were measured.")
    if asked.json:
        found = report.document(
            rows, session, machine, started=started, interrupted=interrupted
        )
        report.write(asked.json, found)
    if asked.plot:
        from bench import plot

        plot.save(asked.plot, rows, _heading(machine, report.versions()))
    if interrupted:
        return _INTERRUPTED
    return int(any(row.kind == "failed" for row in rows))


def _heading(machine, versions):
    text = (
        f"{machine['cpu']}, {machine['cores']} cores, jaxcomm {versions['jaxcomm']}, "
        f"jax {versions['jax']}"
    )
    load, cores = machine["load_average"], machine["cores"]
    if load is not None and load > cores / 2:
        text += f" (busy: load {load:.1f}; trust the ratios, not the times)"
    return text


def _roofline(roofline):
    from bench import units

    return f"{roofline.name}: {units.rate(roofline.rate, roofline.unit)}"


def _parse(words):
    """Read the command line, or end the process with help or a line of advice."""
    if {"-h", "--help"} & set(words):
        print(options.usage())
        sys.exit(0)
    try:
        asked = options.read(words)
        _check_installed("rich")
        if asked.plot:
            _check_plot(asked.plot)
    except options.UsageError as error:
        print(f"bench: {error}. See --help.", file=sys.stderr)
        sys.exit(_WRONG_USE)
    return asked


def _check_installed(package):
    if importlib.util.find_spec(package) is None:
        raise options.UsageError(
            f"{package} is not installed; pip install 'jaxcomm[bench]'"
        )


def _check_plot(path):
    _check_installed("matplotlib")
    from bench import plot

    if not plot.supports(path):
        raise options.UsageError(
            f"--plot: the ending of {path!r} is no picture format; try .png"
        )


if __name__ == "__main__":
    if sys.argv[1:2] == [options.GPU]:
        from bench.gpu import command

        sys.exit(command.main(sys.argv[2:]))
    sys.exit(main(_parse(sys.argv[1:])))
