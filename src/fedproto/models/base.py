"""Models: an encoder that gives features, and a head that gives their logits."""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Literal, cast

from torch import Tensor, nn

from fedproto.errors import TrainingError, reason_of
from fedproto.options import Options, Registry, option
from fedproto.rng import Purpose, seeded, torch_seed


class FeatureModel(nn.Module, abc.ABC):
    """The paper's ``M = C ∘ E``: subclasses give the encoder and the classifier.

    The classifier is a layer named `classifier`, unless a subclass overrides `head`.
    """

    classifier: nn.Module

    @abc.abstractmethod
    def features(self, x: Tensor) -> Tensor:
        """The encoder E: inputs to features."""

    def head(self, features: Tensor) -> Tensor:
        """The classifier C: features to logits."""
        logits: Tensor = self.classifier(features)
        return logits

    def forward(self, x: Tensor) -> Tensor:
        """Logits of a batch."""
        return self.head(self.features(x))


@dataclass(frozen=True)
class ModelOptions(Options, abc.ABC):
    """An architecture."""

    _: KW_ONLY
    init: Literal["torch", "glorot"] = option(
        "torch",
        "initial weights: PyTorch's (or the architecture's own), or Glorot's uniform ones with zero"
        " bias, as TensorFlow draws them",
    )

    @abc.abstractmethod
    def build(self, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        """The model for inputs of a shape and a number of classes.

        Raises:
            TrainingError: If the architecture cannot take such inputs.
        """

    def untrained(self) -> ModelOptions:
        """The same architecture for weights from a checkpoint: none from elsewhere are loaded."""
        return self

    def check_images(self, input_shape: tuple[int, ...], smallest: int = 1) -> None:
        """Raises a `TrainingError` unless inputs are images of at least some pixels a side."""
        if len(input_shape) != 3 or min(input_shape[1:]) < smallest:
            raise TrainingError(
                f"model '{MODELS.name_of(type(self))}' needs images (channels, height, width) of at"
                f" least {smallest}×{smallest} pixels, not inputs of shape {input_shape}; use model"
                " 'mlp'"
            )


MODELS: Registry[ModelOptions] = Registry("model", "fedproto.models")


def build_model(
    options: ModelOptions, input_shape: tuple[int, ...], num_classes: int, seed: int
) -> nn.Module:
    """Builds a model whose initial weights depend on a run's seed alone."""

    def build() -> nn.Module:
        model = options.build(input_shape, num_classes)
        if options.init == "glorot":
            draw_glorot(model)
        return model

    try:
        return under_seed(seed, build)
    except (RuntimeError, MemoryError, OverflowError) as error:
        raise TrainingError(f"the model cannot be built: {reason_of(error)}") from None


def under_seed(seed: int, build: Callable[[], nn.Module]) -> nn.Module:
    """Builds a module with PyTorch's generator seeded by a run's seed."""
    with seeded(torch_seed(seed, Purpose.MODEL)):
        return build()


def draw_glorot(model: nn.Module) -> None:
    """Draws all weights again: ``U(−a, a)`` with ``a = √(6 / (fan_in + fan_out))``, biases zero.

    Scales and shifts of normalising layers stay one and zero.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def declares_features(model: nn.Module) -> bool:
    """Whether a module has a method ``features(x)``; a layer of that name does not count."""
    found = getattr(model, "features", None)
    return callable(found) and not isinstance(found, nn.Module)


def features_of(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """A model's encoder: a batch to features, ``[B, D]`` or ``[B, D, H, W]``.

    Raises:
        TrainingError: If it gives no features; the message says how to name them.
    """
    if declares_features(model):
        return cast("Callable[[Tensor], Tensor]", model.features)
    raise TrainingError(
        f"{type(model).__name__} has no features: its logits are not the output of a linear layer"
        " or a 1×1 convolution; name the layer that gives them with_features(model, head='...'),"
        f" or give it a method features(x); {layers_in_words(model)}"
    )


def layers_in_words(model: nn.Module, most: int = 30) -> str:
    """The possible layers of features; of many only the outermost."""
    named = [(name, type(layer).__name__) for name, layer in model.named_modules() if name]
    if len(named) > most:
        named = [(name, kind) for name, kind in named if "." not in name]
    listed = ", ".join(f"{name} ({kind})" for name, kind in named)
    return f"its layers: {listed or 'none'}"
