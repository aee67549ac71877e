"""A method: a strategy with the sections that combine with every strategy.

Engines, the guard and the wire format see a method as one thing: the declarations, needs and
reports of the strategy and of the sections ``[head]`` and ``[serve]`` put together.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from fedproto.errors import ConfigError, TrainingError
from fedproto.strategies.aggregation import AggregateOptions
from fedproto.strategies.base import Strategy, known_head, personal_memory
from fedproto.strategies.contract import Declarations, Local, Needs, Report, Seen, Setting
from fedproto.strategies.head import HeadOptions
from fedproto.strategies.serve import ServeOptions
from fedproto.strategies.server import ServerOptions
from fedproto.types import ServerState, Tensors


@dataclass(frozen=True)
class Method:
    """A strategy and the sections beside it."""

    strategy: Strategy
    head: HeadOptions = field(default_factory=HeadOptions)
    serve: ServeOptions = field(default_factory=ServeOptions)
    server: ServerOptions = field(default_factory=ServerOptions)
    aggregate: AggregateOptions = field(default_factory=AggregateOptions)

    def __post_init__(self) -> None:
        name = type(self.strategy).__name__
        if self.strategy.pooled and (self.head.by_class or self.serve.computes_head):
            raise ConfigError(
                f"{name} trains one model on all data: head.rows and serve.head need clients"
            )
        if self.head.by_class and self.strategy.weighs_tensors:
            raise ConfigError(
                f"{name} weighs clients tensor by tensor, so the last layer has weights already;"
                " set head.rows = 'average'"
            )

    @cached_property
    def needs(self) -> Needs:
        """What the engine must be able to do."""
        return self.strategy.needs | self.head.needs | self.serve.needs

    @property
    def weighs_rows(self) -> bool:
        """Whether clients are weighed tensor by tensor, or row by row."""
        return self.strategy.weighs_tensors or self.head.by_class

    def check(self, setting: Setting) -> None:
        """Refuses a model with which the strategy or a section has no meaning."""
        if "batch_term" in self.needs.hooks and (not setting.has_head or setting.labels > 1):
            raise TrainingError(
                f"{type(self.strategy).__name__} sees features and logits of a batch, which needs a"
                " classifier with features(x) and head(features)"
            )
        if self.strategy.splits_head:
            known_head(self.strategy, setting)
        self.strategy.personal(setting)
        self.head.check(setting)
        self.serve.check(setting)

    def server_memory(self, setting: Setting) -> Declarations:
        """Tensors that the server keeps from round to round."""
        return {
            **self.strategy.server_memory(setting),
            **self.serve.memory(setting),
            **self.server.memory(setting),
        }

    def broadcast(self, state: ServerState, setting: Setting) -> Tensors:
        """Tensors of the server's memory that clients get beside the weights."""
        return {
            name: state.memory[name]
            for name, one in self.strategy.server_memory(setting).items()
            if one.broadcast and name in state.memory
        }

    def client_memory(self, setting: Setting) -> Declarations:
        """Tensors that a client keeps between its own rounds."""
        return {**self.strategy.client_memory(setting), **personal_memory(self.strategy, setting)}

    def payload(self, setting: Setting, num_examples: int) -> Declarations:
        """Tensors that a client with this number of samples adds to its update."""
        return {
            **self.strategy.payload(setting, num_examples),
            **self.head.payload(setting, num_examples),
            **self.serve.payload(setting, num_examples),
        }

    @property
    def reports(self) -> bool:
        """Whether clients send or keep anything besides the model."""
        return "report" in self.needs.hooks or self.head.by_class or self.serve.computes_head

    def report(self, local: Local, trained: Tensors, before: Seen, after: Seen) -> Report:
        """Tensors that a client sends and keeps after training."""
        own = self.strategy.report(local, trained, before, after)
        added = {**self.head.report(local), **self.serve.report(before)}
        return Report({**own.payload, **added}, own.memory)
