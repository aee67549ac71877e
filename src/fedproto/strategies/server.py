"""The section ``[server]``: the server's own step from the combined updates, for any strategy.

The difference of the sent and the combined parameters is taken for a gradient (Reddi et al. 2021,
"Adaptive Federated Optimization"). Buffers are never stepped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from fedproto.errors import ConfigError
from fedproto.options import Options, option
from fedproto.strategies.contract import Declared, Setting
from fedproto.types import ServerState, part, under

MOMENTUM, SQUARE, LOOKAHEAD = "server/momentum", "server/square", "server/lookahead"


@dataclass(frozen=True)
class ServerOptions(Options):
    """An optimizer on the server, for any strategy: FedAvgM, FedAdagrad, FedAdam, FedYogi."""

    optimizer: Literal["none", "sgd", "adam", "yogi", "adagrad"] = option(
        "none", "optimizer that steps towards the combined weights; 'none' takes them as they are"
    )
    lr: float = option(1.0, "server learning rate", above=0)
    momentum: float = option(0.0, "sgd: m ← momentum·m + g, as FedAvgM", at_least=0, at_most=1)
    beta1: float = option(0.9, "adam, yogi, adagrad: decay of the mean", at_least=0, at_most=1)
    beta2: float = option(0.99, "adam, yogi: decay of the mean square", at_least=0, at_most=1)
    tau: float = option(1e-3, "adam, yogi, adagrad: adaptivity τ; v begins at τ²", above=0)
    lookahead: float | None = option(
        None,
        "momentum λ of the look-ahead (FedACG): clients start from θ + λm, θ is tested; none: the"
        " strategy's own, 0 for most",
        at_least=0,
        at_most=1,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lookahead and self._adapts:
            raise ConfigError(
                "lookahead is a momentum of its own; use it with optimizer 'none', or with 'sgd'"
                " and momentum = 0"
            )

    @property
    def _adapts(self) -> bool:
        """Whether the optimizer keeps a momentum."""
        return self.optimizer not in ("none", "sgd") or (
            self.optimizer == "sgd" and self.momentum > 0
        )

    def memory(self, setting: Setting) -> dict[str, Declared]:
        """The tensors that the optimizer keeps."""
        if not self._adapts:
            return setting.like_params(LOOKAHEAD) if self.lookahead else {}
        kept = setting.like_params(MOMENTUM)
        if self.optimizer != "sgd":
            kept |= setting.like_params(SQUARE, initial=self.tau**2)
        return kept

    def step(self, old: ServerState, combined: ServerState) -> ServerState:
        """The next state, given the one that was sent and the combined updates.

        With look-ahead (Kim et al. 2024, FedACG): ``m ← λm + (θ − sent)``; clients go on from
        ``θ + λm`` and θ, the result of the step, is served.
        """
        stepped = self._stepped(old, combined)
        if not self.lookahead:
            return stepped
        mean = {
            name: self.lookahead * tensor.to(stepped.params[name].device)
            + (stepped.params[name] - old.params[name])
            for name, tensor in part(LOOKAHEAD, old.memory).items()
        }
        ahead = {
            name: one + self.lookahead * mean[name] if name in mean else one
            for name, one in stepped.params.items()
        }
        memory = {**stepped.memory, **under(LOOKAHEAD, mean)}
        return replace(
            stepped, params=ahead, memory=memory, served_model=replace(stepped, memory={})
        )

    def _stepped(self, old: ServerState, combined: ServerState) -> ServerState:
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
            step = momentum
        else:
            second_moment = _SECOND_MOMENTS[self.optimizer]
            square = {
                name: second_moment(tensor.to(gradient[name].device), gradient[name], self.beta2)
                for name, tensor in part(SQUARE, old.memory).items()
            }
            memory |= under(SQUARE, square)
            step = {
                name: mean / (square[name].sqrt() + self.tau) for name, mean in momentum.items()
            }
        params = {name: tensor - self.lr * step[name] for name, tensor in old.params.items()}
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


_SECOND_MOMENTS: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "adam": _adam,
    "yogi": _yogi,
    "adagrad": _adagrad,
}
