"""How figures look: a method has the same colour and dashes on the page and in every picture."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedproto.data.masks import palette
from fedproto.disk.files import explained, write_atomically
from fedproto.errors import ConfigError, printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's palette: told apart with all common kinds of colour vision.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
DASHES: tuple[tuple[float, ...], ...] = ((), (5, 2), (5, 1.5, 1, 1.5), (1, 1.5))
"""On and off, in widths of the line: whole, dashed, dash-dotted, dotted."""

LEGEND_ENTRY = 2.2
"""Width of an entry of a legend, in inches."""

# Which colour of the palette is kept for whom; all others take what these leave.
_KEPT = {
    "fedavg": 0,
    "fedproto": 1,
    "fedprox": 2,
    "fedatt": 3,
    "fairness + toleration": 4,
    "centralized": 6,
}


@dataclass(frozen=True)
class Look:
    """How a method is drawn."""

    color: str
    dash: int = 0

    @property
    def linestyle(self) -> tuple[float, tuple[float, ...]] | str:
        """The dashes as matplotlib wants them."""
        return (0, DASHES[self.dash]) if self.dash else "-"


def looks_of(titles: Sequence[str]) -> list[Look]:
    """One look per method: the well-known ones always have their own, no two are alike.

    With more methods than there are looks, the last ones share.
    """
    kept = {title: (0, _KEPT[title.casefold()]) for title in titles if title.casefold() in _KEPT}
    free = [
        slot
        for slot in product(range(len(DASHES)), range(len(COLORS)))
        if slot not in kept.values()
    ]
    others = [title for title in dict.fromkeys(titles) if title not in kept]
    chosen = kept | {title: free[index % len(free)] for index, title in enumerate(others)}
    return [Look(COLORS[chosen[title][1]], chosen[title][0]) for title in titles]


def class_colors(num_classes: int, *, label_maps: bool) -> list[str]:
    """A colour per class: PASCAL VOC's for label maps and for many classes."""
    own = (*COLORS, "#999999", "#882255")  # two more that stay apart from the palette
    if not label_maps and num_classes <= len(own):
        return list(own[:num_classes])
    first = 0 if label_maps else 1  # the first of VOC's colours is the background's black
    shown = palette()[np.arange(first, first + num_classes) % 256]
    return [f"#{bytes(color).hex()}" for color in shown]


def new_figure(width: float, height: float) -> Figure:
    """An empty picture, in inches."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("figures need matplotlib: pip install 'fedproto[plots]'")
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Figure, path: Path) -> Path:
    """Writes a picture as PNG, and makes the folder it goes to.

    Raises:
        StoreError: If it cannot be written.
    """
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=150)
    with explained(path, " cannot be written", "; choose another folder"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content.getvalue())
    return path


def literal(text: str) -> str:
    """A label for matplotlib as it is: dollar signs do not begin a formula."""
    return printable(text).replace("$", r"\$")


def panel_grid(
    number: int, columns: int, size: tuple[float, float], around: tuple[float, float]
) -> tuple[Figure, list[Any]]:
    """A picture of so many panels, row by row; all sizes in inches."""
    columns = max(1, min(columns, number))
    rows = -(-max(1, number) // columns)
    figure = new_figure(size[0] * columns + around[0], size[1] * rows + around[1])
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes in panels[number:]:
        axes.set_visible(False)
    return figure, panels[:number]


def add_legend(figure: Figure, handles: Mapping[str, Any]) -> None:
    """One legend for all panels, above them, in as many lines as the width needs."""
    if handles:
        columns = int(figure.get_figwidth() / LEGEND_ENTRY)
        figure.legend(
            handles.values(),
            map(literal, handles),
            loc="outside upper center",
            ncols=max(1, min(columns, len(handles))),
            frameon=False,
        )
