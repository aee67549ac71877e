"""The stacked form of a workload: its model as a network over stacked weights, and its samples."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from fedproto.data.samples import resident
from fedproto.engines.base import Workload
from fedproto.engines.stacking.formulas import Compiled, Fuse, unfused
from fedproto.engines.stacking.network import Network, stacked_network
from fedproto.models.base import declares_features, features_of


@dataclass(frozen=True)
class StackedForm:
    """A workload's model and data in stacked form.

    Attributes:
        inputs: All samples, in the network's layout.
        targets: All labels.
        fuse: Compiles the parts between the products, or leaves them as they are.
    """

    workload: Workload
    network: Network
    inputs: Tensor
    targets: Tensor
    fuse: Fuse


def stacked_form(workload: Workload) -> StackedForm | str:
    """The stacked form of a workload, or why there is none."""
    model, options = workload.model, workload.options
    device, dtype = options.torch_device(), options.torch_dtype()
    samples = resident(workload.federation.samples, device, dtype)
    if samples is None:
        return "its samples are fetched batch by batch, not held on the device"
    fixed = [name for name, one in model.named_parameters() if not one.requires_grad]
    if fixed:
        return f"parameter '{fixed[0]}' is not trained"
    compiles = options.compile and device.type == "cuda"
    kernels = compiles and dtype == torch.float32
    # Compared where products are exact.
    exact = copy.deepcopy(model).to("cpu", torch.float64)
    few = samples.inputs[:2].to("cpu", torch.float64)
    network = stacked_network(exact, few, kernels=kernels)
    if network is None:
        return f"{type(model).__name__}: not all of its layers can be stacked"
    try:
        difference = _difference(exact, few, network.portable() or network)
    except (RuntimeError, ValueError, TypeError) as error:
        difference = str(error).splitlines()[0]
    if difference is not None:
        return f"{type(model).__name__}: {difference}"
    inputs = network.lay_out(samples.inputs)
    if options.amp and kernels and network.convolves:
        inputs = inputs.bfloat16()
    return StackedForm(
        workload, network, inputs, samples.targets, Compiled() if compiles else unfused
    )


@torch.no_grad()
def _difference(model: nn.Module, inputs: Tensor, network: Network) -> str | None:
    """How a network's logits and features differ from a module's."""
    model.train()
    for module in model.modules():
        if isinstance(module, _DropoutNd | _BatchNorm):
            module.eval()  # their effect on a batch is known
    together = model(inputs)
    alone = torch.cat([model(one.unsqueeze(0)) for one in inputs])
    tensors = (*model.named_parameters(), *model.named_buffers())
    params = network.pack({name: tensor.unsqueeze(0) for name, tensor in tensors})
    batch = network.lay_out(inputs).unsqueeze(0)
    only = torch.eye(len(inputs), dtype=torch.bool, device=inputs.device)
    apart = [network.outputs(params, batch, one[None]).logits[0][one] for one in only]
    if not torch.equal(together, model(inputs)):
        return "it gives other logits for the same inputs when called twice"
    if not _close(torch.cat(apart), alone):
        return "the samples of a batch influence each other"
    found = network.outputs(params, batch, torch.ones_like(only[:1]))
    if not _close(together, found.logits[0]):
        return "it behaves differently in training and in evaluation"
    if declares_features(model):
        features = features_of(model.eval())(inputs).flatten(1)
        if not _close(found.features[0], features):
            return "it has other features than the input of its last layer"
    return None


def _close(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-3, atol=1e-4)
