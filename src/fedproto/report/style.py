"""Plot style: a method has the same colour and dashes on the page and in every figure."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedproto.data.samples import MappedSamples, Samples
from fedproto.data.segmentation import palette
from fedproto.disk.files import write_output
from fedproto.errors import ConfigError, install, printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# Okabe and Ito's palette: told apart with all common kinds of colour vision.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
DASHES: tuple[tuple[float, ...], ...] = ((), (5, 2), (5, 1.5, 1, 1.5), (1, 1.5))
"""On and off, in widths of the line: whole, dashed, dash-dotted, dotted."""

LEGEND_ENTRY = 2.2
"""Width of an entry of a legend, in inches."""

# Reserved, so that a method looks the same on every page and in every figure: for each kind of
# dashes the names by colour. Other methods take what is left.
_RESERVED = (
    ("fedavg", "fedproto", "fedprox", "fedatt", "fairness + toleration", "fedavgm", "centralized"),
    ("fedadam", "guided", "protohead", "feddyn", "scaffold", "fednova", "qfedavg", "feddisco"),
    ("fedlc", "fedrs", "ditto", "fedacg", "fedbabu", "feddecorr", "fedntd", "fedper"),
    ("fedprototan", "fedrep", "fedrod", "ghbm", "moon", "steady"),
)
_KEPT = {
    name: (dash, color) for dash, names in enumerate(_RESERVED) for color, name in enumerate(names)
}
_KEPT["equal weights"] = _KEPT["fairness + toleration"]


@dataclass(frozen=True)
class LineStyle:
    """Colour and dashes of a method's lines."""

    color: str
    dash: int = 0

    @property
    def linestyle(self) -> tuple[float, tuple[float, ...]] | str:
        """The dashes as matplotlib wants them."""
        return (0, DASHES[self.dash]) if self.dash else "-"


def line_styles(titles: Sequence[str]) -> list[LineStyle]:
    """One line style per method: fixed for bundled methods, and no two alike.

    With more methods than styles, the last ones share.
    """
    named = {title: title.casefold().replace("q-", "q") for title in titles}
    kept: dict[str, tuple[int, int]] = {}
    for title, name in named.items():
        if _KEPT.get(name, (0, 0)) not in kept.values() and name in _KEPT:
            kept[title] = _KEPT[name]
    every = product(range(len(DASHES)), range(len(COLORS)))
    used = {color for _, color in kept.values()}
    free = sorted(
        set(every) - set(kept.values()),
        key=lambda slot: (slot in _KEPT.values(), slot[1] in used, slot),
    )
    others = [title for title in dict.fromkeys(titles) if title not in kept]
    chosen = kept | {title: free[index % len(free)] for index, title in enumerate(others)}
    return [LineStyle(COLORS[chosen[title][1]], chosen[title][0]) for title in titles]


def class_colors(num_classes: int, *, label_maps: bool) -> list[str]:
    """A colour per class: PASCAL VOC's for label maps and for many classes."""
    own = (*COLORS, "#999999", "#882255")  # two more that stay apart from the palette
    if not label_maps and num_classes <= len(own):
        return list(own[:num_classes])
    first = 0 if label_maps else 1  # the first of VOC's colours is the background's black
    shown = palette()[np.arange(first, first + num_classes) % 256]
    return [f"#{bytes(color).hex()}" for color in shown]


def picture_of(samples: Samples, index: int) -> NDArray[np.uint8]:
    """A sample's input as an image ``[H, W, channels]``; rescaled if it is not one."""
    where = np.array([index])
    raw = samples.raw(where) if isinstance(samples, MappedSamples) else samples.batch(where)
    values = raw[0][0].double().movedim(0, -1).cpu().numpy()
    low, high = float(values.min()), float(values.max())
    if low < 0 or high > 1:
        values = (values - low) / max(high - low, 1e-12)
    return np.asarray(np.rint(255 * values), dtype=np.uint8)


def need_matplotlib() -> None:
    """Raises an error that says how to install it, where it is absent."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(f"figures need matplotlib: {install('plots')}")


def new_figure(width: float, height: float) -> Figure:
    """An empty picture, in inches."""
    need_matplotlib()
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Figure, path: Path, dpi: int = 150) -> Path:
    """Writes a figure in the format that its suffix names, and makes the folder it goes to.

    Raises:
        StoreError: If it cannot be written.
    """
    content = io.BytesIO()
    figure.savefig(content, format=path.suffix.removeprefix(".") or "png", dpi=dpi)
    return write_output(path, content.getvalue())


def literal(text: str) -> str:
    """A label for matplotlib with escaped dollar signs, which would begin a formula."""
    return printable(text).replace("$", r"\$")


def panel_grid(
    number: int,
    columns: int,
    size: tuple[float, float],
    around: tuple[float, float],
    *,
    sharex: bool = False,
    sharey: bool = False,
) -> tuple[Figure, list[Any]]:
    """A figure with a number of panels, row by row; all sizes in inches. Panels may share axes."""
    columns = max(1, min(columns, number))
    rows = -(-max(1, number) // columns)
    figure = new_figure(size[0] * columns + around[0], size[1] * rows + around[1])
    panels = list(figure.subplots(rows, columns, squeeze=False, sharex=sharex, sharey=sharey).flat)
    for axes in panels[number:]:
        axes.set_visible(False)
    return figure, panels[:number]


def legend_columns(width: float) -> int:
    """Entries of a legend beside each other, in the present size of letters."""
    need_matplotlib()
    from matplotlib import rcParams

    return max(1, int(width / (LEGEND_ENTRY * rcParams["font.size"] / 10)))


def add_legend(figure: Figure, handles: Mapping[str, Any]) -> None:
    """One legend for all panels, above them, in as many lines as the width needs."""
    if handles:
        columns = legend_columns(figure.get_figwidth())
        figure.legend(
            handles.values(),
            map(literal, handles),
            loc="outside upper center",
            ncols=min(columns, len(handles)),
            frameon=False,
        )
