"""Commands that use a trained model: predict, export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from fedproto.api.analysing import save_labels
from fedproto.api.export import export, loading_code
from fedproto.api.predictor import MapPrediction, Predictor, pictures_in
from fedproto.api.training import load
from fedproto.cli.terminal import AsJson, Best, echo
from fedproto.disk.files import Folder, explained
from fedproto.errors import ConfigError, DataError

_SHOWN = 5


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
    images = pictures_in(images)
    names = [image.stem for image in images]
    if out is not None and len(set(names)) < len(names):
        raise ConfigError(f"--out {out}: two of the images have the same name")
    predictor = Predictor(load(run, best=best))
    if out is not None:
        with explained(out, " cannot be made", "", DataError):
            out.mkdir(parents=True, exist_ok=True)
    for image in images:
        found = predictor.picture(image)
        facts: dict[str, Any]
        if isinstance(found, MapPrediction):
            file = (out or image.parent) / f"{image.stem}-segmentation.png"
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
