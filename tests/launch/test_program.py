"""The program runs as if Python had been started with it."""

import os
import subprocess
import sys

import pytest
import waiting

from jaxcomm.launch import options, run, stopping

pytestmark = pytest.mark.multiprocess

# `make test` sets it, to keep the source folder from hiding the installed package.
looks_at_the_first_path = pytest.mark.skipif(
    bool(os.environ.get("PYTHONSAFEPATH")),
    reason="under PYTHONSAFEPATH Python leaves out the sys.path[0] that this looks at",
)

SAYS = """
import __main__
def here(): pass
print([sys.argv[1:], sys.argv[0], __name__, __file__, __package__, sys.path[0],
       __main__.here is here, __main__.__dict__ is globals(),
       __spec__ and __spec__.name, "jaxcomm" in sys.modules, "jax" in sys.modules])
"""


@pytest.fixture
def both(capfd, monkeypatch):
    def start(*words):
        monkeypatch.setenv("JAX_PROCESS_ID", "0")
        # After a failure it ends by itself, however long that takes.
        monkeypatch.setattr(stopping, "_LAST_WORDS_SECONDS", 100)
        by_hand = subprocess.run(
            [sys.executable, *words], capture_output=True, text=True, check=False
        )
        status = run.run(options.parse(["-n", "1", "--grace=100", *words]))
        out, err = capfd.readouterr()
        ours = [
            line.removeprefix("[0] ")
            for line in (out + err).splitlines()
            if not line.startswith("jaxcomm.launch: ")
        ]
        assert status == by_hand.returncode
        return (by_hand.stdout + by_hand.stderr).splitlines(), ours

    return start


@pytest.mark.parametrize(
    "words",
    [
        ["{}/folder/program.py", "-n", "--help", "--", ""],
        ["{}/link.py"],
        ["folder/program.py"],
        pytest.param(["{}/folder", "x"], marks=looks_at_the_first_path),
        pytest.param(["-m", "package.module", "-m"], marks=looks_at_the_first_path),
        pytest.param(["-m", "package", "-m", "x"], marks=looks_at_the_first_path),
    ],
    ids=" ".join,
)
def test_a_program_sees_what_it_would_see_by_hand(
    words, both, program, tmp_path, monkeypatch
):
    for name in ("program", "__main__"):
        program(SAYS, f"folder/{name}.py")
    for name in ("module", "__main__"):
        program(SAYS, f"package/{name}.py")
    (tmp_path / "link.py").symlink_to("folder/program.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    by_hand, ours = both(*(word.format(tmp_path) for word in words))
    assert ours == by_hand
    given = words[2:] if words[0] == "-m" else words[1:]
    assert by_hand[0].startswith(f"[{given}, ")


@pytest.mark.parametrize(
    "text",
    [
        "def f(): raise ValueError('mine')\nf()",
        "def f(:",
        "try: 1 / 0\nexcept ZeroDivisionError: raise KeyError(2)",
        "sys.excepthook = lambda *got: print('hook', got[0], got[2].tb_lineno)\n1 / 0",
        "raise SystemExit(None)",
        "sys.exit([1])",
        "import atexit; atexit.register(print, 'at exit'); 1 / 0",
    ],
)
def test_an_end_looks_as_it_would_by_hand(text, both, program):
    by_hand, ours = both(program(text))
    assert ours == by_hand


@pytest.mark.parametrize(
    ("script", "module", "said"),
    [
        ("json.no_such", True, "cannot run json.no_such: no such module"),
        ("{}", False, "cannot run {}: a folder or archive is run by its __main__.py"),
    ],
)
def test_what_is_no_program_is_refused_by_name(script, module, said, capfd, tmp_path):
    asked = options.Options(processes=1, script=script.format(tmp_path), module=module)
    assert run.run(asked) == 1
    assert said.format(tmp_path) in capfd.readouterr().err


def test_a_process_that_the_program_starts_is_no_part_of_the_run(launch):
    status, out, _ = launch(
        """
import multiprocessing
def work(x): return x + 1
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(work, [1, 2]))
    if os.fork() == 0: sys.exit(5)
    os.wait()
""",
        processes=1,
    )
    assert (status, out) == (0, "[0] [2, 3]\n")


def test_options_of_the_interpreter_are_passed_on(program):
    path = program("import warnings; warnings.warn('mine')")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "jaxcomm.launch", "-n", "1", path],
        capture_output=True,
        text=True,
        timeout=waiting.HANG_SECONDS,
        check=False,
    )
    assert done.returncode == 1
    assert "[0] UserWarning: mine" in done.stderr
