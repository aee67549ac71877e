"""Sections that combine with every strategy: ``[head]`` and ``[server]``; and `Method`.

*Head.* A client that lacks a class only pushes its row of the last layer down. With
``rows = "holders"`` the row of class c is averaged over the clients of the cohort that hold c; a
row without a holder stays as it was.

*Server.* The difference of the sent and the combined parameters is taken for a gradient (Reddi et
al. 2021, "Adaptive Federated Optimization"). Buffers are never stepped.

*Method.* A strategy with all sections beside it; engines, guard and wire format see it as one.

Shapes: K clients of the cohort, C classes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from operator import or_
from typing import Literal

import torch
from torch import Tensor

from fedproto.errors import ConfigError, TrainingError
from fedproto.options import Options, option
from fedproto.strategies.aggregation import AggregateOptions
from fedproto.strategies.base import Part, Strategy, known_head, personal_memory
from fedproto.strategies.serve import ServeOptions
from fedproto.strategies.values import (
    Declarations,
    Declared,
    Local,
    Needs,
    Report,
    Seen,
    Setting,
    Statistic,
)
from fedproto.types import ClientWeights, ServerState, Tensors, Updates, part, under

CLASSES = "classes/count"
"""Name in the payload."""


@dataclass(frozen=True)
class HeadOptions(Part):
    """Aggregation of the last layer, for every strategy."""

    rows: Literal["average", "holders", "counts"] = option(
        "average",
        "last layer: averaged like the rest, or each row over the clients that hold its class, by"
        " the strategy's weights or by their samples of the class",
    )

    @property
    def by_class(self) -> bool:
        """Whether rows are averaged class by class."""
        return self.rows != "average"

    @property
    def needs(self) -> Needs:
        """The client's class counts."""
        return Needs(classes=True)

    def check(self, setting: Setting) -> None:
        """Refuses a model without a last layer that has a row per class."""
        known_head(f"head.rows = '{self.rows}'", setting)

    def payload(self, setting: Setting, num_examples: int) -> Declarations:
        """The classes that the client holds: counts, or 1 and 0."""
        labels = num_examples * setting.labels
        high, total = (labels, labels) if self.rows == "counts" else (1, setting.num_classes)
        return {
            CLASSES: Declared((setting.num_classes,), torch.int64, low=0, high=high, total=total)
        }

    def report(self, local: Local, trained: Tensors, before: Seen, after: Seen) -> Report:
        """The client's classes, as the payload declares them."""
        counts = self.rows == "counts"
        return Report({CLASSES: local.classes if counts else (local.classes > 0).long()})

    def weigh(self, weights: ClientWeights, updates: Updates, setting: Setting) -> ClientWeights:
        """The strategy's weights, with shares of their own for the rows of the last layer."""
        if not self.by_class:
            return weights
        count_kc = torch.stack([update.payload[CLASSES] for update in updates]).cpu()
        # No class has more samples than the client, whose number the cohort may have bounded.
        size_k = torch.tensor([update.num_examples for update in updates])
        count_kc = count_kc.minimum(setting.labels * size_k.unsqueeze(1))
        by_weight_kc = weights.client.unsqueeze(1).expand(count_kc.shape)
        share_kc = class_shares(count_kc if self.rows == "counts" else by_weight_kc, count_kc > 0)
        own = dict.fromkeys((name for name in setting.head if name in updates[0].params), share_kc)
        return replace(weights, tensor={**(weights.tensor or {}), **own})


def class_shares(weight_kc: Tensor, holds_kc: Tensor) -> Tensor:
    """Shares class by class among the holders, ``A[k, c] = s_k[c] / Σ_j s_j[c]``, ``[K, C]``.

    Holders whose weights are all zero share equally; a class without a holder has no shares.
    """
    weight_kc = torch.where(holds_kc, weight_kc.double(), 0)
    total_c = weight_kc.sum(dim=0)
    equal_kc = holds_kc.double() / holds_kc.sum(dim=0).clamp(min=1)
    return torch.where(total_c > 0, weight_kc / torch.where(total_c > 0, total_c, 1), equal_kc)


MOMENTUM, SQUARE, LOOKAHEAD = "server/momentum", "server/square", "server/lookahead"


@dataclass(frozen=True)
class ServerOptions(Part):
    """An optimizer on the server, for any strategy: FedAvgM, FedAdam."""

    optimizer: Literal["none", "sgd", "adam"] = option(
        "none",
        "server optimizer; its gradient is the combined update; 'none' applies that as it is",
    )
    lr: float = option(1.0, "server learning rate", above=0)
    momentum: float = option(0.0, "sgd: m ← momentum·m + g, as FedAvgM", at_least=0, at_most=1)
    beta1: float = option(0.9, "adam: decay of the mean", at_least=0, at_most=1)
    beta2: float = option(0.99, "adam: decay of the mean square", at_least=0, at_most=1)
    tau: float = option(1e-3, "adam: adaptivity τ; the mean square begins at τ²", above=0)
    lookahead: float | None = option(
        None,
        "momentum λ of the look-ahead (FedACG): clients start from θ + λm, θ is tested; none: the"
        " strategy's default",
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
        return self.optimizer == "adam" or (self.optimizer == "sgd" and self.momentum > 0)

    def server_memory(self, setting: Setting) -> Declarations:
        """The tensors that the optimizer keeps."""
        if not self._adapts:
            return setting.like_params(LOOKAHEAD) if self.lookahead else {}
        squares = setting.like_params(SQUARE, initial=self.tau**2)
        return setting.like_params(MOMENTUM) | (squares if self.optimizer == "adam" else {})

    def step(self, old: ServerState, combined: ServerState) -> ServerState:
        """The next state, given the one that was sent and the combined updates.

        With look-ahead (Kim et al. 2024, FedACG): ``m ← λm + (θ − sent)``; clients continue from
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
        slope = {name: old.params[name] - target for name, target in combined.params.items()}

        def kept(group: str) -> Tensors:
            memory = part(group, old.memory).items()
            return {name: tensor.to(slope[name].device) for name, tensor in memory}

        adam = self.optimizer == "adam"
        decay, share = (self.beta1, 1 - self.beta1) if adam else (self.momentum, 1.0)
        step = {name: decay * one + share * slope[name] for name, one in kept(MOMENTUM).items()}
        new = under(MOMENTUM, step)
        if adam:
            square = {
                name: self.beta2 * one + (1 - self.beta2) * slope[name].square()
                for name, one in kept(SQUARE).items()
            }
            step = {name: one / (square[name].sqrt() + self.tau) for name, one in step.items()}
            new |= under(SQUARE, square)
        params = {name: tensor - self.lr * step[name] for name, tensor in old.params.items()}
        return replace(combined, params=params, memory={**combined.memory, **new})


@dataclass(frozen=True)
class PrivacyOptions(Options):
    """Feature statistics that clients withhold, for every strategy.

    From the mean and the products of two feature vectors both can be computed, and one is its own
    mean. So classes of which a client has few samples are left out of all that it reports of its
    features: sums, counts and products.
    """

    min_samples: int | None = option(
        None,
        "minimum samples of a class for which a client reports feature statistics; none: 1, and 5"
        " over Flower",
        at_least=1,
    )

    def asked(self, what: frozenset[Statistic]) -> frozenset[Statistic]:
        """The statistics to take: products class by class where some are left out."""
        if (self.min_samples or 1) == 1 or "products" not in what:
            return what
        return what - {"products"} | {"class_products"}

    def withhold(self, seen: Seen) -> Seen:
        """The statistics without those of rare classes."""
        if seen is None or (self.min_samples or 1) == 1:
            return seen
        kept_c = seen.count >= (self.min_samples or 1)
        products = seen.products
        if products.shape[-1]:
            products = torch.where(kept_c.unsqueeze(-1).unsqueeze(-1), products, 0)
        return replace(
            seen,
            sum=torch.where(kept_c.unsqueeze(-1), seen.sum, 0),
            count=torch.where(kept_c, seen.count, 0),
            products=products,
        )


@dataclass(frozen=True)
class Method:
    """A strategy and the sections beside it."""

    strategy: Strategy
    head: HeadOptions = field(default_factory=HeadOptions)
    serve: ServeOptions = field(default_factory=ServeOptions)
    server: ServerOptions = field(default_factory=ServerOptions)
    aggregate: AggregateOptions = field(default_factory=AggregateOptions)
    privacy: PrivacyOptions = field(default_factory=PrivacyOptions)

    def __post_init__(self) -> None:
        name = type(self.strategy).__name__
        if self.strategy.pooled and (len(self._parts) > 1 or not self.aggregate.averages):
            raise ConfigError(
                f"{name} trains one model on all data and has nothing to combine: head.rows,"
                " serve.head, aggregate.rule, clip_norm and max_share need several clients"
            )
        if self.serve.sends_average and self.strategy.needs.before:
            raise ConfigError(
                f"{name} needs statistics under the received model; set serve.average = 'none'"
            )
        if self.head.by_class and self.strategy.weighs_tensors:
            raise ConfigError(
                f"{name} weighs clients tensor by tensor, which excludes head.rows;"
                " set head.rows = 'average'"
            )

    @property
    def _parts(self) -> tuple[Part, ...]:
        """The strategy, and the sections to which clients report."""
        rows = (self.head,) if self.head.by_class else ()
        served = (one for one in (self.serve, *self.serve.others) if one.computes_head)
        return (self.strategy, *rows, *served)

    @cached_property
    def needs(self) -> Needs:
        """The capabilities that the method needs of an engine."""
        needs = reduce(or_, (one.needs for one in self._parts))
        asked = self.privacy.asked
        return replace(needs, before=asked(needs.before), after=asked(needs.after))

    def check(self, setting: Setting) -> None:
        """Refuses a model with which the strategy or a section has no meaning."""
        for one in self._parts:
            one.check(setting)
        kept = {*self.strategy.personal(setting)}
        if self.head.by_class and (self.strategy.finetunes_head or kept >= {*setting.head}):
            raise TrainingError(
                f"{type(self.strategy).__name__} averages no last layer, which excludes head.rows;"
                " set head.rows = 'average'"
            )

    def server_memory(self, setting: Setting) -> Declarations:
        """Tensors that the server keeps from round to round."""
        declared: dict[str, Declared] = {}
        for one in (self.strategy, self.serve, self.server):
            declared |= one.server_memory(setting)
        for beside in self.serve.others:
            own = beside.server_memory(setting)
            # An average is sent once, as the served one.
            kept = {name: replace(one, broadcast=False) for name, one in own.items()}
            declared |= under(_group(beside), kept)
        return declared

    def sent_memory(self, setting: Setting) -> Declarations:
        """The part of the server's memory that clients receive."""
        return {name: one for name, one in self.server_memory(setting).items() if one.broadcast}

    def broadcast(self, state: ServerState, setting: Setting) -> Tensors:
        """Tensors of the server's memory that clients get beside the weights."""
        known = {**state.memory, **self.serve.broadcast(state)}
        return {name: known[name] for name in self.sent_memory(setting) if name in known}

    def client_memory(self, setting: Setting) -> Declarations:
        """Tensors that a client keeps between its own rounds."""
        return {**self.strategy.client_memory(setting), **personal_memory(self.strategy, setting)}

    def payload(self, setting: Setting, num_examples: int) -> Declarations:
        """Tensors that a client with this number of samples adds to its update."""
        declared: dict[str, Declared] = {}
        for one in self._parts:
            declared |= one.payload(setting, num_examples)
        return declared

    def report(self, local: Local, trained: Tensors, before: Seen, after: Seen) -> Report:
        """Tensors that a client sends and keeps after training."""
        before, after = self.privacy.withhold(before), self.privacy.withhold(after)
        found = [one.report(local, trained, before, after) for one in self._parts]
        payload = {name: tensor for one in found for name, tensor in one.payload.items()}
        return Report(payload, found[0].memory)

    def serve_models(
        self, stepped: ServerState, received: ServerState, updates: Updates, setting: Setting
    ) -> ServerState:
        """The state after the server's step, with the models that are tested beside it.

        Each of ``serve.also`` has a memory of its own, and is what it would be if it were served.
        """
        following = self.serve.follow(stepped, received, updates, setting)
        memory, also = dict(following.memory), {}
        for one in self.serve.others:
            group = _group(one)
            before = replace(received, memory=part(group, received.memory))
            after = replace(stepped, memory=before.memory)
            found = one.follow(after, before, updates, setting)
            memory |= under(group, found.memory)
            also[one.text] = replace(found.served, memory={}, served_model=None)
        return replace(following, memory=memory, also=also)


def _group(options: ServeOptions) -> str:
    """Where the memory of a model in ``serve.also`` is kept."""
    return f"also/{options.text}"
