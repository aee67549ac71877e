"""Model and data together: the module as engines use it, and the setting for strategies.

Both are found by running the model on one input.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn

from fedproto.data.federation import Federation
from fedproto.data.tasks import Task
from fedproto.engines.base import LocalJob, Workload
from fedproto.engines.layers import evaluating, statistics_names
from fedproto.equations import class_sums
from fedproto.errors import DataError, TrainingError, reason_of
from fedproto.models.adapter import adapted, class_rows, scores_features
from fedproto.models.base import declares_features, features_of
from fedproto.rng import Indices, seeded
from fedproto.strategies.base import PERSONAL
from fedproto.strategies.values import Local, Observation, Setting
from fedproto.types import ClientUpdate, ServerState, Tensors, under


def fitted(model: nn.Module, federation: Federation, task: Task) -> nn.Module:
    """The module with its features and head found, once it is known to fit the data.

    Raises:
        TrainingError: If it does not take the inputs or does not give one logit per class.
    """
    with evaluating(model):
        x = _one_input(federation, model)
        _check_logits(model, x, federation.num_classes, one_label=task.one_label)
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise TrainingError(
                f"{type(model).__name__} has no parameter with requires_grad = True"
            )
        return adapted(model, x)


def setting_of(workload: Workload, params: Tensors) -> Setting:
    """Model and federation as declarations see them."""
    federation, model = workload.federation, workload.model
    x = _one_input(federation, model)
    found = setting_for(model, x, workload.task, federation.num_classes, len(federation.clients))
    labels = workload.task.labels_per_sample(federation.input_shape)
    return replace(found, params=params, labels=labels)


def setting_for(
    model: nn.Module, x: Tensor, task: Task, num_classes: int, num_clients: int
) -> Setting:
    """The setting of a model that takes such inputs, in a federation of some size."""
    features: tuple[int, int] | None = None
    head: tuple[str, ...] = ()
    scored = linear = False
    with evaluating(model), contextlib.suppress(RuntimeError, ValueError, IndexError, TypeError):
        head = class_rows(model, x, num_classes)
        if declares_features(model):
            with torch.no_grad():
                encoded = features_of(model)(x)
            features = task.feature_shape(encoded)
            scored = scores_features(model, x)
            linear = scored and _is_linear(model, x, encoded, head)
    params, buffers = read_state(model)
    return Setting(
        params,
        num_classes,
        num_clients,
        features,
        head,
        has_head=scored,
        buffers=buffers,
        linear=linear,
    )


class ClientView:
    """The clients of jobs, as strategies see them."""

    def __init__(
        self,
        workload: Workload,
        device: torch.device,
        labels: Callable[[Indices], Iterable[Tensor]],
    ) -> None:
        """Takes what gives the labels of some samples, in parts."""
        self._workload, self._device, self._labels = workload, device, labels
        self._class_counts: dict[int, Tensor] = {}

    @cached_property
    def setting(self) -> Setting:
        """Model and federation as declarations see them."""
        return setting_of(self._workload, dict(self._workload.model.named_parameters()))

    def local(self, job: LocalJob) -> Local:
        """A client's side of a job."""
        needs = job.method.needs
        asks_for_head = needs.hooks & {"trainable", "batch_term", "personal"}
        return Local(
            num_examples=len(self._workload.federation.train_indices(job.client)),
            steps=job.batches.steps,
            lr=job.lr,
            class_counts=self._class_counts_of(job),
            params=job.state.params,
            broadcast={name: one.to(self._device) for name, one in job.broadcast.items()},
            memory={name: one.to(self._device) for name, one in job.memory.items()},
            head=self.setting.head if needs.personal_model or asks_for_head else (),
        )

    def update(
        self,
        job: LocalJob,
        local: Local,
        trained: Tensors,
        buffers: Tensors,
        observed: tuple[Observation | None, Observation | None],
        loss: tuple[Tensor | float, int],
        own: Tensors | None = None,
    ) -> ClientUpdate:
        """The result of a job.

        Args:
            job: What was asked for.
            local: The client's side of it.
            trained: The model's parameters after training.
            buffers: Its other tensors.
            observed: Statistics of the client's data before and after training.
            loss: Its sum over the last epoch, and of how many samples.
            own: The client's own model, if it trains one beside.
        """
        report = job.method.report(local, trained, *observed)
        stay = job.strategy.personal(self.setting) if "personal" in job.method.needs.hooks else ()
        kept = own or {name: trained[name] for name in stay}
        return ClientUpdate(
            client=job.client,
            num_examples=job.batches.num_examples,
            params={name: trained[name] for name in job.state.params if own or name not in kept},
            buffers={name: buffers[name] for name in job.state.buffers},
            # A device is asked last: until then it works in parallel with the host.
            train_loss=float(loss[0]) / loss[1] if loss[1] else None,
            epochs_done=job.batches.epochs,
            steps=job.batches.steps,
            lr=job.lr,
            payload=report.payload,
            memory={**report.memory, **under(PERSONAL, kept)},
        )

    def _class_counts_of(self, job: LocalJob) -> Tensor | None:
        """The client's labels per class, if its strategy asks for them; counted once."""
        if not job.method.needs.classes:
            return None
        if job.client not in self._class_counts:
            federation = self._workload.federation
            counts = [
                class_sums(None, labels.flatten(), federation.num_classes)[1]
                for labels in self._labels(federation.train_indices(job.client))
            ]
            self._class_counts[job.client] = torch.stack(counts).sum(dim=0)
        return self._class_counts[job.client]


@torch.no_grad()
def _is_linear(model: nn.Module, x: Tensor, encoded: Tensor, head: tuple[str, ...]) -> bool:
    """Whether the logits are the rows of the head times the features, plus its bias."""
    own = {name: tensor for name, tensor in model.named_parameters() if name in head}
    weights = [one.flatten(1) for one in own.values() if one.dim() > 1]
    biases = [one for one in own.values() if one.dim() == 1]
    logits = model(x)
    if logits.dim() == 2:
        vectors = encoded.flatten(1)
    else:
        vectors, logits = (one.flatten(2).transpose(1, 2) for one in (encoded, logits))
    if len(weights) != 1 or weights[0].shape[1] != vectors.shape[-1]:
        return False
    again = vectors @ weights[0].t() + sum(biases)
    return again.shape == logits.shape and torch.allclose(again, logits, rtol=1e-3, atol=1e-4)


@torch.no_grad()
def _check_logits(model: nn.Module, x: Tensor, num_classes: int, *, one_label: bool) -> None:
    kind, shape = type(model).__name__, tuple(x.shape[1:])
    try:
        with seeded(0):
            logits = model(x)
    except Exception as error:  # noqa: BLE001 - a user's code can fail in any way
        size = ", ".join(map(str, shape))
        raise TrainingError(
            f"{kind} does not accept the data's inputs, a batch of shape [B, {size}]:"
            f" {reason_of(error)}"
        ) from None
    if not isinstance(logits, Tensor):
        raise TrainingError(
            f"{kind} returns {type(logits).__name__}, not logits; return one tensor with a logit"
            " per class from forward(x)"
        )
    wanted = f"[B, {num_classes}]" if one_label else f"[B, {num_classes}, H, W]"
    sides = 2 if one_label else 4
    if logits.dim() != sides or len(logits) != len(x) or logits.shape[1] != num_classes:
        raise TrainingError(
            f"{kind} must give logits of shape {wanted}, one per class of the data; a batch of"
            f" {len(x)} gives {list(logits.shape)}; make its last layer {num_classes} wide, or"
            " give the data its number of classes (num_classes=...)"
        )
    if (logits >= 0).all() and torch.allclose(logits.sum(dim=1), logits.new_ones(())):
        raise TrainingError(
            f"{kind} gives probabilities, which sum to 1, not logits; leave out its softmax, which"
            " the loss contains"
        )


def _one_input(federation: Federation, model: nn.Module) -> Tensor:
    """A sample, where there is any; a server may know the clients by their sizes only."""
    like = next(model.parameters(), torch.zeros(()))
    try:
        found, _ = federation.samples.batch(np.zeros(1, dtype=np.int64))
    except (DataError, IndexError):
        with seeded(0):
            found = torch.rand(1, *federation.input_shape)
    return found.to(like.device, like.dtype)


@torch.no_grad()
def prefer_channels_last(model: nn.Module, federation: Federation) -> None:
    """Lets a model keep images with their channels last, if its forward pass allows that.

    A module that flattens by ``x.view(len(x), -1)`` does not.
    """
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    try:
        with evaluating(model):
            model(_one_input(federation, model))
    except RuntimeError:
        model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]


def read_state(model: nn.Module) -> tuple[Tensors, Tensors]:
    """Copies of a model's parameters and of its other saved tensors, by name.

    A tensor with several names, as of tied weights, appears under its first.
    """
    saved = model.state_dict()
    return (
        {name: one.detach().clone() for name, one in model.named_parameters()},
        {name: one.detach().clone() for name, one in model.named_buffers() if name in saved},
    )


@torch.no_grad()
def load_state(model: nn.Module, state: ServerState) -> None:
    """Puts a state's tensors into a model; one without batch-norm statistics leaves those.

    They are copied all at once: hundreds of small copies would keep the host of a GPU busy.
    """
    given, own = {**state.params, **state.buffers}, model.state_dict()
    named = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    missing = (named & own.keys()) - given.keys() - statistics_names(model)
    wrong = [
        *(name for name in given if name not in own or given[name].shape != own[name].shape),
        *missing,
    ]
    if wrong:
        raise TrainingError(f"the state does not fit the model: tensor '{wrong[0]}'")
    for floating in (True, False):  # tensors of one type are copied together
        names = [name for name, one in given.items() if one.is_floating_point() == floating]
        if names:
            torch._foreach_copy_([own[name] for name in names], [given[name] for name in names])
