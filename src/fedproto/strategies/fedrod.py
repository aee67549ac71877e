"""FedRoD (Chen & Chao 2022): a generic head for balanced classes, a personal one beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedproto.strategies.base import (
    OUT_OF_THE_SOFTMAX,
    PERSONAL,
    STRATEGIES,
    HeadAlone,
    Strategy,
)
from fedproto.strategies.values import Declarations, Local, Needs, Objective, Report, Seen, Setting
from fedproto.types import Tensors, part, under

GENERIC = "generic"


@STRATEGIES.register("fedrod")
@dataclass(frozen=True)
class FedRoD(Strategy):
    """Shares a body and a head G trained by balanced softmax; P is each client's own, linear head.

    The shared model minimises the cross-entropy of ``G(z) + log n_c`` with n_c the client's samples
    of class c; a class that it lacks takes no part, the limit. A client classifies by
    ``G(z) + P(z)``; P starts at 0 and minimises the plain cross-entropy with body and G fixed. The
    personal model is the body with the head ``G + P``, one linear layer. The paper trains P at each
    step beside G; taken: after G, on the trained body. Its P by a hypernetwork is not here.
    """

    splits_head: ClassVar[bool] = True
    statistics: ClassVar[Needs] = Needs(classes=True)

    def client_memory(self, setting: Setting) -> Declarations:
        """G after the client's last round: the personal model's head less G is P."""
        head = {name: setting.params[name] for name in setting.head}
        return setting.like(GENERIC, head, initial=None)

    @property
    def personal_method(self) -> Strategy:
        """Federated averaging's loss, of which the head alone is trained."""
        return HeadAlone()

    def objective(self, local: Local) -> Objective:
        """The balanced softmax."""
        return Objective(offset=local.classes.double().log().clamp(min=OUT_OF_THE_SOFTMAX))

    def personal_start(self, local: Local, received: Tensors, trained: Tensors) -> Tensors:
        """The trained body with the head G + P."""
        own, generic = part(PERSONAL, local.memory), part(GENERIC, local.memory)
        heads = {name: trained[name] + own[name] - generic[name] for name in generic}
        return {**trained, **heads}

    def report(self, local: Local, trained: Tensors, before: Seen, after: Seen) -> Report:
        """Keeps G."""
        return Report(memory=under(GENERIC, {name: trained[name] for name in local.head}))
