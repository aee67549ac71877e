"""Tasks: what is learned, one file each."""

from __future__ import annotations

from collections.abc import Iterable

from fedproto.data.tasks.base import Task, TaskOptions
from fedproto.data.tasks.classification import Classification
from fedproto.data.tasks.segmentation import Segmentation
from fedproto.errors import ConfigError, unknown_name

__all__ = [
    "TASKS",
    "Classification",
    "Segmentation",
    "Task",
    "TaskOptions",
    "headline",
    "is_share",
    "loss_beside",
    "lower_is_better",
    "task_named",
]

TASKS: dict[str, type[Task]] = {"classification": Classification, "segmentation": Segmentation}


def lower_is_better(metric: str) -> bool:
    """Whether small values of a metric are good: those of losses and errors, not of scores."""
    return metric.endswith(("loss", "ece", "mmd", "dissimilarity")) or metric.startswith("at_zero")


def is_share(metric: str) -> bool:
    """Whether a metric lies between 0 and 1, and is shown in per cent."""
    return metric.endswith("accuracy") or "iou" in metric


def headline(metrics: Iterable[str]) -> str:
    """The score by which models are compared first, among the names of those that were taken.

    That of the task; on the validation part where nothing else was tested.
    """
    taken = set(metrics)
    names = [prefix + task.headline for prefix in ("", "validation_") for task in TASKS.values()]
    return next((name for name in names if name in taken), names[0])


def loss_beside(metric: str) -> str:
    """The loss on the samples that a score was taken on."""
    return "validation_loss" if metric.startswith("validation_") else "loss"


def task_named(
    name: str, class_names: Iterable[str] = (), options: TaskOptions | None = None
) -> Task:
    """The task of that name."""
    if name not in TASKS:
        raise ConfigError(unknown_name("task", name, TASKS))
    return TASKS[name](tuple(class_names), options or TaskOptions())
