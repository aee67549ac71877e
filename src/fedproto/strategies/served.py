"""The last layer that prototypes give, for the model that is tested, kept and given away.

Clients that hold few classes train good features and a poor last layer: each pushes down the
scores of the classes that it lacks. What the layer should be follows from where the features of
the classes lie, which needs no training. Clients tell the sums, counts and summed products of
their features under the model that they received; the server keeps them, forgets slowly, and
computes the layer for that model after each round. Training goes on with what was trained.

Shapes: K clients of the cohort, C classes, D feature channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from fedproto.errors import TrainingError
from fedproto.options import option
from fedproto.strategies.base import Strategy
from fedproto.strategies.contract import (
    Declarations,
    Declared,
    Local,
    Looks,
    Report,
    Seen,
    Setting,
)
from fedproto.strategies.prototypes import (
    LONGEST,
    feature_sizes,
    merged_prototypes,
    prototypes_declared,
)
from fedproto.types import ClientUpdate, ServerState, Tensors, Updates, part, under

SUM, COUNT, SQUARES, TRAINED = "served/sum", "served/count", "served/squares", "served/trained"
"""Names in payload and memory."""

FLOOR = 0.01
"""No direction of the features varies less than this part of the mean over the channels."""


@dataclass(frozen=True)
class Served(Strategy):
    """The option to serve a last layer that was computed from prototypes, alone or added."""

    serve: Literal["trained", "prototypes", "both"] = option(
        "trained",
        "the model that is tested and kept: as trained, or as clients received it, its last layer"
        " computed from where they saw features of the classes lie, or the sum of that and its own",
    )
    forget: float = option(
        0.3,
        "serve 'prototypes' or 'both': part of what is known of the features that a round makes"
        " forgotten",
        above=0,
        at_most=1,
    )
    fade: float = option(
        0.0,
        "serve 'both': rounds after which the computed layer's scores count half, after three times"
        " as many a quarter, and so on; 0: they always count in full",
        at_least=0,
    )

    @property
    def computes_head(self) -> bool:
        """Whether the model that is served has a last layer of its own."""
        return self.serve != "trained"

    @property
    def looks(self) -> Looks:
        """Features and their products under the received model."""
        found = super().looks
        if self.computes_head:
            found |= Looks(before=frozenset({"features", "squares"}))
        return found

    def payload(self, setting: Setting, num_examples: int) -> Declarations:
        """Prototypes as sums and counts, and the upper half of the summed products."""
        declared = dict(super().payload(setting, num_examples))
        if self.computes_head:
            channels = feature_sizes(setting, 0)[1]
            declared |= prototypes_declared(setting, num_examples, SUM, COUNT)
            declared[SQUARES] = Declared((channels * (channels + 1) // 2,), setting.float_type)
        return declared

    def server_memory(self, setting: Setting) -> Declarations:
        """What is known of the features, and the model that clients go on with."""
        declared = dict(super().server_memory(setting))
        if self.computes_head:
            _check_head(setting, self.serve)
            classes, channels, _ = feature_sizes(setting, 0)
            declared |= {
                SUM: Declared((classes, channels), torch.float64),
                COUNT: Declared((classes,), torch.float64),
                SQUARES: Declared((channels, channels), torch.float64),
            }
            declared |= setting.like_params(TRAINED, initial=None, buffers=True)
        return declared

    def report(self, local: Local, trained: Tensors, before: Seen, after: Seen) -> Report:
        """What the client's features sum up to under the received model."""
        report = super().report(local, trained, before, after)
        if not self.computes_head:
            return report
        assert before is not None  # noqa: S101 - asked for in `looks`
        rows, columns = _upper_half(before.squares.shape[-1], before.squares.device)
        half = before.squares[rows, columns].to(before.sums.dtype)
        own = {SUM: before.sums, COUNT: before.count, SQUARES: half}
        return replace(report, payload={**report.payload, **own})

    def remember(self, state: ServerState, updates: Updates, setting: Setting) -> Tensors:
        """What was known, a part of it forgotten, and what the cohort tells."""
        kept = dict(super().remember(state, updates, setting))
        squares = [(one, _square(one.payload[SQUARES])) for one in updates if self.computes_head]
        believed = [(one, square_dd) for one, square_dd in squares if _possible(one, square_dd)]
        if believed:
            told = merged_prototypes([one for one, _ in believed], SUM, COUNT)
            new = {SUM: told.sum, COUNT: told.count.double(), SQUARES: _merged(believed)}
            kept |= {
                name: (1 - self.forget) * state.memory[name].to(one.device) + one
                for name, one in new.items()
            }
        return kept

    def sent(self, state: ServerState) -> ServerState:
        """With the model that clients trained last."""
        state = super().sent(state)
        trained = part(TRAINED, state.memory)
        if not trained:
            return state
        return replace(
            state,
            params={name: trained[name] for name in state.params},
            buffers={name: trained[name] for name in state.buffers},
        )

    def served(
        self, following: ServerState, received: ServerState, setting: Setting
    ) -> ServerState:
        """The model that clients looked at with the last layer that they told.

        What they trained since goes into memory: its features were seen by nobody yet.
        """
        state = super().served(following, received, setting)
        if not self.computes_head or not bool((state.memory[COUNT] > 0).any()):
            return state
        count_c, sum_cd, square_dd = (state.memory[one] for one in (COUNT, SUM, SQUARES))
        weight_cd, bias_c = gaussian_head(count_c, sum_cd, square_dd)
        own = {name: received.params[name] for name in setting.head}
        if not any(one.dim() == 1 for one in own.values()):
            bias_c = torch.zeros_like(bias_c)
        if self.serve == "both":
            share = self.fade / (self.fade + received.round) if self.fade else 1.0
            weight_cd, bias_c = share * weight_cd, share * bias_c
            for one in own.values():
                if one.dim() == 1:
                    bias_c = bias_c + one.to(bias_c)
                else:
                    weight_cd = weight_cd + one.reshape(weight_cd.shape).to(weight_cd)
        modest = modesty(weight_cd, bias_c, count_c, sum_cd)
        computed = {
            name: (modest * (bias_c if one.dim() == 1 else weight_cd)).reshape(one.shape).to(one)
            for name, one in own.items()
        }
        trained = under(TRAINED, {**state.params, **state.buffers})
        return replace(
            state,
            params={**received.params, **computed},
            buffers=received.buffers,
            memory={**state.memory, **trained},
        )


def gaussian_head(count_c: Tensor, sum_cd: Tensor, square_dd: Tensor) -> tuple[Tensor, Tensor]:
    """Weights ``[C, D]`` and biases ``[C]`` of the best linear scores for Gaussian classes.

    With ``μ_c`` the classes' means, ``m`` that of all, ``π_c`` their shares and ``Σ`` the
    covariance within classes, ``W_c = Σ⁻¹(μ_c − m)`` and
    ``b_c = ln π_c − ½ W_c·(μ_c − m) − W_c·m``: linear discriminant analysis. A class without
    features lies at the mean of all, with the share of half a feature vector.
    """
    total = count_c.sum()
    mean_d = sum_cd.sum(dim=0) / total
    known_c1 = (count_c > 0).unsqueeze(1)
    mean_cd = torch.where(known_c1, sum_cd / count_c.clamp(min=1e-300).unsqueeze(1), mean_d)
    within_dd = (square_dd - mean_cd.t() @ torch.where(known_c1, sum_cd, 0)) / total
    apart_cd = mean_cd - mean_d
    weight_cd = _divided(apart_cd, within_dd)
    share_c = count_c.clamp(min=0.5) / total
    bias_c = share_c.log() - (weight_cd * (apart_cd / 2 + mean_d)).sum(dim=1)
    return weight_cd, bias_c


def modesty(weight_cd: Tensor, bias_c: Tensor, count_c: Tensor, sum_cd: Tensor) -> Tensor:
    """Factor on all scores that keeps a layer from being surer than what is known allows.

    Features are not Gaussian, and computed scores far too large for the probabilities that softmax
    makes of them. With n feature vectors an error rate is known to about 1/√n; so at the classes'
    means the class itself is to be ahead of the next by ``ln √(1 + n)`` at most, in the mean over
    the vectors. No decision depends on a factor; trained scores that were added shrink as well.
    """
    held = count_c > 0
    mean_hd = sum_cd[held] / count_c[held].unsqueeze(1)
    score_hc = mean_hd @ weight_cd.to(mean_hd).t() + bias_c.to(mean_hd)
    place_h1 = held.nonzero()
    next_h = score_hc.scatter(1, place_h1, -torch.inf).amax(dim=1)
    ahead_h = score_hc.gather(1, place_h1).squeeze(1) - next_h
    ahead = (ahead_h * count_c[held]).sum() / count_c.sum()
    most = count_c.sum().log1p() / 2
    return torch.where((ahead > most) & ahead.isfinite(), most / ahead, torch.ones_like(ahead))


def _divided(apart_cd: Tensor, within_dd: Tensor) -> Tensor:
    """``x Σ⁻¹``, with no direction of Σ below the floor; a lie may have made it indefinite."""
    within_dd = (within_dd + within_dd.t()) / 2
    floor = FLOOR * within_dd.diagonal().clamp(min=0).mean().clamp(min=1e-30)
    raised_dd = within_dd + floor * torch.eye(len(within_dd)).to(within_dd)
    factor, failed = torch.linalg.cholesky_ex(raised_dd)
    if not bool(failed):
        solved_dc: Tensor = torch.cholesky_solve(apart_cd.t(), factor)
        return solved_dc.t()
    value_d, vector_dd = torch.linalg.eigh(within_dd)
    turned_cd: Tensor = (apart_cd @ vector_dd) / (value_d.clamp(min=0) + floor)
    back_cd: Tensor = turned_cd @ vector_dd.t()
    return back_cd


def _possible(update: ClientUpdate, square_dd: Tensor) -> bool:
    """Whether products can be those of features that sum up to what the client tells.

    The square of a channel is at least what its sums need, and no product beats its squares.
    """
    sum_cd, count_c = update.payload[SUM].double(), update.payload[COUNT].double()
    square_d = square_dd.diagonal()
    least_d = (sum_cd.square() / count_c.clamp(min=1).unsqueeze(1)).sum(dim=0)
    loose = 1e-3 * square_d.abs().max() + 1e-30
    root_d = square_d.clamp(min=0).sqrt()
    enough = (square_d >= least_d - loose).all()
    return bool(enough & (square_dd.abs() <= torch.outer(root_d, root_d) + loose).all())


def _merged(believed: Sequence[tuple[ClientUpdate, Tensor]]) -> Tensor:
    """The cohort's summed products ``[D, D]``.

    No client makes them absurd: where its features would be longer than `LONGEST` times the
    cohort's median, what it tells is scaled down to that.
    """
    square_kdd = torch.stack([square_dd for _, square_dd in believed])
    count_k = torch.stack([update.payload[COUNT].sum() for update, _ in believed]).double()
    length_k = square_kdd.diagonal(dim1=1, dim2=2).sum(dim=1) / count_k.clamp(min=1)
    usual = torch.where(count_k > 0, length_k, torch.nan).nanmedian().nan_to_num(0)
    smaller_k = (LONGEST**2 * usual / length_k.clamp(min=1e-300)).clamp(max=1)
    return (square_kdd * smaller_k.view(-1, 1, 1)).sum(dim=0)


def _square(half_h: Tensor) -> Tensor:
    """A symmetric matrix of its upper half, in double precision."""
    half_h = half_h.double()
    channels = round((8 * len(half_h) + 1) ** 0.5) // 2
    rows, columns = _upper_half(channels, half_h.device)
    upper_dd = half_h.new_zeros(channels, channels).index_put((rows, columns), half_h)
    return upper_dd + upper_dd.t() - upper_dd.diagonal().diag()


def _upper_half(channels: int, device: torch.device) -> tuple[Tensor, Tensor]:
    rows, columns = torch.triu_indices(channels, channels, device=device)
    return rows, columns


def _check_head(setting: Setting, serve: str) -> None:
    """Whether scores are one linear function of the features."""
    weights = [setting.params[name] for name in setting.head if setting.params[name].dim() > 1]
    channels = feature_sizes(setting, 0)[1]
    numbers = setting.num_classes * channels
    if not setting.linear or [one.numel() for one in weights] != [numbers]:
        raise TrainingError(
            f"serve = '{serve}' needs a model whose scores are one dense layer of its features;"
            " this one's are not, so set serve = 'trained', or take strategy 'guided' as it is"
        )
