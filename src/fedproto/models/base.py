"""What a model is: an encoder that gives features and a head that classifies them."""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from fedproto.errors import TrainingError, reason_of
from fedproto.options import Options, Registry, option
from fedproto.rng import Purpose, seeded, torch_seed


class FeatureModel(nn.Module, abc.ABC):
    """The paper's ``M = C ∘ E``: subclasses give the encoder and the classifier."""

    @abc.abstractmethod
    def features(self, x: Tensor) -> Tensor:
        """The encoder E: inputs to features."""

    @abc.abstractmethod
    def head(self, features: Tensor) -> Tensor:
        """The classifier C: features to scores before the softmax."""

    def forward(self, x: Tensor) -> Tensor:
        """Scores of a batch."""
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
    """What a function builds while PyTorch's generator stands where a run's seed puts it."""
    with seeded(torch_seed(seed, Purpose.MODEL)):
        return build()


def draw_glorot(model: nn.Module) -> None:
    """Draws all weights anew: ``U(−a, a)`` with ``a = √(6 / (fan_in + fan_out))``, biases zero.

    Scales and shifts of normalising layers stay one and zero.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def declares_features(model: nn.Module) -> bool:
    """Whether a module has a method ``features(x)``; a layer of that name says nothing."""
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
        " or the one whose output are the features with_features(model, layer='...');"
        f" {layers_in_words(model)}"
    )


def layers_in_words(model: nn.Module, most: int = 30) -> str:
    """The layers that features could be taken from; of many only the outermost."""
    named = [(name, layer) for name, layer in model.named_modules() if name]
    depth = max((name.count(".") for name, _ in named), default=0)
    while depth and sum(name.count(".") <= depth for name, _ in named) > most:
        depth -= 1
    shown = [(name, layer) for name, layer in named if name.count(".") <= depth]
    listed = ", ".join(f"{name} ({type(layer).__name__})" for name, layer in shown)
    return f"its layers: {listed or 'none'}"


def head_of(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """A model's classifier.

    Raises:
        TrainingError: If its scores are no function of its features alone.
    """
    head = getattr(model, "head", None)
    if callable(head):
        return cast("Callable[[Tensor], Tensor]", head)
    raise TrainingError(
        f"{type(model).__name__} has no head(features), which the strategy needs; name the layer"
        f" that gives the logits: with_features(model, head='...'); {layers_in_words(model)}"
    )


def class_rows(model: nn.Module, x: Tensor, num_classes: int) -> tuple[str, ...]:
    """Names of the parameters that give the logits, one row per class; empty where there are none.

    They are those of the last layer that a batch passes on its way to the logits, if it is dense
    or a convolution: its rows are the classes, whatever the model calls it. A model that computes
    its logits in another way says so by a method ``last_layer()``.
    """
    named = getattr(model, "last_layer", None)
    last = named() if callable(named) else _last_layer(model, x)
    weight = getattr(last, "weight", None)
    if not isinstance(last, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d) or weight is None:
        return ()
    own = {id(tensor) for tensor in last.parameters(recurse=False)}
    names = tuple(name for name, tensor in model.named_parameters() if id(tensor) in own)
    return names if len(weight) == num_classes else ()


def _last_layer(model: nn.Module, x: Tensor) -> nn.Module | None:
    """The last layer with parameters that the logits of a batch depend on."""
    passed: list[nn.Module] = []

    def note(layer: nn.Module, args: Any, output: Any) -> None:
        del args, output
        passed.append(layer)

    hooks = [
        layer.register_forward_hook(note)
        for layer in model.modules()
        if not list(layer.children()) and list(layer.parameters())
    ]
    try:
        with torch.enable_grad():
            total = model(x).sum()
    finally:
        for hook in hooks:
            hook.remove()
    for layer in reversed(passed):
        trained = [tensor for tensor in layer.parameters() if tensor.requires_grad]
        if not trained or not total.requires_grad:
            return layer
        found = torch.autograd.grad(total, trained, retain_graph=True, allow_unused=True)
        if any(one is not None for one in found):
            return layer
    return None
