"""Pictures: their form, and data at the edges."""

import ast
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hub_cards import pictures

DRAWN = {
    "ledger": lambda path: pictures.draw_ledger(
        path, 41, {"prompt_repeated": 3, "response_truncated": 11, "verdict_tie": 5}
    ),
    "nothing dropped": lambda path: pictures.draw_ledger(path, 8, {}),
    "nothing kept": lambda path: pictures.draw_ledger(path, 0, {"verdict_tie": 8}),
    "margins": lambda path: pictures.draw_margins(
        path, [0.01 * 1.1**power for power in range(60)], "rating points"
    ),
    "one margin": lambda path: pictures.draw_margins(path, [1e-6], "natural-log odds"),
    "equal margins": lambda path: pictures.draw_margins(path, [2.0] * 50, "rating points"),
    "lengths": lambda path: pictures.draw_lengths(
        path, list(range(20, 400, 3)), list(range(20, 147)), "tokens"
    ),
    "one pair": lambda path: pictures.draw_lengths(path, [7], [7], "characters"),
    "lengths far apart": lambda path: pictures.draw_lengths(path, [1, 2], [10**6, 3], "tokens"),
}


@pytest.mark.parametrize("draw", DRAWN.values(), ids=DRAWN)
def test_form(draw, tmp_path):
    draw(tmp_path / "one.png")
    with Image.open(tmp_path / "one.png") as image:
        assert image.format == "PNG" and image.width == 1000 and 200 < image.height < 1500
        assert "Software" not in image.info
        pixels = np.asarray(image.convert("RGB")).astype(int)
    assert (pixels[0] == 255).all() and (pixels[:, 0] == 255).all()  # white up to the edge
    darkness = 255 - pixels.min(axis=2)
    assert darkness.max() > 200 and (darkness > 50).mean() > 0.01  # text and bars


@pytest.mark.parametrize("name", ["ledger", "margins", "lengths"])
def test_same_data_same_bytes(name, tmp_path):
    for file in ("one.png", "other.png"):
        DRAWN[name](tmp_path / file)
    assert (tmp_path / "one.png").read_bytes() == (tmp_path / "other.png").read_bytes()


def test_bins_hold_every_value_and_as_many_whole_numbers_each():
    for values in ([5], [0, 1], [3, 9, 14], list(range(1000)), [1, 10**6]):
        edges = pictures._edges(values, whole=True)
        assert edges[0] <= min(values) and max(values) <= edges[-1]
        assert len(edges) <= pictures.BINS + 1
        assert len(set(np.diff(edges))) == 1 and np.diff(edges)[0] % 1 == 0


def test_no_global_state():
    tree = ast.parse(Path(pictures.__file__).read_text(encoding="utf-8"))
    imported = [
        f"{getattr(node, 'module', '')}.{name.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in node.names
    ]
    assert not [name for name in imported if "pyplot" in name]
