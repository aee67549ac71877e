"""Which stacked form a workload's model takes, or why it takes none."""

from __future__ import annotations

import copy

import torch

from fedproto.data.samples import TensorSamples
from fedproto.engines.base import Workload
from fedproto.engines.stacking.functional import FunctionalNetwork, reason_not_to_stack
from fedproto.engines.stacking.network import Network, block_network


def network_for(workload: Workload, samples: TensorSamples | None) -> tuple[Network | None, str]:
    """The stacked form of the workload's model, or why there is none."""
    federation, model = workload.federation, workload.model
    if samples is None:
        return None, "its samples are fetched batch by batch, not held on the device"
    if not workload.task.one_label:
        return None, f"{type(workload.task).__name__} is no classification"
    frozen = [name for name, one in model.named_parameters() if not one.requires_grad]
    if frozen:
        return None, f"parameter '{frozen[0]}' is not trained"
    kernels = (
        workload.options.compile
        and samples.inputs.device.type == "cuda"
        and samples.inputs.dtype == torch.float32
    )
    network: Network | None = block_network(model, federation.input_shape, kernels=kernels)
    if network is not None:
        return network, ""
    model = copy.deepcopy(model).to(workload.options.torch_device(), workload.options.torch_dtype())
    reason = reason_not_to_stack(model, samples.inputs[:2])
    if reason is not None:
        return None, f"{type(model).__name__}: {reason}"
    return FunctionalNetwork(model), ""
