"""The pictures of cards: of a dataset its ledger, margins and lengths, of a model its training.

They are PNG files 1,000 pixels wide on white, so they read on a dark page too. The same data give
the same bytes with the same matplotlib. Figures are made directly, without pyplot, so nothing
here touches global state or needs a screen.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

# Okabe and Ito's colours: they differ in lightness too, so they hold for every kind of eye.
BLUE, ORANGE, GREY = "#0072B2", "#E69F00", "#8C8C8C"

DOTS_PER_INCH = 100
WIDTH = 10.0  # inches
BINS = 30


def draw_ledger(path: Path, kept: int, dropped: Mapping[str, int]) -> None:
    """Draw what became of all rows: a bar for the pairs kept and one for every drop reason."""
    outcomes = {"kept": kept, **dropped}
    asked = sum(outcomes.values())
    figure, axes = new_figure(height=1.7 + 0.42 * len(outcomes))
    colours = [BLUE] + [GREY] * len(dropped)
    bars = axes.barh(list(outcomes), list(outcomes.values()), color=colours, height=0.7)
    axes.bar_label(
        bars, [f"{n:,} ({100 * n / asked:.1f} %)" for n in outcomes.values()], padding=5, size=12
    )
    axes.invert_yaxis()
    axes.set_xlim(right=1.25 * max(outcomes.values()))  # room for the numbers
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("rows")
    axes.set_title(f"What became of the {asked:,} rows asked for", loc="left")
    save(figure, path)


def draw_margins(path: Path, margins: Sequence[float], unit: str) -> None:
    """Draw how far apart the judge put chosen and rejected, as a histogram with its median."""
    figure, axes = new_figure()
    axes.hist(margins, bins=_edges(margins, start=0.0), color=BLUE, edgecolor="white")
    median = float(np.median(margins))
    axes.axvline(median, color="black", linestyle="--", label=f"median {median:.3g}")
    axes.legend(frameon=False, fontsize=12)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel(f"judge_margin ({unit})")
    axes.set_ylabel("pairs")
    axes.set_title(f"Margin of chosen over rejected (n = {len(margins):,} pairs)", loc="left")
    save(figure, path)


def draw_lengths(path: Path, chosen: Sequence[int], rejected: Sequence[int], unit: str) -> None:
    """Draw the lengths of chosen and rejected responses, one histogram over the other."""
    figure, axes = new_figure()
    edges = _edges([*chosen, *rejected], whole=True)
    axes.hist(rejected, bins=edges, color=ORANGE, alpha=0.45)
    # Outlines in two styles: where the areas overlap they still tell the series apart.
    for name, values, colour, style in (
        ("rejected", rejected, ORANGE, "--"),
        ("chosen", chosen, BLUE, "-"),
    ):
        label = f"{name}, mean {np.mean(values):,.0f}"
        axes.hist(values, bins=edges, histtype="step", color=colour, linewidth=2.5,
                  linestyle=style, label=label)  # fmt: skip
    axes.legend(frameon=False, fontsize=12)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel(f"length of the response ({unit})")
    axes.set_ylabel("responses")
    axes.set_title(f"Length of chosen and rejected (n = {len(chosen):,} pairs)", loc="left")
    save(figure, path)


def draw_loss(path: Path, history: Sequence[Mapping[str, float]]) -> None:
    """Draw the loss at every step that was logged, in training and on the test split.

    Args:
        history: what `Trainer.state.log_history` holds.
    """
    series = {"training": ("loss", BLUE), "test split": ("eval_loss", ORANGE)}
    _draw_steps(path, history, series, "loss", "Loss")


def draw_rewards(path: Path, history: Sequence[Mapping[str, float]]) -> None:
    """Draw the mean rewards of chosen and rejected responses; no picture where none were logged."""
    series = {
        "chosen": ("rewards/chosen", BLUE),
        "rejected": ("rewards/rejected", ORANGE),
    }
    _draw_steps(path, history, series, "reward", "Rewards of chosen and rejected responses")


def _draw_steps(
    path: Path,
    history: Sequence[Mapping[str, float]],
    series: Mapping[str, tuple[str, str]],
    unit: str,
    title: str,
) -> None:
    figure, axes = new_figure()
    for (name, (key, colour)), style in zip(series.items(), ("-", "--"), strict=True):
        points = [(one["step"], one[key]) for one in history if key in one]
        if points:
            axes.plot(*zip(*points, strict=True), color=colour, linestyle=style, linewidth=2,
                      marker="o" if len(points) < 20 else "", label=name)  # fmt: skip
    if not axes.lines:
        return
    axes.legend(frameon=False, fontsize=12)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("step")
    axes.set_ylabel(unit)
    axes.set_title(title, loc="left")
    save(figure, path)


def new_figure(height: float = 4.6) -> tuple[Figure, Axes]:
    """Return an empty picture, `height` inches high, and its axes."""
    figure = Figure(figsize=(WIDTH, height), dpi=DOTS_PER_INCH, layout="constrained",
                    facecolor="white")  # fmt: skip
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.01)
    return figure, axes


def _edges(values: Sequence[float], start: float | None = None, whole: bool = False) -> np.ndarray:
    """Return the edges of at most `BINS` equal bins over `values`.

    Few values get few bins (twice the cube root, Rice's rule). With `whole`, bins are a whole
    number wide, so that no bin holds more whole numbers than its neighbours.
    """
    low = min(values) if start is None else start
    high = max(values)
    bins = int(np.clip(np.ceil(2 * len(values) ** (1 / 3)), 5, BINS))
    if whole:
        width = max(1, int(np.ceil((high - low + 1) / bins)))
        return low - 0.5 + width * np.arange(int(np.ceil((high - low + 1) / width)) + 1)
    return np.linspace(low, high if high > low else low + 1, bins + 1)


def save(figure: Figure, path: Path | BinaryIO) -> None:
    """Write a picture as PNG, its letters all of one size."""
    axes = figure.axes[0]
    axes.title.set_size(15)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set_size(13)
    axes.tick_params(labelsize=12)
    FigureCanvasAgg(figure)
    # Without a version of the software in it, the same picture is the same file.
    figure.savefig(path, metadata={"Software": None})
