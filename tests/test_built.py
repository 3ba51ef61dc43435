"""What a build leaves, and what is said where it left no extension."""

import importlib.resources
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import zipfile

import forked
import jax
import numpy as np
import pytest
import waiting
import without_extension

import jaxcomm

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = pathlib.Path(jaxcomm.__file__).parent
MARKER = "_without_extension.py"
ANEW = r"in \S+/jaxcomm{}\. In a clone .* `make develop` once\. Elsewhere, install"


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, ANEW.format("")),
        ({"_ffi.pyi": ""}, ANEW.format("")),
        (
            {"_ffi.cpython-39-darwin.so": ""},
            ANEW.format(r" \(only _ffi\.cpython-39-darwin\.so, of another Python .*\)"),
        ),
        ({"_ffi.abi3.so": "text"}, r"/_ffi\.abi3\.so does not load: .* install jaxc"),
        # An extension that is there is never passed over.
        ({MARKER: "", "_ffi.abi3.so": "text"}, r"/_ffi\.abi3\.so does not load: "),
        ({"_ffi.py": "import absent"}, r"does not load: No module named 'absent'\."),
    ],
    ids=["nothing", "a stub", "another's", "broken", "broken and marked", "lacking"],
)
def test_an_extension_that_is_lost_or_broken_is_an_error(tmp_path, files, said):
    package = tmp_path / "jaxcomm"
    package.mkdir()
    for name in ("_built.py", "errors.py"):
        shutil.copy(PACKAGE / name, package)
    for name, text in {"__init__.py": "", **files}.items():
        (package / name).write_text(text)
    ran = subprocess.run(
        [sys.executable, "-S", "-c", "import jaxcomm._built"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=waiting.HANG_SECONDS,
    )
    assert ran.returncode == 1
    last = ran.stderr.splitlines()[-1]
    assert re.match(rf"ImportError: jaxcomm's compiled extension .*{said}", last), last


def test_without_the_extension_xla_communicates(tmp_path):
    shutil.copytree(
        PACKAGE,
        tmp_path / "jaxcomm",
        ignore=shutil.ignore_patterns("*.so", "__pycache__"),
    )
    (tmp_path / "jaxcomm" / MARKER).touch()
    # Eight devices are too many, and the doctor would complain of the tests' variables.
    flags = {"XLA_FLAGS": os.environ["QUICK_XLA_FLAGS"]}
    others = {n: v for n, v in os.environ.items() if not n.startswith("JAXCOMM_")}
    ran = forked.run(
        [sys.executable, without_extension.__file__, str(tmp_path)],
        cwd=tmp_path,
        env=others | flags,
        capture_output=True,
        text=True,
        timeout=waiting.HANG_SECONDS,
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    # The numbers of the extension's C++ are those of jaxcomm.planning, too.
    assert found["plan"] == without_extension.a_plan()
    status, page = found["doctor"]
    assert status == 0, page
    assert f"XLA communicates: {without_extension.WITHOUT}" in page
    assert ran.stderr == ""


@pytest.mark.parametrize("platform", ["linux", "freebsd14"])
def test_without_a_compiler_a_wheel_for_all_systems_is_built(tmp_path, platform):
    pytest.importorskip("scikit_build_core")
    # Python reads what it was built with under its platform's name.
    code = "import sys, sysconfig; sysconfig.get_config_vars()\n"
    code += "sys.platform = sys.argv[1]\n"
    code += "from scikit_build_core import build; build.build_wheel(sys.argv[2])"
    asked = {"JAXCOMM_NO_EXTENSION": "1"} if platform == "linux" else {}
    subprocess.run(
        [sys.executable, "-c", code, platform, tmp_path],
        cwd=ROOT,
        env={"PATH": "/nowhere", **asked},
        stdout=subprocess.DEVNULL,
        timeout=waiting.HANG_SECONDS,
        check=True,
    )
    (wheel,) = tmp_path.glob("*-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as opened:
        found = {name for name in opened.namelist() if ".dist-info/" not in name}
    sources = {*ROOT.glob("jaxcomm/**/*.py"), *ROOT.glob("jaxcomm/_ffi.pyi")}
    expected = {path.relative_to(ROOT).as_posix() for path in sources}
    assert found == expected | {f"jaxcomm/{MARKER}", "jaxcomm/py.typed"}


def test_what_xla_alone_serves_is_not_asked_of_another_backend(make_mesh):
    mesh = make_mesh(i=2)

    def lower(platform, **options):
        program = jax.shard_map(
            lambda x: jaxcomm.psum(x, "i", **options),
            mesh=mesh,
            in_specs=jax.P("i"),
            out_specs=jax.P(),
        )
        traced = jax.jit(program).trace(np.ones(2, np.float32))
        return traced.lower(lowering_platforms=(platform,)).as_text()

    assert "jaxcomm." not in lower("tpu")
    assert "jaxcomm." not in lower("tpu", backend="xla")
    with pytest.raises(
        jaxcomm.CommunicatorError,
        match=r"psum over \('i',\): backend 'host' was asked for, and this program is "
        r"lowered for a platform that only XLA's collectives serve\. Use backend='xla'",
    ):
        lower("tpu", backend="host")


def test_jax_is_imported_before_the_extension():
    code = "import sys, jaxcomm; print(*sys.modules)"
    words = [sys.executable, "-c", code]
    order = subprocess.check_output(words, text=True, timeout=waiting.HANG_SECONDS)
    order = order.split()
    assert order.index("jax") < order.index("jaxcomm._ffi")


def test_the_committed_stub_is_the_generated_one():
    committed = ROOT / "jaxcomm" / "_ffi.pyi"
    generated = importlib.resources.files("jaxcomm") / "_ffi.pyi"
    assert committed.read_text() == generated.read_text(), "run `make stubs`"


def test_the_drivers_and_gpus_that_we_promise_take_the_ptx():
    """That it is what the GPU code compiles to: `make lint`."""
    # In a process of its own: NVRTC sets the locale of the process.
    words = [sys.executable, ROOT / "tools" / "make_ptx.py", "--ptx"]
    ptx = subprocess.run(words, capture_output=True, text=True).stdout
    # ISA 8.0 is what the driver of CUDA 12.0 takes at most.
    assert re.search(r"^\.version 8\.0$", ptx, re.MULTILINE)
    assert re.search(r"^\.target sm_70$", ptx, re.MULTILINE)
    kernels = re.findall(r"^\.visible \.entry (\w+)\(", ptx, re.MULTILINE)
    ragged = [f"jaxcomm_ragged_{each}" for each in ("check", "give", "move")]
    ours = [
        f"jaxcomm_{each}" for each in ("lines", "staged", "exchange", "stop", "poison")
    ]
    assert sorted(kernels) == sorted([*ours, *ragged])
    # Arguments stay where they are, and lines in registers but for a few words.
    stacks = re.findall(r"^\s*\.local .*\[(\d+)\];", ptx, re.MULTILINE)
    assert all(int(size) <= 32 for size in stacks)
    assert ".func" not in ptx
