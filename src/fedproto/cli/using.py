"""Commands that use trained models: predict, export, analyse."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import typer

from fedproto.api.analysing import PARTS, analyse, save_labels
from fedproto.api.export import export, loading_code
from fedproto.api.predictor import MAP, MapPrediction, Predictor, pictures_in
from fedproto.api.table import Table
from fedproto.api.training import load
from fedproto.cli.terminal import AsJson, Best, Directories, echo, print_table
from fedproto.data import DataSource, Federation, data_root
from fedproto.disk.files import Folder, explained
from fedproto.errors import ConfigError, DataError, FedprotoError
from fedproto.measures.scores import CLIENT_SCORES
from fedproto.report.arrangement import arrange
from fedproto.report.results import find_runs

_SHOWN = 5
_COLUMNS = {
    **{
        prefix + score: f"{title} %"
        for score in ("accuracy", "miou")
        for prefix, title in CLIENT_SCORES.items()
    },
    "aggregate_mean_margin": "AMM",
    "dissimilarity": "dissimilarity",
    "mmd": "MMD²",
}
"""Columns of the table of an analysis."""


def predict(
    run: Annotated[Path, typer.Argument(help="Directory of a run.")],
    images: Annotated[list[Path], typer.Argument(help="Images, or folders of them.")],
    out: Annotated[
        Path | None, typer.Option(help="Folder for the maps; default: beside each image.")
    ] = None,
    best: Best = False,
    as_json: AsJson = False,
) -> None:
    """Apply a run's newest model to images.

    Segmentation writes label maps; classification prints probabilities and their entropy.
    """
    predictor, images = Predictor(load(run, best=best)), pictures_in(images)
    files = [(out or image.parent) / (image.stem + MAP) for image in images]
    if predictor.per_pixel and len(set(files)) < len(files):
        raise ConfigError("two of the images have the same name, and their maps would be one file")
    for image, file in zip(images, files, strict=True):
        found = predictor.picture(image)
        facts: dict[str, Any]
        if isinstance(found, MapPrediction):
            facts = {"classes": found.shares, "file": str(save_labels(found.labels, file))}
        else:
            facts = {"classes": found.probabilities, "entropy": found.entropy}
        echo(json.dumps({"image": str(image), **facts}) if as_json else _text(image, facts))


def _text(image: Path, facts: dict[str, Any]) -> str:
    largest = sorted(facts["classes"].items(), key=lambda item: -item[1])[:_SHOWN]
    line = f"{image}: " + ", ".join(f"{name} {share:.1%}" for name, share in largest)
    if "entropy" in facts:
        return f"{line}; entropy {facts['entropy']:.3f}"
    return f"{line}\nwrote {facts['file']}"


def export_run(
    run: Annotated[Path, typer.Argument(help="Directory of a run.")],
    out: Annotated[
        Path | None, typer.Option(help="Folder for the files; default: 'export' in the run.")
    ] = None,
    best: Best = False,
) -> None:
    """Write a run's newest weights, by the module's own names, with a model card."""
    result = load(run, best=best)
    if out is None:
        with explained(run, " cannot be written", "; choose another folder with --out"):
            out = Folder(run).make("export")
    for path in export(result, out):
        echo(f"wrote {path}")
    echo(f"\nTo load it:\n\n{loading_code(result)}")


def analyse_runs(
    directories: Directories,
    what: Annotated[
        list[str] | None,
        typer.Option(help=f"Compute this part or measure alone; repeatable: {', '.join(PARTS)}."),
    ] = None,
    reference: Annotated[
        Path | None, typer.Option(help="A finished run of strategy 'centralized', for MMD.")
    ] = None,
    samples: Annotated[
        int, typer.Option(min=4, help="Maximum number of features in the t-SNE.")
    ] = 2000,
    best: Best = False,
) -> None:
    """Analyse the newest models of runs; files go to the folder 'analysis' of each."""
    runs = find_runs(directories)
    titles = {group.runs[0].path: group.title for group in arrange(runs).split().groups}
    federation = cache(_federation)
    rows: list[dict[str, str]] = []
    failed: dict[str, FedprotoError] = {}  # what is wrong with all runs is said once
    for run in runs:
        try:
            result = load(run.path, data=federation(run.config.data), best=best)
            facts = analyse(result, what, reference=reference, samples=samples)["metrics"]
        except FedprotoError as error:
            failed.setdefault(str(error), error)
            continue
        cells = {
            column: f"{100 * facts[name]:.1f}" if column.endswith("%") else f"{facts[name]:.4g}"
            for name, column in _COLUMNS.items()
            if name in facts
        }
        rows.append({"run": titles[run.path], **cells})
        echo(f"wrote {run.path / 'analysis'}", err=True)
    if any(len(row) > 1 for row in rows):  # an embedding gives a picture, no numbers
        print_table(Table(rows))
    if failed:
        *others, last = failed.values()
        for failure in others:
            echo(f"error: {failure}", err=True)
        raise last


def _federation(source: DataSource | None) -> Federation | None:
    """The data; None for data that was given in Python."""
    try:
        return None if source is None else source.load(data_root())
    except FedprotoError as error:
        raise DataError(
            f"{error}; to analyse a run takes its data: do so where that is, or name its folder"
            " with --data-root ('fedproto predict' and 'fedproto export' do without)"
        ) from None
