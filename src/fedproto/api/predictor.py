"""A trained run applied to new inputs."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedproto.api.result import Result
from fedproto.data.images import SUFFIXES, is_picture, open_image, pixels
from fedproto.data.samples import MappedSamples
from fedproto.data.segmentation import fitted
from fedproto.data.tasks import task_named
from fedproto.disk.files import explained, open_regular, read_limited
from fedproto.engines.base import EngineOptions
from fedproto.engines.layers import estimate, statistics_names
from fedproto.errors import ConfigError, DataError
from fedproto.measures.uncertainty import shannon_entropy, upsampled

MAP = "-segmentation.png"
"""The end of the name of a picture's label map."""


@dataclass(frozen=True)
class ClassPrediction:
    """The prediction for an image.

    Attributes:
        probabilities: Per class, by name.
        entropy: Of these, in nats; 0 is certain.
    """

    probabilities: dict[str, float]
    entropy: float


@dataclass(frozen=True)
class MapPrediction:
    """The prediction for every pixel of an image, in the image's size.

    Attributes:
        labels: The classes ``[H, W]``.
        shares: Share of the pixels per class that was found, by name.
    """

    labels: NDArray[np.uint8]
    shares: dict[str, float]


class Predictor:
    """A run's newest model and how its inputs are prepared.

    Attributes:
        per_pixel: Whether its predictions are maps.

    Raises:
        StoreError: If no weights were kept.
        ConfigError: If the run's data or model were given in Python, and are not at hand.
        DataError: If the run's data cannot be loaded.
    """

    def __init__(self, result: Result) -> None:
        self._about = result.about_data()
        if self._about.get("mean") is None:  # not known where the run was recorded
            self._about = result.federation.about()
        if self._about["mean"] is None:
            raise DataError(
                "inputs were normalised by statistics that the run does not contain; predict where"
                " its data is"
            )
        numbers = map(str, range(self._about["num_classes"]))
        self._names: list[str] = self._about["class_names"] or list(numbers)
        self.per_pixel = task_named(self._about["task"]).label_maps
        self._device = EngineOptions().torch_device()
        self._model = copy.deepcopy(result.model).to(self._device)
        state = result.state
        assert state is not None  # noqa: S101 - the model has its weights
        self._estimates = not statistics_names(self._model) <= {*state.params, *state.buffers}

    def inputs(self, inputs: Tensor) -> list[ClassPrediction] | list[MapPrediction]:
        """Predictions for inputs ``[N, ...]``; bytes are divided by 255."""
        shape = self._about["input_shape"]
        if list(inputs.shape[1:]) != shape:
            raise DataError(
                f"inputs must have the shape [N, {str(shape)[1:]}, not {list(inputs.shape)}"
            )
        x = self._normalised(inputs)
        if not self.per_pixel:
            return self._classified(x)
        size = (x.shape[-2], x.shape[-1])
        return self._mapped(x, size, size)

    def picture(self, path: Path) -> ClassPrediction | MapPrediction:
        """What a picture shows.

        For maps it is resized so that its longer side has the size of the training images, and
        padded with zeros.
        """
        shape = self._about["input_shape"]
        if len(shape) != 3:
            raise ConfigError(f"the run was not trained on images but on {self._about['name']}")
        channels, height, width = shape
        with explained(path, " cannot be read", "", DataError), open_regular(path) as file:
            picture = open_image(read_limited(file, path), path)
        if not self.per_pixel:
            return self._classified(self._bytes(pixels(picture, channels, (width, height))))[0]
        fit_width, fit_height = fitted(picture.size, min(height, width))
        small = self._bytes(pixels(picture, channels, (fit_width, fit_height)))
        x = small.new_zeros((1, channels, height, width))
        x[..., :fit_height, :fit_width] = small
        return self._mapped(x, (fit_height, fit_width), (picture.height, picture.width))[0]

    @torch.no_grad()
    def _mapped(
        self, x: Tensor, part: tuple[int, int], size: tuple[int, int]
    ) -> list[MapPrediction]:
        """Maps of inputs, of which a part, from the upper left corner, is shown at a size."""
        found = []
        for logits in self._logits(x):
            whole = upsampled(logits, (x.shape[-2], x.shape[-1]))[:, : part[0], : part[1]]
            labels = upsampled(whole, size).argmax(dim=0).cpu().numpy().astype(np.uint8)
            present, counts = np.unique(labels, return_counts=True)
            shares = {
                self._names[label]: float(count / labels.size)
                for label, count in zip(present, counts, strict=True)
            }
            found.append(MapPrediction(labels, shares))
        return found

    @torch.no_grad()
    def _classified(self, x: Tensor) -> list[ClassPrediction]:
        probabilities = torch.softmax(self._logits(x), dim=1)
        return [
            ClassPrediction(
                dict(zip(self._names, each.tolist(), strict=True)),
                float(shannon_entropy(each.unsqueeze(0))),
            )
            for each in probabilities
        ]

    def _logits(self, x: Tensor) -> Tensor:
        if self._estimates:
            estimate(self._model, [x])
        logits: Tensor = self._model(x)
        return logits

    def _bytes(self, picture: NDArray[np.uint8]) -> Tensor:
        """Bytes ``[channels, H, W]`` as an input ``[1, channels, H, W]``."""
        return self._normalised(torch.from_numpy(np.array(picture)).unsqueeze(0))

    def _normalised(self, inputs: Tensor) -> Tensor:
        mean, std = tuple(self._about["mean"]), tuple(self._about["std"])
        same = MappedSamples(inputs, torch.zeros(len(inputs)), mean, std, device=self._device)
        return same.batch(np.arange(len(inputs)))[0]


def pictures_in(paths: Iterable[Path]) -> list[Path]:
    """Files as they are; of folders the pictures in and below them, in alphabetical order.

    Maps that were written beside pictures are passed over.

    Raises:
        DataError: If a folder holds no picture.
    """
    found: list[Path] = []
    for path in paths:
        if not path.is_dir():
            found.append(path)
            continue
        below = path.rglob("*")
        inside = sorted(e for e in below if is_picture(e.name) and not e.name.endswith(MAP))
        if not inside:
            raise DataError(f"folder {path} contains no image ({', '.join(SUFFIXES)})")
        found += inside
    return found


def predict(result: Result, images: Any) -> Sequence[ClassPrediction | MapPrediction]:
    """Applies a run's newest model to new inputs.

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
        return [predictor.picture(each) for each in pictures_in(map(Path, paths))]
    try:
        inputs: Tensor = torch.as_tensor(images)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"inputs must be an array, a tensor or paths: {error}") from None
    return predictor.inputs(inputs)
