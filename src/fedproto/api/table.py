"""Tables that print as text, show in notebooks, and go to pandas and LaTeX."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any, overload

from fedproto.data.tasks import is_share
from fedproto.errors import ConfigError
from fedproto.report.evidence import FEWEST_PAIRS
from fedproto.report.summary import Summary

_LATEX = {
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "δ": r"$\delta$",
    "−": "$-$",
    "·": r"$\cdot$",
}


class Table(Sequence[Mapping[str, Any]]):
    """Rows of plain values under named columns.

    Args:
        rows: The values by column.
        shown: The same as text, where it differs from the values.
    """

    def __init__(
        self, rows: Sequence[Mapping[str, Any]], shown: Sequence[Mapping[str, str]] | None = None
    ) -> None:
        self._rows = list(rows)
        self._shown = list(shown) if shown is not None else [_as_text(row) for row in rows]
        self.columns = list(dict.fromkeys(name for row in self._shown for name in row))

    @overload
    def __getitem__(self, index: int) -> Mapping[str, Any]: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Mapping[str, Any]]: ...

    def __getitem__(self, index: int | slice) -> Mapping[str, Any] | Sequence[Mapping[str, Any]]:
        return self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        if not self._rows:
            return "no rows"
        cells = self._cells()
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = [
            "  ".join(
                text.ljust(width) if place == 0 else text.rjust(width)
                for place, (text, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in cells
        ]
        return "\n".join([lines[0], "─" * (sum(widths) + 2 * len(widths) - 2), *lines[1:]])

    def _cells(self) -> list[list[str]]:
        """The head, then the rows."""
        return [
            self.columns,
            *([row.get(name, "") for name in self.columns] for row in self._shown),
        ]

    def _repr_html_(self) -> str:
        head, *body = [
            "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row)
            for tag, row in zip(["th", *["td"] * len(self)], self._cells(), strict=True)
        ]
        rows = "".join(f"<tr>{row}</tr>" for row in body)
        return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"

    def to_pandas(self) -> Any:
        """The values as a data frame.

        Raises:
            ConfigError: If pandas is not installed.
        """
        try:
            import pandas
        except ImportError:
            raise ConfigError("to_pandas() needs pandas: pip install pandas") from None
        return pandas.DataFrame(self._rows)

    def to_latex(self) -> str:
        """The text as a LaTeX tabular; needs the package booktabs."""
        head, *body = [" & ".join(map(_latex, row)) + r" \\" for row in self._cells()]
        sides = "l" + "r" * (len(self.columns) - 1)
        return "\n".join(
            [
                rf"\begin{{tabular}}{{{sides}}}",
                r"\toprule",
                head,
                r"\midrule",
                *body,
                r"\bottomrule",
                r"\end{tabular}",
                "",
            ]
        )


def comparison(rows: Sequence[Summary], metric: str) -> Table:
    """One row per method and condition: mean ± standard deviation over seeds, and difference."""
    factor, digits, unit = (100, 1, " %") if is_share(metric) else (1, 3, "")
    compared = any(row.against is not None for row in rows)
    values: list[dict[str, Any]] = []
    shown: list[dict[str, str]] = []
    for row in rows:
        mean, deviation = row.values.get(metric, (None, None))
        loss, loss_deviation = row.values.get("loss", (None, None))
        found = None if row.against is None else row.against.difference
        own: dict[str, Any] = {"method": row.method}
        text = {"method": row.method}
        if any(other.condition for other in rows):
            own["condition"] = text["condition"] = row.condition
        own |= {metric: mean, f"{metric} sd": deviation}
        text[metric + unit] = _mean(mean, deviation, factor, digits)
        if compared:
            own["difference"] = None if found is None else found.mean
            own["low"] = None if found is None else found.low
            own["high"] = None if found is None else found.high
            text["difference"] = "–" if found is None else f"{found.mean * factor:+.{digits}f}"
            if (
                found is not None
                and found.pairs >= FEWEST_PAIRS
                and found.low is not None
                and found.high is not None
            ):
                low, high = found.low * factor, found.high * factor
                text["difference"] += f" [{low:+.{digits}f}, {high:+.{digits}f}]"
        if metric != "loss":
            own |= {"loss": loss, "loss sd": loss_deviation}
            text["loss"] = _mean(loss, loss_deviation, 1, 3)
        own |= {"seeds": len(row.seeds), "rounds": row.rounds}
        text |= {"seeds": str(len(row.seeds)), "rounds": str(row.rounds)}
        values.append(own)
        shown.append(text)
    return Table(values, shown)


def _mean(mean: float | None, deviation: float | None, factor: float, digits: int) -> str:
    if mean is None:
        return "–"
    around = "" if deviation is None else f" ± {deviation * factor:.{digits}f}"
    return f"{mean * factor:.{digits}f}{around}"


def _as_text(row: Mapping[str, Any]) -> dict[str, str]:
    return {
        name: f"{value:.4g}" if isinstance(value, float) else str(value)
        for name, value in row.items()
        if value is not None
    }


def _latex(text: str) -> str:
    return "".join(_LATEX.get(sign, sign) for sign in text)
