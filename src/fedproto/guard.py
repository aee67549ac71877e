"""The guard: what an update must be before it may enter the average, wherever it came from.

A client is never trusted, in a simulation no more than over a network: names, shapes, types,
ranges and claims are compared with what the job asked for. What passes can still be a bad model;
the guard keeps the numbers usable and the weights of clients honest, no more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fedproto.engines.base import Workload
from fedproto.models.base import features_of
from fedproto.types import ClientUpdate, LocalJob, Prototypes, Tensors

LARGEST = 1e30
"""Beyond this a finite number is taken for a broken one: sums of a few would be infinite."""


@dataclass(frozen=True)
class FeatureShape:
    """What prototypes of a model on a federation look like.

    Attributes:
        classes: Number of classes C.
        channels: Channels D of a feature vector.
        per_sample: Feature vectors that one sample gives.
    """

    classes: int
    channels: int
    per_sample: int


def feature_shape(workload: Workload) -> FeatureShape | None:
    """Asks the model itself, with one empty input; None for a model that cannot take one."""
    model, federation = workload.model, workload.federation
    like = next(model.parameters(), torch.zeros(()))
    training = model.training
    try:
        with torch.no_grad():
            empty = torch.zeros(1, *federation.input_shape, dtype=like.dtype, device=like.device)
            features = features_of(model.eval())(empty)
        channels, per_sample = workload.task.feature_shape(features)
    except (RuntimeError, ValueError, IndexError, TypeError):
        return None
    finally:
        model.train(training)
    return FeatureShape(federation.num_classes, channels, per_sample)


def reason_to_refuse(
    update: ClientUpdate, job: LocalJob, features: FeatureShape | None = None
) -> str | None:
    """Why an update must not enter the average; None when it may.

    Args:
        update: What the client sent.
        job: What it was asked to do.
        features: What its prototypes must look like, where that is known.
    """
    reason = (
        _reason_by_claims(update, job)
        or _reason_by_layout("params", update.params, job.state.params)
        or _reason_by_layout("buffers", update.buffers, job.state.buffers)
        or _reason_by_prototype_layout(update, job, features)
    )
    if reason is not None:
        return reason
    checks = list(_value_checks(update, job, features))
    # All verdicts at once: asking one by one would wait for a GPU once per tensor.
    verdicts = torch.stack([verdict for _, verdict in checks]).tolist() if checks else []
    for (reason, _), good in zip(checks, verdicts, strict=True):
        if not good:
            return reason
    if update.train_loss is not None and not math.isfinite(update.train_loss):
        return "its training loss is not finite"
    return None


def _reason_by_claims(update: ClientUpdate, job: LocalJob) -> str | None:
    if update.client != job.client:
        return f"the update says it is of client {update.client}"
    if update.num_examples != job.batches.num_examples:
        return f"it claims {update.num_examples} samples; it has {job.batches.num_examples}"
    if not 0 <= update.epochs_done <= job.batches.epochs:
        return f"it claims {update.epochs_done} epochs of {job.batches.epochs}"
    return None


def _reason_by_layout(kind: str, given: Tensors, wanted: Tensors) -> str | None:
    if given.keys() != wanted.keys():
        odd = sorted(given.keys() ^ wanted.keys())[0]
        fault = "is missing" if odd in wanted else "is unknown"
        return f"{kind} '{odd}' {fault}"
    for name, tensor in given.items():
        if tensor.shape != wanted[name].shape:
            return (
                f"tensor '{name}' has shape {tuple(tensor.shape)}, not {tuple(wanted[name].shape)}"
            )
        if tensor.dtype != wanted[name].dtype:
            return f"tensor '{name}' has type {tensor.dtype}, not {wanted[name].dtype}"
    return None


def _reason_by_prototype_layout(
    update: ClientUpdate, job: LocalJob, features: FeatureShape | None
) -> str | None:
    prototypes, margin = update.prototypes, update.local_margin
    if not job.strategy.needs_prototypes:
        sent = prototypes is not None or margin is not None
        return "it sends prototypes or margins, which nobody asked for" if sent else None
    if prototypes is None:
        return "it sends no prototypes"
    wanted = _wanted_shape(job.state.prototypes, features)
    given = tuple(prototypes.sum.shape)
    if len(given) != 2 or (wanted is not None and given != wanted):
        return f"its prototypes have shape {given}, not {wanted or 'classes by channels'}"
    if not prototypes.sum.is_floating_point():
        return f"its prototypes have type {prototypes.sum.dtype}"
    if prototypes.count.shape != given[:1] or prototypes.count.dtype != torch.int64:
        return "its counts are not one whole number per class"
    if margin is None and job.strategy.summarize(prototypes, prototypes) is not None:
        return "it sends no margins"
    if margin is not None and (margin.shape != given[:1] or not margin.is_floating_point()):
        return "its margins are not one number per class"
    return None


def _wanted_shape(
    known: Prototypes | None, features: FeatureShape | None
) -> tuple[int, int] | None:
    if features is not None:
        return features.classes, features.channels
    return None if known is None else (known.sum.shape[0], known.sum.shape[1])


def _value_checks(
    update: ClientUpdate, job: LocalJob, features: FeatureShape | None
) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in {**update.params, **update.buffers}.items():
        if tensor.is_floating_point():
            yield (
                f"tensor '{name}' is not finite after local training (learning rate too high?)",
                _usable(tensor),
            )
    if update.prototypes is None:
        return
    sums, count = update.prototypes.sum, update.prototypes.count
    yield "its prototypes are not finite", _usable(sums)
    yield "it has negative counts", (count >= 0).all()
    vectors = job.batches.num_examples * (features.per_sample if features else 1)
    if features is not None:
        # Each count by itself first: a sum of several could run over and look small.
        within = (count <= vectors).all() & (count.clamp(0, vectors).sum() <= vectors)
        yield f"its counts exceed the {vectors} features that its samples can give", within
    unseen = count <= 0
    yield "it has prototypes of classes without samples", (sums[unseen] == 0).all()
    margin = update.local_margin
    if margin is not None:
        low, high = job.strategy.margin_bounds(sums.shape[1])
        slack = 1e-5 * abs(high) if high > 1 and math.isfinite(high) else 0.0
        yield (
            f"its margins are not within [{low:g}, {high:g}]",
            ((margin >= low) & (margin <= high + slack)).all(),
        )
        yield "it has margins of classes without samples", (margin[unseen] == 0).all()


def _usable(tensor: Tensor) -> Tensor:
    """Whether all values are numbers of a sane size; comparing with NaN is false."""
    if not tensor.numel():
        return torch.ones((), dtype=torch.bool, device=tensor.device)
    # One pass that writes nothing, however large the model.
    smallest, largest = tensor.aminmax()
    return (smallest >= -LARGEST) & (largest <= LARGEST)
