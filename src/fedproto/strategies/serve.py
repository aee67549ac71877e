"""The section ``[serve]``: the model that is tested, stored and exported, for any strategy.

Training always continues from the trained model; these options choose what is served beside it.

*Averages over rounds.* Aggregate models oscillate from round to round, because each cohort holds
other classes; their average does not. It costs no bytes and no training time.

Batch-norm statistics are averaged like parameters, with the same weights: they are known without
asking clients again, and models of neighbouring rounds differ little. Early in training, while
they still move, they lag behind what re-estimating them would give.

*A computed head.* Clients that hold few classes train good features and a poor last layer: each
pushes down the logits of the classes that it lacks. The layer can be computed instead, from sums,
counts and summed products of features that clients report. The server keeps these statistics with
an exponential decay and computes the layer for the model under which they were taken: the received
one, at no cost, or the average, which clients then download beside it.

Shapes: K clients of the cohort, C classes, D feature channels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from fedproto.errors import ConfigError, TrainingError
from fedproto.options import option, options_to_dict, parse_value, read_options
from fedproto.strategies.base import Part
from fedproto.strategies.values import (
    Average,
    Declarations,
    Declared,
    Local,
    Needs,
    Report,
    Seen,
    Setting,
)
from fedproto.types import Prototypes, ServerState, Tensors, Updates, part, under

SUM, COUNT = "serve/sum", "serve/count"
PRODUCTS, SQUARES = "serve/products", "serve/squares"
AVERAGE, WINDOW = "serve/average", "serve/window"
"""Names in payload and memory."""

FLOOR = 0.01
"""Smallest variance of the features in any direction, relative to the mean over the channels."""


@dataclass(frozen=True)
class ServeOptions(Part):
    """Which model is tested, stored and exported."""

    average: Average | None = option(
        None,
        "serve an average of the models over rounds: exponential, of the last rounds, or of all"
        " rounds with weights that grow with the round; none: the strategy's default",
    )
    decay: float = option(
        0.9, "average 'ema': decay; smaller in early rounds", at_least=0, at_most=1
    )
    window: int = option(10, "average 'window': number of rounds", at_least=1, at_most=1000)
    growth: float = option(
        3.0, "average 'all': weights grow as round^growth; 0 for the plain mean", at_least=0
    )
    head: Literal["trained", "lda", "ridge", "cof", "ncm"] = option(
        "trained",
        "last layer: as trained, or computed from the clients' feature statistics by linear"
        " discriminant analysis (CCVR in closed form), ridge regression (Fed3R), the same with"
        " products estimated from class means (FedCOF), or nearest class means (FedNCM); clients"
        " take the statistics under the model that they received, or under the average 'ema' or"
        " 'all', which is then sent as well",
    )
    covariance: Literal["full", "diagonal"] = option(
        "full",
        "heads 'lda' and 'ridge': full covariance of features, or the diagonal alone (less to"
        " send)",
    )
    add: bool = option(False, "add the computed layer to the trained one instead of replacing it")
    forget: float = option(
        0.3, "computed head: share of the statistics that a round forgets", above=0, at_most=1
    )
    fade: float = option(
        0.0,
        "add: round at which the computed layer's weight has decayed to one half, as"
        " fade / (fade + round); 0 for a constant weight of 1",
        at_least=0,
    )
    ridge: float = option(
        0.01, "head 'ridge': regularisation relative to the mean square of a feature", above=0
    )
    shrink: float = option(
        0.1, "head 'cof': constant added to the estimated variance of a feature in a class", above=0
    )
    also: tuple[str, ...] = option(
        (),
        "further models to test, each written as options of this section with spaces between, such"
        " as ['average=ema decay=0.95', 'average=all']",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sends_average and self.average == "window":
            raise ConfigError(
                f"head '{self.head}' is computed for a model that clients get, which the average"
                " 'window' is not; set serve.average = 'ema', 'all' or 'none'"
            )
        if self.head == "ncm" and self.add:
            raise ConfigError("head 'ncm' has no probabilities to add; set serve.add = false")
        if any(one.seen_model != self.seen_model for one in self.others if one.computes_head):
            raise ConfigError(
                "also: clients take the statistics of all heads under one model, the received one"
                " or the average of the served head; give heads in also the average of [serve]"
            )
        others = tuple(dict.fromkeys(ServeOptions.parse(one).text for one in self.also))
        object.__setattr__(self, "also", others)

    @staticmethod
    @cache
    def parse(text: str) -> ServeOptions:
        """Options written as ``average=ema decay=0.95``.

        Raises:
            ConfigError: If the text is not such a list, or an option is not one of `ServeOptions`.
        """
        given: dict[str, Any] = {}
        where = f"also: '{text}'"
        for word in text.split():
            name, separator, value = word.partition("=")
            if not separator:
                raise ConfigError(f"{where}: write options as 'average=ema decay=0.95'")
            given[name] = parse_value(value)
        if "also" in given:
            raise ConfigError(f"{where}: a further model cannot have further models")
        return read_options(ServeOptions, given, where)

    @cached_property
    def text(self) -> str:
        """The options that differ from their defaults, as `parse` reads them."""
        usual = ServeOptions()
        words = [
            f"{name}={str(value).lower()}"
            for name, value in options_to_dict(self).items()
            if name != "also" and value != getattr(usual, name) and value != "none"
        ]
        return " ".join(words) or "average=none"

    @cached_property
    def others(self) -> tuple[ServeOptions, ...]:
        """The options of the models in `also`."""
        return tuple(map(ServeOptions.parse, self.also))

    @property
    def computes_head(self) -> bool:
        """Whether the served model has a last layer of its own."""
        return self.head != "trained"

    def or_by_default(self, average: Average) -> ServeOptions:
        """With this average where none is given, nor a head to be computed."""
        given = self.average is not None or self.computes_head
        return self if given else replace(self, average=average)

    @property
    def averages(self) -> bool:
        """Whether an average of models is served."""
        return self.average not in (None, "none")

    @property
    def sends_average(self) -> bool:
        """Whether clients get the averaged model besides, to take statistics under it."""
        return self.computes_head and self.averages

    @property
    def seen_model(self) -> tuple[Any, ...]:
        """The average under which clients take statistics; empty for the received model."""
        return (self.average, self.decay, self.growth) if self.sends_average else ()

    @property
    def needs(self) -> Needs:
        """Features, and their products where the head uses them, before training."""
        return Needs(before=frozenset({"features", *(("products",) if self._products else ())}))

    @property
    def _products(self) -> str | None:
        """Name of the products of features that clients report, where they do."""
        if self.head not in ("lda", "ridge"):
            return None
        return PRODUCTS if self.covariance == "full" else SQUARES

    def check(self, setting: Setting) -> None:
        """Refuses a model whose logits are not one linear function of the features."""
        weights = [setting.params[name] for name in setting.head if setting.params[name].dim() > 1]
        numbers = setting.num_classes * setting.feature_sizes()[0]
        if not setting.linear or [one.numel() for one in weights] != [numbers]:
            raise TrainingError(
                f"serve.head = '{self.head}' needs a model whose logits are one dense layer of its"
                " features; this model's are not, so set serve.head = 'trained'"
            )

    def payload(self, setting: Setting, num_examples: int) -> Declarations:
        """Sums and counts of features, and the upper half or diagonal of their products."""
        channels, per_sample = setting.feature_sizes()
        declared = prototypes_declared(setting, num_examples * per_sample, SUM, COUNT)
        if self._products:
            numbers = channels * (channels + 1) // 2 if self._products == PRODUCTS else channels
            declared[self._products] = Declared((numbers,), setting.float_type, squares_of=SUM)
        return declared

    def server_memory(self, setting: Setting) -> Declarations:
        """The decaying statistics, or the averaged models."""
        declared: dict[str, Declared] = {}
        if self.average in ("ema", "all"):
            declared |= setting.like_model(AVERAGE, broadcast=self.sends_average)
        elif self.average == "window":
            for place in range(self.window):
                declared |= setting.like_model(f"{WINDOW}/{place}")
        if self.computes_head:
            classes, (channels, _) = setting.num_classes, setting.feature_sizes()
            declared[SUM] = Declared((classes, channels), torch.float64)
            declared[COUNT] = Declared((classes,), torch.float64)
            if self._products == SQUARES:
                declared[SQUARES] = Declared((channels,), torch.float64)
            elif self.head != "ncm":
                declared[PRODUCTS] = Declared((channels, channels), torch.float64)
        return declared

    def broadcast(self, state: ServerState) -> Tensors:
        """The average, where clients get it; the model itself while there is none."""
        if not self.sends_average:
            return {}
        known = part(AVERAGE, state.memory)
        return under(AVERAGE, known or {**state.params, **state.buffers})

    def report(self, local: Local, trained: Tensors, before: Seen, after: Seen) -> Report:
        """The client's statistics under the received model."""
        if before is None:
            return Report()
        found = {SUM: before.sum, COUNT: before.count}
        if self._products:
            products = before.products
            if products.dim() > before.sum.dim():  # class by class
                products = products.sum(dim=-3)
            all_ = self._products == PRODUCTS
            numbers = packed(products) if all_ else products.diagonal(dim1=-2, dim2=-1)
            found[self._products] = numbers.to(before.sum.dtype)
        return Report(found)

    def follow(
        self, stepped: ServerState, received: ServerState, updates: Updates, setting: Setting
    ) -> ServerState:
        """The state after the server's step, with the model that is served beside it."""
        following = stepped
        if self.computes_head:
            statistics = self._remembered(received.memory, updates)
            following = replace(stepped, memory={**stepped.memory, **statistics})
        if self.averages:
            following = self._averaged(following, received)
        if not self.computes_head or not bool((following.memory[COUNT] > 0).any()):
            return following
        seen = self.observed(received, self.broadcast(received))
        computed = self._head(following.memory, seen, setting)
        served = ServerState(following.round, {**seen.params, **computed}, dict(seen.buffers))
        return replace(following, served_model=served)

    def _remembered(self, memory: Tensors, updates: Updates) -> Tensors:
        """The statistics, decayed, with those of the cohort added."""
        clients = reported_prototypes(updates, SUM, COUNT)
        clients = Prototypes(clients.sum.double(), clients.count)
        cohort = clients.merged()
        new = {SUM: cohort.sum, COUNT: cohort.count.double()}
        if self._products:
            name, channels = self._products, cohort.sum.shape[-1]
            numbers = torch.stack([one.payload[name].double() for one in updates]).sum(dim=0)
            new[name] = unpacked(numbers, channels) if name == PRODUCTS else numbers
        elif self.head == "cof":
            new[PRODUCTS] = estimated_products(clients, self.shrink)
        return {
            name: (1 - self.forget) * memory[name].to(one.device) + one for name, one in new.items()
        }

    def observed(self, received: ServerState, sent: Tensors) -> ServerState:
        """The model under which clients take statistics, given the tensors sent with it."""
        if not self.sends_average:
            return received
        average = part(AVERAGE, sent)
        params, buffers = (
            {name: average[name] for name in of} for of in (received.params, received.buffers)
        )
        return replace(received, params=params, buffers=buffers)

    def _head(self, memory: Tensors, received: ServerState, setting: Setting) -> Tensors:
        """The computed layer, under the names of the trained one."""
        count_c, sum_cd = memory[COUNT], memory[SUM]
        if self.head == "lda":
            weight_cd, bias_c = gaussian_head(count_c, sum_cd, self._product(memory))
        elif self.head == "ridge":
            weight_cd, bias_c = ridge_head(count_c, sum_cd, self._product(memory), self.ridge)
        elif self.head == "cof":
            weight_cd, bias_c = ridge_head(count_c, sum_cd, memory[PRODUCTS], 0.0)
        else:
            weight_cd, bias_c = mean_head(count_c, sum_cd)
        own = {name: received.params[name] for name in setting.head}
        if not any(one.dim() == 1 for one in own.values()):
            bias_c = torch.zeros_like(bias_c)
        if self.add:
            share = self.fade / (self.fade + received.round) if self.fade else 1.0
            weight_cd, bias_c = share * weight_cd, share * bias_c
            for one in own.values():
                if one.dim() == 1:
                    bias_c = bias_c + one.to(bias_c)
                else:
                    weight_cd = weight_cd + one.reshape(weight_cd.shape).to(weight_cd)
        factor = temperature(weight_cd, bias_c, count_c, sum_cd)
        return {
            name: (factor * (bias_c if one.dim() == 1 else weight_cd)).reshape(one.shape).to(one)
            for name, one in own.items()
        }

    def _product(self, memory: Tensors) -> Tensor:
        """The summed products of all features; from squares, those between classes are exact."""
        if self._products == PRODUCTS:
            return memory[PRODUCTS]
        count_c1 = memory[COUNT].clamp(min=1e-300).unsqueeze(1)
        between_dd = memory[SUM].t() @ (memory[SUM] / count_c1)
        return between_dd + (memory[SQUARES] - between_dd.diagonal()).clamp(min=0).diag()

    def _averaged(self, following: ServerState, received: ServerState) -> ServerState:
        """Serves the average; counters are those of the newest model."""
        new = {**following.served.params, **following.served.buffers}
        floating = {name: one for name, one in new.items() if one.is_floating_point()}
        if self.average == "window":
            kept = under(f"{WINDOW}/{received.round % self.window}", new)
            memory = {**following.memory, **kept}
            places = (part(f"{WINDOW}/{place}", memory) for place in range(self.window))
            models = [model for model in places if model]
            average = {
                name: torch.stack([model[name] for model in models]).mean(dim=0)
                for name in floating
            }
        else:
            done = received.round + 1  # early rounds count as in a plain mean
            share = (self.growth + 1) / (done + self.growth)
            if self.average == "ema":
                share = max(1 - self.decay, 1 / done)
            past = part(AVERAGE, following.memory) or new
            average = {
                name: torch.lerp(past[name].to(one.device), one, share)
                for name, one in floating.items()
            }
            memory = {**following.memory, **under(AVERAGE, {**new, **average})}
        average = {**new, **average}
        served = ServerState(
            following.round,
            {name: average[name] for name in following.params},
            {name: average[name] for name in following.buffers},
        )
        return replace(following, memory=memory, served_model=served)


def prototypes_declared(
    setting: Setting, vectors: int, sum_name: str, count_name: str
) -> dict[str, Declared]:
    """Prototypes as sums and counts, of at most this number of feature vectors."""
    classes, (channels, _) = setting.num_classes, setting.feature_sizes()
    return {
        sum_name: Declared(
            (classes, channels), setting.float_type, zero_where=count_name, counted_by=count_name
        ),
        count_name: Declared((classes,), torch.int64, low=0, high=vectors, total=vectors),
    }


def reported_prototypes(updates: Updates, sum_name: str, count_name: str) -> Prototypes:
    """The clients' prototypes, ``[K, C, D]``."""
    return Prototypes.stack(
        [Prototypes(one.payload[sum_name], one.payload[count_name]) for one in updates]
    )


def estimated_products(clients: Prototypes, shrink: float) -> Tensor:
    """Summed products ``[D, D]`` of features of which only the clients' class means are known.

    FedCOF (Goswami et al. 2025): a mean of n features varies by a n-th of what they vary by, so
    ``Σ_c = 1/(K_c − 1) Σ_k n_kc (μ_kc − μ_c)(μ_kc − μ_c)ᵀ`` over the K_c clients with class c
    estimates its covariance. Taken for the products: ``Σ_c (n_c − 1)(Σ_c + γI) + n m mᵀ`` with m
    the overall mean; as in the authors' code, what lies between the classes is left out.
    """
    pooled = clients.merged()
    count_c, clients_c = pooled.count.double(), clients.seen.sum(dim=0)
    factor_c = (count_c - 1).clamp(min=0) / (clients_c - 1).clamp(min=1)
    weight_kc = (clients.count * factor_c).sqrt()
    apart_nd = ((clients.mean - pooled.mean) * weight_kc.unsqueeze(-1)).flatten(0, 1)
    total = count_c.sum().clamp(min=1)
    sum_d = pooled.sum.sum(dim=0)
    added = shrink * (count_c - 1).clamp(min=0).sum()
    identity_dd = torch.eye(len(sum_d)).to(sum_d)
    return apart_nd.t() @ apart_nd + added * identity_dd + sum_d.outer(sum_d) / total


def gaussian_head(count_c: Tensor, sum_cd: Tensor, product_dd: Tensor) -> tuple[Tensor, Tensor]:
    """Weights ``[C, D]`` and biases ``[C]`` of linear discriminant analysis.

    With ``μ_c`` the class means, ``m`` the overall mean, ``π_c`` the class shares and ``Σ`` the
    covariance within classes, ``W_c = Σ⁻¹(μ_c − m)`` and
    ``b_c = ln π_c − ½ W_c·(μ_c − m) − W_c·m``. A class without features lies at the overall mean,
    with the share of half a feature vector.
    """
    total = count_c.sum()
    mean_d = sum_cd.sum(dim=0) / total
    known_c1 = (count_c > 0).unsqueeze(1)
    mean_cd = torch.where(known_c1, sum_cd / count_c.clamp(min=1e-300).unsqueeze(1), mean_d)
    within_dd = (product_dd - mean_cd.t() @ torch.where(known_c1, sum_cd, 0)) / total
    apart_cd = mean_cd - mean_d
    floor = FLOOR * within_dd.diagonal().clamp(min=0).mean().clamp(min=1e-30)
    weight_cd = _divided(apart_cd, within_dd, floor)
    share_c = count_c.clamp(min=0.5) / total
    bias_c = share_c.log() - (weight_cd * (apart_cd / 2 + mean_d)).sum(dim=1)
    return weight_cd, bias_c


def ridge_head(
    count_c: Tensor, sum_cd: Tensor, product_dd: Tensor, strength: float
) -> tuple[Tensor, Tensor]:
    """Ridge regression of one-hot targets, ``W = Y Eᵀ (E Eᵀ + λI)⁻¹`` (Fed3R), without bias.

    Rows are scaled to norm one, as the authors of Fed3R and FedCOF do: large classes gain nothing.
    """
    total = count_c.sum()
    floor = strength * (product_dd.diagonal().clamp(min=0).mean() / total).clamp(min=1e-30)
    weight_cd = _divided(sum_cd / total, product_dd / total, floor)
    norm_c1 = weight_cd.norm(dim=1, keepdim=True).clamp(min=1e-300)
    return weight_cd / norm_c1, torch.zeros_like(count_c)


def mean_head(count_c: Tensor, sum_cd: Tensor) -> tuple[Tensor, Tensor]:
    """Nearest class mean by cosine (FedNCM): rows are class means of norm one."""
    mean_cd = sum_cd / count_c.clamp(min=1e-300).unsqueeze(1)
    norm_c1 = mean_cd.norm(dim=1, keepdim=True).clamp(min=1e-300)
    return torch.where((count_c > 0).unsqueeze(1), mean_cd / norm_c1, 0), torch.zeros_like(count_c)


def temperature(weight_cd: Tensor, bias_c: Tensor, count_c: Tensor, sum_cd: Tensor) -> Tensor:
    """Factor on all logits that keeps a computed layer from being overconfident.

    Features are not Gaussian, and computed logits far too large for the probabilities that softmax
    makes of them. With n feature vectors an error rate is known to about 1/√n; so at the class
    means the logit of the class exceeds the next by ``ln √(1 + n)`` at most, in the mean over the
    vectors. A common factor changes no prediction.
    """
    seen_c = count_c > 0
    mean_hd = sum_cd[seen_c] / count_c[seen_c].unsqueeze(1)
    logit_hc = mean_hd @ weight_cd.to(mean_hd).t() + bias_c.to(mean_hd)
    place_h1 = seen_c.nonzero()
    next_h = logit_hc.scatter(1, place_h1, -torch.inf).amax(dim=1)
    ahead_h = logit_hc.gather(1, place_h1).squeeze(1) - next_h
    ahead = (ahead_h * count_c[seen_c]).sum() / count_c.sum()
    most = count_c.sum().log1p() / 2
    return torch.where((ahead > most) & ahead.isfinite(), most / ahead, torch.ones_like(ahead))


def _divided(x_cd: Tensor, matrix_dd: Tensor, floor: Tensor) -> Tensor:
    """``x (M + floor·I)⁻¹``; false reports may have made M indefinite."""
    matrix_dd = (matrix_dd + matrix_dd.t()) / 2
    raised_dd = matrix_dd + floor * torch.eye(len(matrix_dd)).to(matrix_dd)
    factor, failed = torch.linalg.cholesky_ex(raised_dd)
    if not bool(failed):
        solved_dc: Tensor = torch.cholesky_solve(x_cd.t(), factor)
        return solved_dc.t()
    value_d, vector_dd = torch.linalg.eigh(matrix_dd)
    turned_cd: Tensor = (x_cd @ vector_dd) / (value_d.clamp(min=0) + floor)
    back_cd: Tensor = turned_cd @ vector_dd.t()
    return back_cd


def packed(matrix_dd: Tensor) -> Tensor:
    """The numbers on and above the diagonal of symmetric matrices ``[..., D, D]``."""
    rows, columns = torch.triu_indices(*matrix_dd.shape[-2:], device=matrix_dd.device)
    return matrix_dd[..., rows, columns]


def unpacked(numbers: Tensor, channels: int) -> Tensor:
    """The symmetric matrix ``[D, D]`` of `packed` numbers, or of a diagonal alone."""
    if len(numbers) == channels:
        return numbers.diag()
    rows, columns = torch.triu_indices(channels, channels, device=numbers.device)
    upper_dd = numbers.new_zeros(channels, channels).index_put((rows, columns), numbers)
    return upper_dd + upper_dd.t() - upper_dd.diagonal().diag()
