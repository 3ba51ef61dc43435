import importlib.resources
from pathlib import Path


def test_the_committed_stub_is_the_generated_one():
    committed = Path(__file__).parents[1] / "jaxcomm" / "_ffi.pyi"
    generated = importlib.resources.files("jaxcomm") / "_ffi.pyi"
    assert committed.read_text() == generated.read_text(), "run `make stubs`"
