import pytest
import team


@pytest.fixture
def start(tmp_path):
    """Gives ``start(count, devices=1)``, a Team; stops what it has started."""
    with team.starting(tmp_path) as begin:
        yield begin


@pytest.fixture(scope="module")
def start_for_module(tmp_path_factory):
    """Does as ``start``, for teams that the tests of a file share."""
    with team.starting(tmp_path_factory.mktemp("teams")) as begin:
        yield begin
