"""What trains a worker's jobs: the reference engine, with manual steps wherever there are any."""

from __future__ import annotations

from torch import Tensor

from fedproto.engines.base import Workload
from fedproto.engines.job import LocalJob
from fedproto.engines.reference import ReferenceEngine, Step
from fedproto.engines.workers.manual import manual_network
from fedproto.rng import Indices
from fedproto.strategies.base import Local, Objective


class ManualTrainer(ReferenceEngine):
    """Trains one job after another on a CPU, images channels last.

    Which step a job takes depends on its options and the model alone, never on time or machine.
    """

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload, channels_last=True)
        self._manual = manual_network(
            self._model, workload.federation.input_shape, workload.options.torch_dtype()
        )

    def _fit(
        self, job: LocalJob, indices: Indices, local: Local, objective: Objective
    ) -> tuple[Tensor, int]:
        """As the reference does, but for where the weights lie meanwhile."""
        if self._manual is None or not can_step_manually(job):
            return super()._fit(job, indices, local, objective)
        params = dict(self._model.named_parameters())
        self._manual.load(params, objective)
        found = super()._fit(job, indices, local, objective)
        self._manual.store(params)
        return found

    def _stepper(self, job: LocalJob, local: Local, objective: Objective) -> Step:
        network, task = self._manual, self.workload.task
        if network is None or not can_step_manually(job):
            return super()._stepper(job, local, objective)

        def calibrated(scores: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            loss, slope = task.loss_and_slope(objective.calibrate(scores), targets)
            return loss, slope if objective.scale is None else slope * objective.scale.to(slope)

        slope_of = calibrated if objective.calibrated else task.loss_and_slope

        def step(inputs: Tensor, targets: Tensor) -> Tensor:
            return network.step(inputs, targets, slope_of, job.lr)

        return step


def can_step_manually(job: LocalJob) -> bool:
    """Whether a job asks for plain gradient descent, with any objective in closed form.

    Cropped images may have another size than the network was made for.
    """
    closed = not job.method.needs.hooks & {"penalty", "batch_term", "trainable"}
    cropped = job.augment is not None and job.augment.crop > 0
    plain = job.train.plain and job.train.accumulate == 1
    return plain and closed and not cropped
