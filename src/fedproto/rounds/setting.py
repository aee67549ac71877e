"""The setting that a strategy's declarations depend on, read off a workload."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fedproto.data.federation import Federation
from fedproto.engines.base import Workload
from fedproto.errors import DataError
from fedproto.models.base import features_of
from fedproto.strategies.contract import FeatureShape, Setting
from fedproto.types import Tensors


def setting_of(workload: Workload, params: Tensors) -> Setting:
    """Model and federation as declarations see them.

    Args:
        workload: What all jobs share.
        params: The model's trainable tensors.
    """
    federation = workload.federation
    return Setting(params, federation.num_classes, len(federation.clients), feature_shape(workload))


def feature_shape(workload: Workload) -> FeatureShape | None:
    """Asks the model itself, with one input; None for a model that cannot take one."""
    model = workload.model
    training = model.training
    try:
        with torch.no_grad():
            features = features_of(model.eval())(_one_input(workload.federation, model))
        return FeatureShape(*workload.task.feature_shape(features))
    except (RuntimeError, ValueError, IndexError, TypeError):
        return None
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
