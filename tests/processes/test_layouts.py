"""Collectives along axes that do not lead: rows that are scattered in memory."""

import jax.numpy as jnp
import pytest

import jaxcomm

pytestmark = pytest.mark.multiprocess

# Beside the axes of the ranks: few bytes, many short rows, rows longer than a slot.
WIDTHS = {"few": (3, 1), "short rows": (90, 33), "long rows": (1, 70_001)}


def along_every_axis(here, processes, devices, width):
    mesh = here.mesh(processes, devices)
    if mesh is None:
        return
    size, model = mesh.size, here.model
    middle, last = WIDTHS[width]
    plain = {0: (size, middle, last), 1: (middle, size, last), 2: (middle, last, size)}
    tiles = {
        place: tuple(2 * n if i == place else n for i, n in enumerate(shape))
        for place, shape in plain.items()
    }
    both = {
        pair: tuple(2 * size if i in pair else middle for i in range(3))
        for pair in [(0, 1), (1, 0), (0, 2), (2, 0), (1, 2), (1, 1)]
    }

    cases = {}
    for place in plain:
        cases |= {
            f"all_gather {place}": (
                lambda x, place=place: jaxcomm.all_gather(x, "i", axis=place),
                model.all_gather(place),
                plain[1],
            ),
            f"all_gather {place} tiled": (
                lambda x, place=place: jaxcomm.all_gather(
                    x, "i", axis=place, tiled=True
                ),
                model.all_gather(place, tiled=True),
                plain[1],
            ),
            f"gather {place} tiled": (
                lambda x, place=place: jaxcomm.pgather(
                    x, "i", 1, axis=place, tiled=True
                ),
                model.only_on(1, model.all_gather(place, tiled=True)),
                plain[1],
            ),
            f"psum_scatter {place}": (
                lambda x, place=place: jaxcomm.psum_scatter(
                    x, "i", scatter_dimension=place
                ),
                model.reduce_scatter(place),
                plain[place],
            ),
            f"psum_scatter {place} tiled": (
                lambda x, place=place: jaxcomm.psum_scatter(
                    x, "i", scatter_dimension=place, tiled=True
                ),
                model.reduce_scatter(place, tiled=True),
                tiles[place],
            ),
            f"scatter {place} tiled": (
                lambda x, place=place: jaxcomm.pscatter(
                    x, "i", 1, axis=place, tiled=True
                ),
                model.scatter(1, place, tiled=True),
                tiles[place],
            ),
            f"all_to_all {place}, {2 - place}": (
                lambda x, place=place: jaxcomm.all_to_all(x, "i", place, 2 - place),
                model.all_to_all(place, 2 - place),
                plain[place],
            ),
        }
    for split, concat in both:
        cases[f"all_to_all {split}, {concat} tiled"] = (
            lambda x, split=split, concat=concat: jaxcomm.all_to_all(
                x, "i", split, concat, tiled=True
            ),
            model.all_to_all(split, concat, tiled=True),
            both[split, concat],
        )
    x = {
        name: here.values(jnp.dtype("int32"), (size, *shape), seed)
        for seed, (name, (*_, shape)) in enumerate(cases.items())
    }
    found = here.run(
        mesh, lambda x: {name: case[0](x[name]) for name, case in cases.items()}, x
    )
    for name, (_, group_model, _) in cases.items():
        expected = here.by_group(mesh, ("i",), group_model, x[name])
        here.identical(mesh, found[name], expected, f"{name}, {width}")


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("processes", "devices"), [(2, 2), (3, 1)])
def test_axes_in_every_place_tiled_and_not(team, processes, devices, width):
    team.call(along_every_axis, processes=processes, devices=devices, width=width)
