"""What a trained run says of a picture: classes, and how sure it is of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedproto.analysis.entropy import feature_entropy, shannon_entropy, softmax_entropy, upsampled
from fedproto.batch_norm import estimate, statistics_names
from fedproto.data.base import data_root
from fedproto.data.federation import Federation
from fedproto.data.images import open_image, pixels
from fedproto.data.masks import fitted
from fedproto.data.samples import MappedSamples
from fedproto.engines.base import EngineOptions
from fedproto.engines.reference import load_state
from fedproto.errors import ConfigError, DataError, StoreError
from fedproto.models.base import ModelOptions, build_model, features_of
from fedproto.store import RunStore
from fedproto.types import ServerState


@dataclass(frozen=True)
class ClassPrediction:
    """What a picture shows.

    Attributes:
        probabilities: Per class, by name.
        entropy: Of these, in nats; 0 is certain.
    """

    probabilities: dict[str, float]
    entropy: float


@dataclass(frozen=True)
class MapPrediction:
    """What every pixel of a picture shows, all at the picture's own size.

    Attributes:
        labels: The classes ``[H, W]``.
        shares: Share of the pixels per class that was found, by name.
        softmax_entropy: ``H_S`` divided by its largest possible value, ``[H, W]``.
        feature_entropy: ``H_E`` divided by its largest possible value, ``[H, W]``.
    """

    labels: NDArray[np.uint8]
    shares: dict[str, float]
    softmax_entropy: NDArray[np.float64]
    feature_entropy: NDArray[np.float64]


class Predictor:
    """A run's newest model and how its pictures are prepared.

    Args:
        run: The run's directory.

    Raises:
        StoreError: If there is no run, or it has no checkpoint.
        ConfigError: If the run's data or model were given in Python, or are no pictures.
        DataError: If the run's data cannot be loaded.
    """

    def __init__(self, run: Path) -> None:
        store = RunStore.open(run)
        config = store.config
        if config.data is None or config.model is None:
            raise ConfigError(f"{run} was started from Python with own data or an own module")
        state = store.load_checkpoint()
        if state is None:
            raise StoreError(f"{run} has no checkpoint yet; nothing to predict with")
        self.federation: Federation = config.data.load(data_root())
        if len(self.federation.input_shape) != 3:
            raise ConfigError(f"{run} was not trained on pictures but on {self.federation.name}")
        self._device = EngineOptions().torch_device()
        self._model = self._build(config.model.untrained(), state).to(self._device)

    def classify(self, path: Path) -> ClassPrediction:
        """Probabilities of the classes of a picture.

        Raises:
            DataError: If the picture cannot be read.
        """
        channels, height, width = self.federation.input_shape
        picture = open_image(_content(path), path)
        x = self._normalised(pixels(picture, channels, (width, height)))
        scores, _ = self._run(x)
        probabilities = torch.softmax(scores, dim=1)
        names = [self._name(place) for place in range(self.federation.num_classes)]
        return ClassPrediction(
            dict(zip(names, probabilities[0].tolist(), strict=True)),
            float(shannon_entropy(probabilities)),
        )

    def segment(self, path: Path) -> MapPrediction:
        """Classes and entropies of the pixels of a picture.

        The picture is prepared as the training images are: its longer side is brought to their size
        and the rest filled up with zeros.

        Raises:
            DataError: If the picture cannot be read.
        """
        channels, height, width = self.federation.input_shape
        picture = open_image(_content(path), path)
        fit_width, fit_height = fitted(picture.size, min(height, width))
        small = self._normalised(pixels(picture, channels, (fit_width, fit_height)))
        x = small.new_zeros((1, channels, height, width))
        x[..., :fit_height, :fit_width] = small
        scores, features = self._run(x)

        def at_own_size(maps: Tensor) -> Tensor:
            full = upsampled(maps, (height, width))[:, :fit_height, :fit_width]
            return upsampled(full, (picture.height, picture.width))

        scores = at_own_size(scores[0]).unsqueeze(0)
        labels = scores.argmax(dim=1)[0].cpu().numpy().astype(np.uint8)
        found, counts = np.unique(labels, return_counts=True)
        return MapPrediction(
            labels=labels,
            shares={
                self._name(int(place)): float(count / labels.size)
                for place, count in zip(found, counts, strict=True)
            },
            softmax_entropy=_relative(softmax_entropy(scores), scores.shape[1]),
            feature_entropy=_relative(at_own_size(feature_entropy(features)), features.shape[1]),
        )

    def _build(self, options: ModelOptions, state: ServerState) -> nn.Module:
        federation = self.federation
        model = build_model(options, federation.input_shape, federation.num_classes, seed=0)
        load_state(model, state)
        self._estimates = not statistics_names(model) <= {*state.params, *state.buffers}
        return model.eval()

    @torch.no_grad()
    def _run(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self._estimates:
            estimate(self._model, [x])
        return self._model(x), features_of(self._model)(x)

    def _normalised(self, picture: NDArray[np.uint8]) -> Tensor:
        """Bytes ``[channels, H, W]`` as an input ``[1, channels, H, W]``."""
        stored = torch.from_numpy(np.array(picture)).unsqueeze(0)
        like = self.federation.samples
        mean, std = (like.mean, like.std) if isinstance(like, MappedSamples) else ((), ())
        one = MappedSamples(stored, torch.zeros(1), mean, std, device=self._device)
        return one.batch(np.zeros(1, dtype=np.int64))[0]

    def _name(self, place: int) -> str:
        names = self.federation.class_names
        return names[place] if place < len(names) else str(place)


def _relative(entropy: Tensor, channels: int) -> NDArray[np.float64]:
    """Entropies ``[1, H, W]`` as shares of the largest possible one."""
    return np.asarray(entropy[0].double().cpu().numpy() / np.log(max(channels, 2)))


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"picture {path} cannot be read: {error.strerror or error}") from None
