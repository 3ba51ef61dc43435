import pytest
import team


@pytest.fixture
def start(tmp_path):
    with team.starting(tmp_path) as begin:
        yield begin


@pytest.fixture(scope="module")
def start_for_module(tmp_path_factory):
    with team.starting(tmp_path_factory.mktemp("teams")) as begin:
        yield begin
