"""The pictures of a report: what changed, and how much of it is length.

They look like those of the cards (`hub_cards.pictures`): PNG, 1,000 pixels wide, on white.
"""

import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from eval.breakdown import Bin
from hub_cards.pictures import BLUE, GREY, ORANGE, new_figure, save

SHORTEST, LONGEST = 1 / 16, 16  # of the lengths that are drawn; others stand at the edge


def draw_differences(metrics: Sequence[Mapping[str, Any]]) -> bytes:
    """Draw the difference of every metric with its interval, in points; PNG.

    Args:
        metrics: of `results.json`, each with a `difference`.
    """
    figure, axes = new_figure(height=1.5 + 0.5 * len(metrics))
    axes.axvline(0, color="black", linewidth=1)
    for place, metric in enumerate(metrics):
        moved, sure = metric["difference"], metric["verdict"] in ("better", "worse")
        colour = GREY if metric["doubt"] or not sure else BLUE
        axes.plot([moved["low"], moved["high"]], [place, place], color=colour, linewidth=3)
        axes.plot(moved["value"], place, marker="o", markersize=9, color=colour)
    axes.set_yticks(range(len(metrics)), [metric["label"] for metric in metrics])
    axes.set_ylim(len(metrics) - 0.5, -0.5)
    axes.margins(x=0.08)
    axes.set_xlabel("difference in points, with its 95 % interval")
    axes.set_title("Model against base: right of zero is more", loc="left")
    return _png(figure)


def draw_win_rate_by_length(
    series: Mapping[str, tuple[np.ndarray, np.ndarray, Sequence[Bin]]], baseline: str
) -> bytes:
    """Draw win rates over the length of answers; PNG.

    Args:
        series: for `model` and `base` what `eval.breakdown.by_length` returned.
        baseline: whose answers they are compared with.
    """
    figure, axes = new_figure()
    axes.axhline(50, color="black", linewidth=1, linestyle=":")
    axes.axvline(1, color="black", linewidth=1, linestyle=":")
    looks = ((BLUE, "o", "-", 0.96), (ORANGE, "s", "--", 1.04))
    for (name, found), (colour, marker, style, aside) in zip(series.items(), looks, strict=True):
        lengths, rates, bins = found
        if not len(lengths):
            continue
        shown = np.clip(lengths, SHORTEST, LONGEST)
        faint = 0.5 if len(lengths) < 100 else 0.15
        axes.scatter(shown, rates, s=9, color=colour, alpha=faint, marker=marker, linewidths=0)
        # A little aside of each other, so that intervals do not cover one another.
        places = np.clip([one.length for one in bins], SHORTEST, LONGEST) * aside
        middle = np.array([one.rate.value for one in bins])
        spread = [
            middle - [one.rate.low for one in bins],
            np.array([one.rate.high for one in bins]) - middle,
        ]
        axes.errorbar(
            *(places, middle, spread), color=colour, marker=marker, markersize=8, linestyle=style,
            linewidth=2, capsize=4, label=f"{name} (n = {len(lengths):,})",
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(LogLocator(base=2))
    axes.xaxis.set_major_formatter(FuncFormatter(_as_ratio))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_ylim(-4, 104)
    axes.legend(frameon=False, fontsize=12)
    axes.set_xlabel(f"length of the answer over that of {baseline}")
    axes.set_ylabel("win rate (%)")
    axes.set_title("Win rate against length: groups of one size, with 95 % intervals", loc="left")
    return _png(figure)


def _as_ratio(value: float, _place: int) -> str:
    return f"{value:g}×" if value >= 1 else f"1/{1 / value:g}×"


def _png(figure: Figure) -> bytes:
    file = io.BytesIO()
    save(figure, file)
    return file.getvalue()
