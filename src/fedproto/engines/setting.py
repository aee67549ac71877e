"""The setting that a strategy's declarations depend on, read off a workload."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fedproto.data.federation import Federation
from fedproto.engines.base import Workload
from fedproto.errors import DataError
from fedproto.models.base import class_rows, features_of
from fedproto.strategies.contract import FeatureShape, Setting
from fedproto.types import Tensors


def setting_of(workload: Workload, params: Tensors) -> Setting:
    """Model and federation as declarations see them."""
    federation, task = workload.federation, workload.task
    features, head = _described(workload)
    return Setting(
        params,
        federation.num_classes,
        len(federation.clients),
        features,
        head,
        task.labels_per_sample(federation.input_shape),
        callable(getattr(workload.model, "head", None)),
        dict(workload.model.named_buffers()),
    )


@torch.no_grad()
def _described(workload: Workload) -> tuple[FeatureShape | None, tuple[str, ...]]:
    """What features look like, and which parameters are the head; the model is given an input."""
    model = workload.model
    training = model.training
    features: FeatureShape | None = None
    try:
        x = _one_input(workload.federation, model)
        encoded = features_of(model.eval())(x)
        features = FeatureShape(*workload.task.feature_shape(encoded))
        return features, class_rows(model, x, workload.federation.num_classes)
    except (RuntimeError, ValueError, IndexError, TypeError):
        return features, ()
    finally:
        model.train(training)


def _one_input(federation: Federation, model: torch.nn.Module) -> Tensor:
    """A sample, where there is any; a server may know the clients by their sizes only."""
    like = next(model.parameters(), torch.zeros(()))
    try:
        found, _ = federation.samples.batch(np.zeros(1, dtype=np.int64))
    except (DataError, IndexError):
        found = torch.zeros(1, *federation.input_shape)
    return found.to(like.device, like.dtype if found.is_floating_point() else found.dtype)
