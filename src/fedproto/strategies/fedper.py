"""FedPer (Arivazhagan et al. 2019): personal last layers on a shared body."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection
from dataclasses import dataclass

from fedproto.errors import TrainingError
from fedproto.options import option
from fedproto.strategies.base import STRATEGIES, Strategy, known_head
from fedproto.strategies.values import Setting


@STRATEGIES.register("fedper")
@dataclass(frozen=True)
class FedPer(Strategy):
    """Averages the body of the model; personal layers stay on their client, trained with the body.

    The paper personalises the last layers; taken by default: the one that gives the logits. All
    clients begin with the server's initial values where the paper draws each its own. In the model
    that the server tests, personal layers are those initial values.
    """

    layers: str = option(
        "", "names of the personal parameters, as a pattern such as 'fc*'; empty: the last layer"
    )

    def personal(self, setting: Setting) -> Collection[str]:
        """The last layer, or the parameters that the pattern matches."""
        if not self.layers:
            return known_head(type(self).__name__, setting)
        names = fnmatch.filter(setting.params, self.layers)
        if not names:
            raise TrainingError(
                f"strategy.layers = '{self.layers}' matches no parameter of the model; it has"
                f" {', '.join(setting.params)}"
            )
        return names
