"""Draw docs/ring.svg: ``python docs/_ring.py``.

Keys and values travel around a ring of four ranks. At each hop a rank computes the
parts of causal attention that its block allows, as a :class:`jaxcomm.Layout` says.
"""

from collections.abc import Iterator
from pathlib import Path

import jaxcomm

RANKS = 4
CHUNKS = 2 * RANKS
COLORS = ("#1f77b4", "#e6862e", "#2ca02c", "#9467bd")
_SECONDS_OF_HOP = 2
_CELL, _LEFT, _TOP = 30, 470, 66
# Where ranks stand: clockwise, so that every hop follows an edge.
_PLACES = ((20, 60), (240, 60), (240, 210), (20, 210))
_BOX = (150, 96)

Tile = tuple[int, int, int, int]


def tiles() -> Iterator[Tile]:
    """Yield hop, rank, query chunk and key chunk of all that is computed."""
    layout = jaxcomm.Layout("zigzag", RANKS, CHUNKS)
    held = [[int(chunk) for chunk in layout.positions_of(r)] for r in range(RANKS)]
    for hop in range(RANKS):
        for rank in range(RANKS):
            for query in held[rank]:
                for key in held[(rank - hop) % RANKS]:
                    if key <= query:
                        yield hop, rank, query, key


def picture() -> str:
    """Return the SVG."""
    layout = jaxcomm.Layout("zigzag", RANKS, CHUNKS)
    parts = [_HEAD]
    for rank, (x, y) in enumerate(_PLACES):
        chunks = ", ".join(str(chunk) for chunk in layout.positions_of(rank))
        parts.append(_RANK.format(x=x, y=y, rank=rank, chunks=chunks, of=COLORS[rank]))
    parts += [_block(rank) for rank in range(RANKS)]
    parts += [_tile(*tile) for tile in tiles()]
    parts += [_hop(hop) for hop in range(RANKS)]
    side = _CELL * CHUNKS
    middle, middle_y = _LEFT + side // 2, _TOP + side // 2
    parts.append(
        _FRAME.format(x=_LEFT, y=_TOP, side=side, middle=middle, middle_y=middle_y)
    )
    return "\n".join([*parts, "</svg>\n"])


def _animate(kind, values, times):
    times = ";".join(f"{t:.4g}" for t in times)
    return (
        f'<{kind} dur="{_SECONDS_OF_HOP * RANKS}s" repeatCount="indefinite" '
        f'values="{";".join(values)}" keyTimes="{times}"/>'
    )


def _block(rank):
    """Draw keys and values of a rank, which move to the next rank at each hop."""
    x, y = _PLACES[rank]
    values, times = [], []
    for hop in range(RANKS):
        for start, of in ((hop + 0.05, hop), (hop + 0.95, hop)):
            there = _PLACES[(rank + of) % RANKS]
            values.append(f"{there[0] - x},{there[1] - y}")
            times.append(start / RANKS)
    # It jumps home when the picture begins anew: nothing is sent after the last hop.
    values, times = [values[0], *values, values[-1]], [0, *times, 1]
    moves = _animate("animateTransform", values, times).replace(
        "<animateTransform",
        '<animateTransform attributeName="transform" type="translate"',
    )
    return (
        f'<g><rect x="{x + 20}" y="{y + 58}" width="110" height="26" rx="5" '
        f'fill="{COLORS[rank]}"/><text x="{x + 75}" y="{y + 76}" fill="#fff" '
        f'text-anchor="middle">K, V of rank {rank}</text>{moves}</g>'
    )


def _tile(hop, rank, query, key):
    """Draw a tile, half of one on the diagonal, from its hop on."""
    x, y = _LEFT + _CELL * key, _TOP + _CELL * query
    corners = [(x, y), (x, y + _CELL), (x + _CELL, y + _CELL)]
    if query != key:
        corners.append((x + _CELL, y))
    points = " ".join(f"{a},{b}" for a, b in corners)
    start = (hop + 0.1) / RANKS
    shown = _animate("animate", ["0", "0", "1", "1"], [0, start, start + 0.05, 1])
    shown = shown.replace("<animate", '<animate attributeName="opacity"')
    look = f'points="{points}" fill="{COLORS[rank]}" stroke="#fff"'
    return f"<polygon {look}>{shown}</polygon>"


def _hop(hop):
    """Draw the name of the hop while it lasts. Without animation: of the first one."""
    start, end = hop / RANKS, (hop + 1) / RANKS
    if hop == 0:
        values, times = ["1", "1", "0", "0"], [0, end, end, 1]
    elif end == 1:
        values, times = ["0", "0", "1", "1"], [0, start, start, 1]
    else:
        values, times = ["0", "0", "1", "1", "0", "0"], [0, start, start, end, end, 1]
    shown = _animate("animate", values, times)
    shown = shown.replace("<animate", '<animate attributeName="opacity"')
    return (
        f'<text x="205" y="190" text-anchor="middle" font-weight="bold" '
        f'opacity="{int(hop == 0)}">hop {hop}{shown}</text>'
    )


_HEAD = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 350" \
font-family="sans-serif" font-size="14">
<title>Ring attention: queries stay, keys and values travel</title>
<style>@media (prefers-color-scheme: dark) {
rect[fill="#fff"] { fill: #131416 } rect[fill="#f6f8fa"] { fill: #202124 }
text[fill="#24292f"], text:not([fill]) { fill: #ddd } polygon { stroke: #131416 }
}</style>
<rect width="760" height="350" fill="#fff"/>
<text x="20" y="30" fill="#24292f">Queries stay. Keys and values travel around the \
ring, one hop at a time.</text>
<path d="M170 108H240M315 156V210M240 258H170M95 210V156" stroke="#8c959f" \
stroke-width="2" stroke-dasharray="5 4"/>"""
_RANK = """<rect x="{x}" y="{y}" width="150" height="96" rx="8" fill="#f6f8fa" \
stroke="{of}" stroke-width="2"/>
<text x="{x}" y="{y}" dx="75" dy="22" text-anchor="middle" font-weight="bold" \
fill="{of}">rank {rank}</text>
<text x="{x}" y="{y}" dx="75" dy="44" text-anchor="middle" fill="#24292f">\
queries {chunks}</text>"""
_FRAME = """<rect x="{x}" y="{y}" width="{side}" height="{side}" fill="none" \
stroke="#8c959f"/>
<text x="{middle}" y="{y}" dy="-10" text-anchor="middle" \
fill="#24292f">keys 0 to 7</text>
<text transform="translate({x} {middle_y}) rotate(-90)" dy="-10" text-anchor="middle" \
fill="#24292f">queries 0 to 7</text>
<text x="20" y="336" fill="#24292f">Colors: the rank that computes a tile of the \
causal square. At each hop all ranks do the same work.</text>"""

if __name__ == "__main__":
    Path(__file__).with_name("ring.svg").write_text(picture())
