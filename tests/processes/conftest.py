import pytest
from team import Team


@pytest.fixture(scope="session")
def _teams():
    running = []
    yield running
    for each in running:
        each.end()


@pytest.fixture
def team(_teams, tmp_path_factory):
    """Four processes of two devices each, kept for the tests that follow.

    Meshes take as many of them as they need.
    """
    if _teams and _teams[-1].broken:
        _teams.pop().stop()
    if not _teams:
        folder = tmp_path_factory.mktemp("team")
        _teams.append(Team(4, folder, devices=2, options=("-W", "error")))
    return _teams[-1]
