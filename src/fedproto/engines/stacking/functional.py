"""A user's module over stacked weights, through `torch.func`: right for any module that treats the
samples of a batch one by one and has no randomness or statistics of its own.
"""  # noqa: D205 - one sentence says it best

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F  # noqa: N812 - the name everyone uses

from fedproto.engines.stacking.fusing import Fuse
from fedproto.engines.stacking.gradients import Gradient
from fedproto.engines.stacking.network import Beside, Network
from fedproto.models.base import features_of, head_of
from fedproto.types import Tensors


class _Features(nn.Module):
    """A module whose call gives features, since `functional_call` calls nothing else."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return features_of(self.model)(x)


class _Head(nn.Module):
    """The same for the classifier."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, features: Tensor) -> Tensor:
        return head_of(self.model)(features)


class FunctionalNetwork(Network):
    """Stacked copies of one module."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._features, self._head = _Features(model), _Head(model)

    def lay_out(self, inputs: Tensor) -> Tensor:
        """As the module wants them."""
        return inputs

    def pack(self, params: Tensors) -> dict[str, Tensor]:
        """As they are."""
        return dict(params)

    def unpack(self, params: Tensors) -> dict[str, Tensor]:
        """Copies."""
        return {name: tensor.clone() for name, tensor in params.items()}

    def features(self, params: Tensors, x: Tensor, live: Tensor | None = None) -> Tensor:
        """Flattened features."""
        del live
        named = {f"model.{name}": tensor for name, tensor in params.items()}
        self._model.eval()
        features: Tensor = vmap(lambda own, x: functional_call(self._features, own, (x,)))(named, x)
        return features.flatten(2)

    def scores(self, params: Tensors, x: Tensor, live: Tensor | None = None) -> Tensor:
        """What the module's call gives."""
        del live
        self._model.eval()
        scores: Tensor = vmap(lambda own, x: functional_call(self._model, own, (x,)))(
            dict(params), x
        )
        return scores

    def gradients(
        self,
        params: Tensors,
        x: Tensor,
        targets: Tensor,
        weight: Tensor,
        fuse: Fuse,
        beside: Beside | None = None,
    ) -> tuple[Tensor, dict[str, Gradient]]:
        """Per-job gradients by `vmap` over `grad`."""
        del fuse

        def loss(
            own: Tensors, x: Tensor, targets: Tensor, weight: Tensor, *calibration: Tensor
        ) -> tuple[Tensor, Tensor]:
            scores, batch = functional_call(self._model, dict(own), (x,)), len(x)
            if calibration:
                scale, offset, features, labels, counts = calibration
                if len(labels):
                    named = {f"model.{name}": tensor for name, tensor in own.items()}
                    scores = torch.cat((scores, functional_call(self._head, named, (features,))))
                    targets, weight = torch.cat((targets, labels)), torch.cat((weight, counts))
                scores = scores * scale + offset
            each = F.cross_entropy(scores, targets, reduction="none")
            return (each * weight).sum(), each[:batch].detach()

        self._model.train()
        added = () if beside is None else tuple(vars(beside).values())
        gradients, losses = vmap(grad(loss, has_aux=True))(dict(params), x, targets, weight, *added)
        return losses, gradients

    def numbers(self, batch: int) -> int:
        """A guess: what a module keeps cannot be known; running out of memory halves the stack."""
        return batch * 4 * sum(parameter.numel() for parameter in self._model.parameters()) // 10


def reason_not_to_stack(model: nn.Module, inputs: Tensor) -> str | None:
    """Why a module cannot be trained in a stack; None when it can."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            return f"'{name}' ({type(module).__name__}) draws random numbers"
    if any(True for _ in model.buffers()):
        return "it has buffers (batch-norm statistics or other tensors that are not trained)"
    was_training = model.training
    try:
        with torch.no_grad():
            model.train()
            together = model(inputs)
            alone = torch.cat([model(one.unsqueeze(0)) for one in inputs])
            again = model(inputs)
            params = {name: tensor.unsqueeze(0) for name, tensor in model.named_parameters()}
            network = FunctionalNetwork(model)
            stacked = network.scores(params, inputs.unsqueeze(0))[0]
            network.features(params, inputs.unsqueeze(0))
    except (RuntimeError, ValueError, TypeError) as error:
        return f"torch.func cannot run it ({str(error).splitlines()[0]})"
    finally:
        model.train(was_training)
    if not torch.equal(together, again):
        return "it gives other scores for the same inputs when called twice"
    if not torch.allclose(together, alone, rtol=1e-3, atol=1e-4):
        return "the samples of a batch influence each other"
    if not torch.allclose(together, stacked, rtol=1e-3, atol=1e-4):
        return "it behaves differently in training and in evaluation"
    return None
