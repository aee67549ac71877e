"""Looking into a run from Python: what its model knows, and what it says of new inputs."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedproto.api.predictor import ClassPrediction, MapPrediction, Predictor, pictures_in
from fedproto.api.result import Result
from fedproto.errors import DataError
from fedproto.report import analysing
from fedproto.report.analysing import open_subject


def analyse(
    result: Result,
    what: Iterable[str] | None = None,
    *,
    reference: str | Path | None = None,
    samples: int = 2000,
    pictures: int = 4,
    measures: Iterable[str] = (),
) -> dict[str, Any]:
    """Looks into a run's newest model, as ``fedproto analyse`` does.

    Args:
        result: The run; files go to the folder ``analysis`` of its directory, where it has one.
        what: Which parts (scores, calibration, measures, embedding, maps); all by default.
        reference: Directory of a finished run of strategy 'centralized', for MMD.
        samples: Features in the t-SNE at most.
        pictures: How many held-out pictures get maps.
        measures: Of the measures only these.

    Returns:
        What each part found, by name, and its main figures as ``facts``.

    Raises:
        FedprotoError: If a part is unknown, or the run's data or model are not at hand.
    """
    request = analysing.AnalysisRequest(
        what=tuple(analysing.PARTS if what is None else what),
        reference=None if reference is None else str(reference),
        samples=samples,
        pictures=pictures,
        measures=tuple(measures),
    )
    build = result.build
    subject = open_subject(
        result.directory(), result.federation, None if build is None else build()
    )
    facts = analysing.analyse(subject, request)
    return {"facts": facts, **analysing.read_parts(result.directory(), request.what)}


def predict(result: Result, images: Any) -> list[ClassPrediction] | list[MapPrediction]:
    """What a run's model says of new inputs.

    Args:
        result: The run.
        images: Inputs ``[N, ...]`` as an array or tensor; or a picture's path, a folder of
            pictures, or a list of such.

    Returns:
        One prediction each: probabilities of the classes, or maps where the task is segmentation.

    Raises:
        DataError: If the inputs cannot be read, or have another shape than those of the training.
    """
    predictor = Predictor(result)
    paths = [images] if isinstance(images, str | Path) else images
    if isinstance(paths, list | tuple) and all(isinstance(each, str | Path) for each in paths):
        found = pictures_in(Path(each) for each in paths)
        if predictor.segments:
            return [predictor.segment(each) for each in found]
        return [predictor.classify(each) for each in found]
    try:
        inputs: Tensor = torch.as_tensor(images)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"inputs must be an array, a tensor or paths: {error}") from None
    return predictor.inputs(inputs)
