"""Turning a user's module into one that gives features."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fedproto.errors import TrainingError, unknown_name
from fedproto.models.base import FeatureModel


def with_features(model: nn.Module, layer: str | None = None) -> nn.Module:
    """Gives a module a `features` method.

    Args:
        model: A plain `nn.Sequential`, or any module with a named layer to take features from.
        layer: Name of the layer whose output are the features, as in ``named_modules()``. A
            sequential model needs none: its last layer becomes the head.

    Raises:
        TrainingError: If no layer is given where one is needed, or there is none of that name.
    """
    if layer is None:
        if not isinstance(model, nn.Sequential) or len(model) < 2:
            raise TrainingError(
                f"name the layer of {type(model).__name__} whose output are the features:"
                " with_features(model, layer='...')"
            )
        return SequentialModel(model)
    names = [name for name, _ in model.named_modules() if name]
    if layer not in names:
        raise TrainingError(unknown_name("layer", layer, names))
    return LayerFeatures(model, layer)


class SequentialModel(FeatureModel):
    """A sequential model cut before its last layer."""

    def __init__(self, model: nn.Sequential) -> None:
        super().__init__()
        self.encoder = model[:-1]
        self.classifier = model[-1]

    def features(self, x: Tensor) -> Tensor:
        """All layers but the last."""
        features: Tensor = self.encoder(x)
        return features

    def head(self, features: Tensor) -> Tensor:
        """The last layer."""
        scores: Tensor = self.classifier(features)
        return scores


class LayerFeatures(nn.Module):
    """A module as it is, whose features are what one of its layers puts out."""

    def __init__(self, model: nn.Module, layer: str) -> None:
        super().__init__()
        self.model = model
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """The module's own scores."""
        scores: Tensor = self.model(x)
        return scores

    def features(self, x: Tensor) -> Tensor:
        """The layer's output; the forward pass ends there."""

        def catch(module: nn.Module, args: Any, output: Tensor) -> None:
            del module, args
            raise _ReachedLayerError(output)

        hook = self.model.get_submodule(self.layer).register_forward_hook(catch)
        try:
            self.model(x)
        except _ReachedLayerError as reached:
            return reached.output
        finally:
            hook.remove()
        raise TrainingError(f"layer '{self.layer}' takes no part in the model's forward pass")


class _ReachedLayerError(Exception):
    def __init__(self, output: Tensor) -> None:
        super().__init__()
        self.output = output
