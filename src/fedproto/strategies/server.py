"""The server's own step: what it does with the combined updates, whatever the strategy.

The way from the old to the combined parameters, with its sign turned, is taken for a gradient
(Reddi et al. 2021, "Adaptive Federated Optimization"). Buffers are never stepped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from fedproto.options import Options, option
from fedproto.strategies.contract import Declared, Setting
from fedproto.types import ServerState, part, under

MOMENTUM, SQUARE = "server/momentum", "server/square"


@dataclass(frozen=True)
class ServerOptions(Options):
    """An optimizer on the server, for any strategy: FedAvgM, FedAdagrad, FedAdam, FedYogi."""

    optimizer: Literal["none", "sgd", "adam", "yogi", "adagrad"] = option(
        "none", "what steps from the old towards the combined weights; 'none' takes these"
    )
    lr: float = option(1.0, "server learning rate", above=0)
    momentum: float = option(0.0, "sgd: m ← momentum·m + g, as FedAvgM", at_least=0, at_most=1)
    beta1: float = option(0.9, "adam, yogi, adagrad: decay of the mean", at_least=0, at_most=1)
    beta2: float = option(0.99, "adam, yogi: decay of the mean square", at_least=0, at_most=1)
    tau: float = option(1e-3, "adam, yogi, adagrad: adaptivity τ; v begins at τ²", above=0)

    def memory(self, setting: Setting) -> dict[str, Declared]:
        """The tensors that the optimizer keeps."""
        if self.optimizer == "none" or (self.optimizer == "sgd" and not self.momentum):
            return {}
        kept = setting.like_params(MOMENTUM)
        if self.optimizer != "sgd":
            kept |= setting.like_params(SQUARE, initial=self.tau**2)
        return kept

    def step(self, old: ServerState, combined: ServerState) -> ServerState:
        """The next state, given the one before and the combined updates."""
        if self.optimizer == "none":
            return combined
        if self.optimizer == "sgd" and not self.momentum:
            params = {
                name: torch.lerp(old.params[name], target, self.lr)
                for name, target in combined.params.items()
            }
            return replace(combined, params=params)
        gradient = {name: old.params[name] - target for name, target in combined.params.items()}
        momentum = {
            name: self._mean(tensor.to(gradient[name].device), gradient[name])
            for name, tensor in part(MOMENTUM, old.memory).items()
        }
        memory = {**combined.memory, **under(MOMENTUM, momentum)}
        if self.optimizer == "sgd":
            way = momentum
        else:
            spread = _SPREADS[self.optimizer]
            square = {
                name: spread(tensor.to(gradient[name].device), gradient[name], self.beta2)
                for name, tensor in part(SQUARE, old.memory).items()
            }
            memory |= under(SQUARE, square)
            way = {name: mean / (square[name].sqrt() + self.tau) for name, mean in momentum.items()}
        params = {name: tensor - self.lr * way[name] for name, tensor in old.params.items()}
        return replace(combined, params=params, memory=memory)

    def _mean(self, mean: Tensor, gradient: Tensor) -> Tensor:
        if self.optimizer == "sgd":
            return self.momentum * mean + gradient
        return self.beta1 * mean + (1 - self.beta1) * gradient


def _adam(square: Tensor, gradient: Tensor, beta2: float) -> Tensor:
    return beta2 * square + (1 - beta2) * gradient.square()


def _yogi(square: Tensor, gradient: Tensor, beta2: float) -> Tensor:
    new = gradient.square()
    return square - (1 - beta2) * new * torch.sign(square - new)


def _adagrad(square: Tensor, gradient: Tensor, beta2: float) -> Tensor:
    del beta2
    return square + gradient.square()


_SPREADS: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "adam": _adam,
    "yogi": _yogi,
    "adagrad": _adagrad,
}
