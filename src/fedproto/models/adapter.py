"""Turning a user's module into one that gives features, under the names its tensors have."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from torch import Tensor, nn

from fedproto.errors import TrainingError, unknown_name
from fedproto.models.base import FeatureModel, layers_in_words


def with_features(model: nn.Module, layer: str | None = None) -> nn.Module:
    """Gives a module a `features` method.

    The result has the module's own parameters under their own names, so that what is trained loads
    into the module's class again.

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
                f" with_features(model, layer='...'); {layers_in_words(model)}"
            )
        return SequentialModel(model)
    names = [name for name, _ in model.named_modules() if name]
    if layer not in names:
        raise TrainingError(unknown_name("layer", layer, names))
    return LayerFeatures(model, layer)


class SequentialModel(nn.Sequential, FeatureModel):
    """A sequential model cut before its last layer."""

    def __init__(self, model: nn.Sequential) -> None:
        super().__init__(OrderedDict(model.named_children()))

    def features(self, x: Tensor) -> Tensor:
        """All layers but the last."""
        *layers, _ = self
        for layer in layers:
            x = layer(x)
        return x

    def head(self, features: Tensor) -> Tensor:
        """The last layer."""
        scores: Tensor = self[-1](features)
        return scores


class LayerFeatures(nn.Module):
    """A module as it is, whose features are what one of its layers puts out."""

    model: nn.Module

    def __init__(self, model: nn.Module, layer: str) -> None:
        super().__init__()
        # What the module holds is held here too, rather than below a name of its own: its tensors
        # keep their names in states and checkpoints.
        self._parameters, self._buffers = model._parameters, model._buffers
        self._modules = model._modules
        self._non_persistent_buffers_set = model._non_persistent_buffers_set
        self.__dict__["model"] = model
        self.layer = layer

    def train(self, mode: bool = True) -> LayerFeatures:
        """Also tells the module itself, whose forward pass may depend on it."""
        super().train(mode)
        self.model.training = mode
        return self

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
