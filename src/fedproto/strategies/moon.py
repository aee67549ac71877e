"""MOON (Li et al. 2021): features drawn to the received model's, away from the client's last."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn.functional import cosine_similarity, softplus

from fedproto.options import option
from fedproto.strategies.base import STRATEGIES, Strategy
from fedproto.strategies.values import Batch, Declarations, Local, Needs, Report, Seen, Setting
from fedproto.types import Tensors, under

RECEIVED, PREVIOUS = "received", "previous"


@STRATEGIES.register("moon")
@dataclass(frozen=True)
class Moon(Strategy):
    """Adds a model-contrastive loss on the features of every sample.

    ``μ · −log( e^{cos(z, z_glob)/T} / (e^{cos(z, z_glob)/T} + e^{cos(z, z_prev)/T}) )`` with z the
    features of the model in training, ``z_glob`` of the received one and ``z_prev`` of the model
    that this client ended its last round with. The paper puts a two-layer projection head behind
    the encoder; taken: the inputs of the model's head, without a projection. In a client's first
    round there is no previous model; taken: the received one, so that the term has no gradient. The
    frozen models run in evaluation mode, the previous one with the received batch-norm statistics.
    """

    statistics: ClassVar[Needs] = Needs(frozen=(RECEIVED, PREVIOUS))

    mu: float = option(1.0, "weight μ of the contrastive loss", at_least=0)
    temperature: float = option(0.5, "temperature T of the cosines", above=0)

    def client_memory(self, setting: Setting) -> Declarations:
        """The parameters that the client ended its last round with."""
        return setting.like_params(PREVIOUS, initial=None)

    def batch_term(self, local: Local, batch: Batch) -> Tensor:
        """The mean contrastive loss: ``log(1 + e^{(cos_prev − cos_glob)/T})``."""
        near, far = (
            cosine_similarity(batch.features, batch.frozen[name].features, dim=1)
            for name in (RECEIVED, PREVIOUS)
        )
        return self.mu * batch.mean(softplus((far - near) / self.temperature))

    def report(self, local: Local, trained: Tensors, before: Seen, after: Seen) -> Report:
        """Keeps the trained parameters."""
        return Report(memory=under(PREVIOUS, {name: trained[name] for name in local.params}))
