"""Features and head of a user's module, found by running it once and checked by computing again.

The head is the last layer that the logits depend on, the features are its input. Nothing is guessed
from names: the head of the features must give the logits of the module.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from fedproto.errors import TrainingError, unknown_name
from fedproto.models.base import declares_features, features_of, layers_in_words
from fedproto.rng import seeded

_DENSE = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def with_features(model: nn.Module, *, head: str | None = None) -> nn.Module:
    """Names the layer that gives the logits, where it is not to be found by running the module.

    The result has the module's own parameters under their own names, so that the trained weights
    load into the module's class again.

    Args:
        model: Any module.
        head: Name of the layer that gives the logits, as in ``named_modules()``; the features are
            its input. The last layer of a sequential model by default.

    Raises:
        TrainingError: If no layer is named, or there is none of that name.
    """
    if head is None:
        if not isinstance(model, nn.Sequential) or len(model) < 2:
            raise TrainingError(
                f"name the layer of {type(model).__name__} that gives the logits:"
                f" with_features(model, head='...'); {layers_in_words(model)}"
            )
        head = list(model.named_children())[-1][0]
    names = [name for name, _ in model.named_modules() if name]
    if head not in names:
        raise TrainingError(unknown_name("layer", head, names))
    return HeadInput(model, head)


def adapted(model: nn.Module, x: Tensor) -> nn.Module:
    """A module with the features and the head that one input shows; the same where none are found.

    What the module declares by ``features(x)`` and ``head(features)`` is kept where it gives the
    logits. Parameters keep their names.

    Raises:
        TrainingError: If the head that was named does not give the logits.
    """
    if scores_features(model, x):
        return model
    if isinstance(model, HeadInput):
        raise TrainingError(
            f"layer '{model.name}' does not give the logits of {type(model.model).__name__}: what"
            " the module returns differs from the layer's output; name another head"
        )
    found = _head_found(model, x)
    if found is None:
        return model
    if declares_features(model):
        with torch.no_grad(), seeded(0):
            declared, input_of_head = features_of(model)(x), found.features(x)
        if not _close(declared.flatten(1), input_of_head.flatten(1)):
            return model
    return found


@torch.no_grad()
def scores_features(model: nn.Module, x: Tensor) -> bool:
    """Whether ``head(features(x))`` gives the logits of one input."""
    head = getattr(model, "head", None)
    if not declares_features(model) or not callable(head):
        return False
    with seeded(0):
        try:
            return _close(head(features_of(model)(x)), model(x))
        except (RuntimeError, ValueError, IndexError, TypeError):
            return False


def _close(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-4, atol=1e-5)


def _head_found(model: nn.Module, x: Tensor) -> HeadInput | None:
    """The module cut before its last layer; None if that layer does not give its logits."""
    last = _last_layer(model, x)
    if last is None or last is model or not _is_linear(last):
        return None
    name = next(name for name, layer in model.named_modules() if layer is last)
    found = (HeadInput(model, name, flat=flat) for flat in (False, True))
    return next((one for one in found if scores_features(one, x)), None)


def class_rows(model: nn.Module, x: Tensor, num_classes: int) -> tuple[str, ...]:
    """Names of the parameters that give the logits, one row per class; empty where there are none.

    They are those of the last layer that a batch passes on its way to the logits, if it is dense
    or a convolution: its rows are the classes, whatever the model calls it. A model that computes
    its logits in another way says so by a method ``last_layer()``.
    """
    named = getattr(model, "last_layer", None)
    last = named() if callable(named) else _last_layer(model, x)
    if not isinstance(last, _DENSE) or len(last.weight) != num_classes:
        return ()
    own = {id(tensor) for tensor in last.parameters(recurse=False)}
    return tuple(name for name, tensor in model.named_parameters() if id(tensor) in own)


def _last_layer(model: nn.Module, x: Tensor) -> nn.Module | None:
    """The last layer with parameters that the logits of a batch depend on."""
    passed: list[nn.Module] = []
    hook = register_module_forward_hook(lambda layer, *_: passed.append(layer))
    try:
        with torch.enable_grad(), seeded(0):
            total = model(x).sum()
    finally:
        hook.remove()
    for layer in reversed(passed):
        own = list(layer.parameters())
        if not own or (list(layer.children()) and not isinstance(layer, _DENSE)):
            continue
        trained = [tensor for tensor in own if tensor.requires_grad]
        if not trained or not total.requires_grad:
            return layer
        found = torch.autograd.grad(total, trained, retain_graph=True, allow_unused=True)
        if any(one is not None for one in found):
            return layer
    return None


def _is_linear(layer: nn.Module) -> bool:
    """Whether a layer is one linear function of each feature vector."""
    if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        plain = set(layer.kernel_size) | set(layer.stride) | {layer.groups} == {1}
        return plain and not any(layer.padding)
    return isinstance(layer, nn.Linear)


def original(model: nn.Module) -> nn.Module:
    """The user's own module behind its features."""
    return model.model if isinstance(model, HeadInput) else model


class HeadInput(nn.Module):
    """A module as it is, whose features are the input of the layer that gives the logits.

    It has the same tensors under the same names.
    """

    model: nn.Module

    def __init__(self, model: nn.Module, name: str, *, flat: bool = False) -> None:
        super().__init__()
        # What the module holds is held here too, rather than below a name of its own: its tensors
        # keep their names in states and checkpoints.
        self._parameters, self._buffers = model._parameters, model._buffers
        self._modules = model._modules
        self._non_persistent_buffers_set = model._non_persistent_buffers_set
        self.__dict__["model"] = model
        self.name, self._flat = name, flat

    def train(self, mode: bool = True) -> HeadInput:
        """Also tells the module itself, whose forward pass may depend on it."""
        super().train(mode)
        self.model.training = mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        """The module's own logits."""
        logits: Tensor = self.model(x)
        return logits

    def features(self, x: Tensor) -> Tensor:
        """The input of the head, where the forward pass calls it last."""
        seen: list[Tensor] = []
        layer = self.model.get_submodule(self.name)
        hook = layer.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        try:
            self.model(x)
        finally:
            hook.remove()
        if not seen:
            raise TrainingError(f"layer '{self.name}' is not used in the model's forward pass")
        return seen[-1]

    def head(self, features: Tensor) -> Tensor:
        """The layer that gives the logits."""
        logits: Tensor = self.model.get_submodule(self.name)(features)
        return logits.flatten(1) if self._flat else logits
