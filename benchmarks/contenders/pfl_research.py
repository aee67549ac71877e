"""pfl-research: federated averaging in its simulated backend, in one process.

pfl_research.py WORK OUT
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from common import STARTED, Work, quiet, save, say, wait_for_round
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the name everyone uses

STOP = 10**6


class WithLoss(nn.Module):
    """A model with the two methods that the package asks for."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """Scores."""
        scores: Tensor = self.model(x)
        return scores

    def loss(self, x: Tensor, y: Tensor, is_eval: bool = False) -> Tensor:
        """What is minimised."""
        self.eval() if is_eval else self.train()
        return F.cross_entropy(self(x), y)

    def metrics(self, x: Tensor, y: Tensor, is_eval: bool = True) -> dict[str, Any]:
        """None: nothing is tested."""
        del x, y, is_eval
        return {}


class Ordered(Dataset):  # type: ignore[misc]
    """A client's samples, in the work's order of each epoch."""

    def __init__(self, work: Work, round_: int, client: int) -> None:
        start, size = int(work.starts[client]), int(work.sizes[client])
        everything = [work.inputs[start : start + size], work.targets[start : start + size]]
        super().__init__(raw_data=everything, user_id=str(client))
        self._work, self._round, self._client, self._epoch = work, round_, client, 0

    def iter(self, batch_size: int | None) -> Iterator[list[Tensor]]:
        """One epoch's batches; all samples for the test that cannot be turned off."""
        if batch_size != self._work.batch_size:
            yield self.raw_data
            return
        order = self._work.order(self._round, self._client, self._epoch)
        self._epoch += 1
        for batch in order.split(batch_size):
            yield [self._work.inputs[batch], self._work.targets[batch]]


class Talk(TrainingProcessCallback):  # type: ignore[misc]
    """Waits for the benchmark between rounds."""

    def __init__(self, out: str) -> None:
        self._out = out
        self._since = 0.0

    def on_train_begin(self, *, model: Any) -> Metrics:
        """The first round waits too."""
        del model
        say(ready=time.perf_counter() - STARTED)
        wait_for_round()
        self._since = time.perf_counter()
        return Metrics()

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: Any, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        """Reports the round and waits for the next."""
        del aggregate_metrics
        say(seconds=time.perf_counter() - self._since)
        weights = {
            name.removeprefix("model."): tensor
            for name, tensor in model.pytorch_model.state_dict().items()
        }
        if central_iteration == 0:
            save(weights, f"{self._out}.first.npz")
        over = wait_for_round() is None
        if over:
            save(weights, f"{self._out}.last.npz")
            say(end=True)
        self._since = time.perf_counter()
        return over, Metrics()


def main() -> None:
    """Serves rounds."""
    path, out = sys.argv[1:3]
    quiet()
    work = Work(path)
    torch.manual_seed(0)
    net = WithLoss(work.model())
    model = PyTorchModel(
        net,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(net.parameters(), lr=1.0),
    )
    asked = iter(
        (round_, client) for round_, cohort in enumerate(work.cohorts.tolist()) for client in cohort
    )
    data = FederatedDataset(
        make_dataset_fn=lambda place: Ordered(work, *place), user_sampler=lambda: next(asked)
    )
    backend = SimulatedBackend(
        training_data=data, val_data=data, postprocessors=[WeightByDatapoints()]
    )
    FederatedAveraging().run(
        backend=backend,
        model=model,
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=STOP,
            evaluation_frequency=STOP,
            train_cohort_size=work.cohorts.shape[1],
            val_cohort_size=None,
        ),
        model_train_params=NNTrainHyperParams(
            local_batch_size=work.batch_size,
            local_num_epochs=work.epochs,
            local_learning_rate=work.lr,
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=1000),
        callbacks=[Talk(out)],
        send_metrics_to_platform=False,
    )


if __name__ == "__main__":
    main()
