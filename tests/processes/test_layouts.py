"""Collectives along axes that do not lead: rows that are scattered in memory."""

import pytest

import jaxcomm

pytestmark = pytest.mark.multiprocess

# Beside the axes of the ranks: few bytes, many short rows, rows longer than a slot.
WIDTHS = {"few": (3, 1), "short rows": (90, 33), "long rows": (1, 70_001)}


def along_every_axis(here, mesh, width):
    size, model = mesh.size, here.model
    middle, last = WIDTHS[width]
    shapes = {0: (size, middle, last), 1: (middle, size, last), 2: (middle, last, size)}
    cases = {}

    def add(name, call, group_model, shape, *arguments, **options):
        x = here.values("int32", (size, *shape), len(cases))
        cases[name] = (
            lambda x: call(x, "i", *arguments, **options), group_model, x,
        )  # fmt: skip

    for place, plain in shapes.items():
        tiles = tuple(2 * n if i == place else n for i, n in enumerate(plain))
        for name, tiled in (("", {}), (" tiled", {"tiled": True})):
            add(
                f"all_gather {place}{name}", jaxcomm.all_gather,
                model.all_gather(place, **tiled), shapes[1], axis=place, **tiled,
            )  # fmt: skip
            add(
                f"psum_scatter {place}{name}", jaxcomm.psum_scatter,
                model.reduce_scatter(place, **tiled), tiles if tiled else plain,
                scatter_dimension=place, **tiled,
            )  # fmt: skip
        add(
            f"gather {place}", jaxcomm.pgather,
            model.only_on(1, model.all_gather(place, tiled=True)), shapes[1],
            1, axis=place, tiled=True,
        )  # fmt: skip
        add(
            f"scatter {place}", jaxcomm.pscatter, model.scatter(1, place, tiled=True),
            tiles, 1, axis=place, tiled=True,
        )  # fmt: skip
        add(
            f"all_to_all {place}", jaxcomm.all_to_all,
            model.all_to_all(place, 2 - place), plain, place, 2 - place,
        )  # fmt: skip
    for pair in [(0, 1), (2, 0), (1, 2), (1, 1)]:
        add(
            f"all_to_all {pair} tiled", jaxcomm.all_to_all,
            model.all_to_all(*pair, tiled=True),
            [2 * size if i in pair else middle for i in range(3)], *pair, tiled=True,
        )  # fmt: skip
    found = here.run(
        mesh,
        lambda x: {name: case[0](x[name]) for name, case in cases.items()},
        {name: x for name, (*_, x) in cases.items()},
    )
    for name, (_, group_model, x) in cases.items():
        expected = here.by_group(mesh, ("i",), group_model, x)
        here.identical(mesh, found[name], expected, f"{name}, {width}")


@pytest.mark.parametrize(
    ("at", "width"),
    [
        ((3, 1), "short rows"),
        ((2, 2), "long rows"),
        pytest.param((2, 2), "few", marks=pytest.mark.thorough),
        pytest.param((3, 1), "long rows", marks=pytest.mark.thorough),
    ],
)
def test_axes_in_every_place_tiled_and_not(team, at, width):
    team.call(along_every_axis, at, width=width)
