"""Tables of results: printed as text, written as Markdown, LaTeX or CSV."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from fedproto.data.tasks import is_share
from fedproto.errors import ConfigError, counted, printable
from fedproto.measures.scores import CLIENT_SCORES, PERSONAL_SCORES
from fedproto.report.statistics import FEWEST_PAIRS
from fedproto.report.summary import Summary

_LATEX = {
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "α": r"$\alpha$",
    "δ": r"$\delta$",
    "−": "$-$",
    "–": "--",
    "<": "$<$",
    ">": "$>$",
    "·": r"$\cdot$",
}


class Table(list[Mapping[str, Any]]):
    """Rows of plain values under named columns, the least important ones last.

    Args:
        rows: The values by column.
        shown: The same as text, where it differs from the values.
        sections: One value per row; a line is drawn where it changes.
        title: Printed above the table.
        caption: Printed below it.
    """

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]],
        shown: Sequence[Mapping[str, str]] | None = None,
        *,
        sections: Sequence[str] = (),
        title: str = "",
        caption: str = "",
    ) -> None:
        super().__init__(rows)
        self._shown = list(shown) if shown is not None else [_as_text(row) for row in self]
        self.columns = list(dict.fromkeys(name for row in self._shown for name in row))
        self.sections, self.title, self.caption = list(sections), title, caption

    def cells(self) -> list[list[str]]:
        """The head and the rows as text, control characters escaped."""
        rows = [[row.get(name, "") for name in self.columns] for row in self._shown]
        return [[printable(cell) for cell in row] for row in [self.columns, *rows]]

    def begins_section(self, index: int) -> bool:
        """Whether a line is drawn above a row."""
        return index > 0 and len(set(self.sections[index - 1 : index + 1])) > 1

    def __repr__(self) -> str:
        if not self:
            return "no rows"
        cells = self.cells()
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = [
            "  ".join(
                text.ljust(width) if place == 0 else text.rjust(width)
                for place, (text, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in cells
        ]
        return "\n".join([lines[0], "─" * (sum(widths) + 2 * len(widths) - 2), *lines[1:]])

    def to_pandas(self) -> Any:
        """The values as a data frame.

        Raises:
            ConfigError: If pandas is not installed.
        """
        try:
            import pandas
        except ImportError:
            raise ConfigError("to_pandas() needs pandas: pip install pandas") from None
        return pandas.DataFrame(list(self))

    def to_csv(self) -> str:
        """The values as CSV; text that could be a spreadsheet's formula begins with a quote."""
        names = list(dict.fromkeys(name for row in self for name in row))
        content = io.StringIO()
        writer = csv.writer(content, lineterminator="\n")
        writer.writerow(map(csv_cell, names))
        writer.writerows([csv_cell(row.get(name, "")) for name in names] for row in self)
        return content.getvalue()

    def to_markdown(self) -> str:
        """The text as a Markdown table, with title and caption below."""
        head, *rows = [[as_markdown(cell) for cell in row] for row in self.cells()]
        rule = ["---", *["---:"] * (len(self.columns) - 1)]
        lines = [f"| {' | '.join(cells)} |" for cells in [head, rule, *rows]]
        below = as_markdown("; ".join(filter(None, [self.title, self.caption])))
        return "\n".join([*lines, *(["", f"{below}."] if below else [])]) + "\n"

    def to_latex(self) -> str:
        """The text as a LaTeX tabular; needs the package booktabs."""
        head, *body = [" & ".join(map(_latex, row)) + r" \\" for row in self.cells()]
        lines = [rf"\begin{{tabular}}{{l{'r' * (len(self.columns) - 1)}}}", r"\toprule", head]
        lines.append(r"\midrule")
        for index, row in enumerate(body):
            lines += [r"\midrule"] if self.begins_section(index) else []
            lines.append(row)
        lines += [r"\bottomrule", r"\end{tabular}"]
        below = "; ".join(filter(None, [self.title, self.caption]))
        return "\n".join([*lines, *([f"% {_latex(below)}"] if below else [])]) + "\n"


def as_markdown(text: object) -> str:
    """Untrusted text escaped for Markdown, in one line."""
    return re.sub(r"[\\`*_\[\]<>#|~!$&{}:@]", r"\\\g<0>", printable(text))


def csv_cell(value: Any) -> Any:
    """A value for CSV; text that a spreadsheet would take for a formula begins with a quote."""
    if not isinstance(value, str):
        return value
    text = printable(value)
    return f"'{text}" if text.lstrip()[:1] in tuple("=+-@＝＋－＠") else text


def comparison(
    rows: Sequence[Summary], metric: str, target: float | None = None, *, brief: bool = False
) -> Table:
    """One row per method and condition: mean ± standard deviation over seeds, and difference.

    Scores between 0 and 1 are shown as percentages, losses and margins as they are.

    Args:
        rows: The methods under their conditions.
        metric: The score to compare by.
        target: Also show when this score is reached.
        brief: Only score, difference, loss, seeds and rounds.
    """
    factor, digits, unit = (100, 1, " %") if is_share(metric) else (1, 3, "")
    compared = [row.against for row in rows if row.against is not None]
    tested = any(each.difference.pairs >= FEWEST_PAIRS for each in compared)
    clients = {} if brief else CLIENT_SCORES | PERSONAL_SCORES
    scored = [name for name in clients.values() if any(name in row.values for row in rows)]

    def cells(row: Summary) -> dict[str, str]:
        found = _difference(row, factor, digits, tested=tested) if compared else {}
        if target is not None:
            found[f"rounds to {target:g}"] = _mean(row, "rounds to target", digits=0)
        found |= {f"{name} %": _mean(row, name, 100, 1) for name in scored}
        found["seeds"] = str(len(row.seeds))
        planned = f" of {row.planned}" if row.rounds < row.planned else ""
        found["rounds"] = f"{row.rounds}{planned}"
        if metric != "loss":
            found["loss"] = _mean(row, "loss")
        if not brief:
            name = "mean over rounds"
            found[name + unit] = _mean(row, name, factor, digits)
            traffic = row.values["bytes up"][0] + row.values["bytes down"][0]
            found["MB"] = f"{1e-6 * traffic:.1f}"
            found["wall s"] = _mean(row, "seconds", digits=0, spread=False)
        score = _free(metric + unit, {"method", *found})
        return {"method": row.title, score: _mean(row, metric, factor, digits), **found}

    return Table(
        [_values(row) for row in rows],
        [cells(row) for row in rows],
        sections=[row.condition for row in rows],
        title=f"{metric} and loss: mean over the last 10 % of the rounds",
        caption=_caption(rows, metric),
    )


def _free(metric: str, taken: Collection[str]) -> str:
    """A column's name for a metric, which may be called like another column."""
    return f"metric {metric}" if metric in taken else metric


def _values(row: Summary) -> dict[str, Any]:
    """A row for programs: scores as fractions, traffic in bytes, time in seconds."""
    against = row.against
    found = None if against is None else against.difference
    values: dict[str, Any] = {
        "method": row.method,
        "condition": row.condition,
        "seeds": " ".join(map(str, row.seeds)),
        "rounds": row.rounds,
        "baseline": None if against is None else against.baseline,
        "difference": None if found is None else found.mean,
        "low": None if found is None else found.low,
        "high": None if found is None else found.high,
        "p": None if against is None else against.corrected_p,
        "verdict": None if against is None else against.verdict,
    }
    for name, (mean, deviation) in row.values.items():
        values |= {_free(name, values): mean, f"{name} sd": deviation}
    return values | {"directories": " ".join(row.directories)}


def _caption(rows: Sequence[Summary], metric: str) -> str:
    parts = []
    if any(len(row.seeds) > 1 for row in rows):
        parts.append("±: sample standard deviation over seeds")
    compared = [row.against for row in rows if row.against is not None]
    if compared:
        baselines = " or ".join(dict.fromkeys(each.baseline for each in compared))
        parts.append(f"difference: from {baselines} on the same seeds")
        tests, margin = compared[0].comparisons, compared[0].margin
        if tests:
            parts.append(f"p: corrected for {counted(tests, 'comparison')} (Holm)")
            within = ""
            if margin is not None:
                unit = "" if not is_share(metric) else " point" if margin == 0.01 else " points"
                size = 100 * margin if unit else margin
                within = f", equivalent: interval within ± {size:g}{unit}"
            parts.append(f"better or worse: p < 0.05{within}")
        if any(each.difference.pairs < FEWEST_PAIRS for each in compared):
            parts.append(f"fewer than {FEWEST_PAIRS} seeds decide nothing")
        if any(each.at_round is not None for each in compared):
            parts.append("@ n: unfinished runs, compared at round n")
    parts += dict.fromkeys(caution for row in rows for caution in row.cautions)
    return "; ".join(parts)


def _mean(
    row: Summary, name: str, factor: float = 1, digits: int = 3, *, spread: bool = True
) -> str:
    if name not in row.values:
        return "–"
    mean, deviation = row.values[name]
    around = "" if deviation is None or not spread else f" ± {deviation * factor:.{digits}f}"
    return f"{mean * factor:.{digits}f}{around}"


def _difference(row: Summary, factor: float, digits: int, *, tested: bool) -> dict[str, str]:
    """The cells about the difference from the baseline."""
    cells = dict.fromkeys(("difference", "95 % interval", "p") if tested else ("difference",), "–")
    against = row.against
    if against is None:
        return cells
    found, p = against.difference, against.corrected_p
    cells["difference"] = f"{found.mean * factor:+.{digits}f}"
    if tested:
        cells["difference"] += f" {against.verdict}"
        if found.low is not None and found.high is not None:
            low, high = found.low * factor, found.high * factor
            cells["95 % interval"] = f"{low:+.{digits}f} to {high:+.{digits}f}"
        if p is not None:
            cells["p"] = "< 0.001" if p < 0.001 else f"{p:.3f}"
    if against.at_round is not None:
        cells["difference"] += f" @ {against.at_round}"
    return cells


def _as_text(row: Mapping[str, Any]) -> dict[str, str]:
    return {
        name: f"{value:.4g}" if isinstance(value, float) else str(value)
        for name, value in row.items()
        if value is not None
    }


def _latex(text: str) -> str:
    """Text for LaTeX; a hyphen that stands for a minus becomes one."""
    return re.sub(r"(?<!\S)-(?=\d)", "$-$", "".join(_LATEX.get(sign, sign) for sign in text))
