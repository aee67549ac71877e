"""Segmentation's loss, confusion-matrix metrics and dense prototypes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F  # noqa: N812 - the name everyone uses

from fedproto.data.tasks import headline, task_named
from fedproto.equations import class_prototypes
from fedproto.types import VOID

TASK = task_named("segmentation", ("background", "cat", "dog", "owl", "yak"))


def scores_for(predicted: np.ndarray, num_classes: int) -> torch.Tensor:
    """Scores whose largest is at the predicted class."""
    noise = torch.rand(predicted.shape[0], num_classes, *predicted.shape[1:])
    return noise + 2 * F.one_hot(torch.from_numpy(predicted), num_classes).movedim(-1, 1)


def counted_iou(predicted: np.ndarray, masks: np.ndarray, label: int) -> float | None:
    """IoU by sets of pixels, without a confusion matrix."""
    pixels = np.flatnonzero(masks.ravel() != VOID)
    true = {place for place in pixels if masks.ravel()[place] == label}
    said = {place for place in pixels if predicted.ravel()[place] == label}
    return len(true & said) / len(true | said) if true | said else None


@pytest.mark.parametrize("seed", range(5))
def test_metrics_agree_with_counting_pixels(seed):
    rng = np.random.RandomState(seed)
    # Class 3 is in the masks but never predicted, 2 is predicted but absent, 4 is neither.
    masks = rng.choice([0, 1, 3, VOID], size=(6, 9, 7), p=[0.4, 0.3, 0.2, 0.1]).astype(np.int64)
    predicted = rng.choice([0, 1, 2], size=masks.shape).astype(np.int64)
    scores, targets = scores_for(predicted, 5), torch.from_numpy(masks)
    halves = [TASK.tally(scores[part], targets[part]) for part in (slice(0, 2), slice(2, 6))]
    metrics = TASK.metrics(halves[0] + halves[1])

    iou = {name: counted_iou(predicted, masks, c) for c, name in enumerate(TASK.class_names)}
    assert iou.pop("yak") is None
    assert "iou_yak" not in metrics
    for name, value in iou.items():
        assert metrics[f"iou_{name}"] == pytest.approx(value)
    assert iou["dog"] == iou["owl"] == 0
    objects = [iou["cat"], iou["dog"], iou["owl"]]
    assert metrics["miou"] == pytest.approx(np.mean(objects))
    assert metrics["miou_with_background"] == pytest.approx(np.mean([iou["background"], *objects]))
    valid = masks != VOID
    assert metrics["pixel_accuracy"] == pytest.approx((predicted == masks)[valid].mean())
    log_p = torch.log_softmax(scores, dim=1).movedim(1, -1)[torch.from_numpy(valid)]
    loss = -log_p.gather(1, targets[torch.from_numpy(valid)].unsqueeze(1)).mean()
    assert metrics["loss"] == pytest.approx(float(loss), rel=1e-5)


def test_loss_leaves_void_out_and_survives_nothing_but_void():
    scores = torch.randn(1, 3, 2, 2, requires_grad=True)
    targets = torch.tensor([[[0, VOID], [2, VOID]]])
    by_hand = -torch.log_softmax(scores, 1)[0]
    expected = (by_hand[0, 0, 0] + by_hand[2, 1, 0]) / 2
    assert torch.allclose(TASK.loss(scores, targets), expected)
    nothing = TASK.loss(scores, torch.full_like(targets, VOID))
    nothing.backward()
    assert float(nothing.detach()) == 0
    assert torch.equal(scores.grad, torch.zeros_like(scores))
    assert TASK.metrics(TASK.tally(scores.detach(), torch.full_like(targets, VOID))) == {}


# Two channels of a 4×4 map, and labels: background 0, classes 1 and 2, void.
FEATURES = torch.stack([torch.arange(16.0).reshape(4, 4), torch.full((4, 4), 10.0)]).unsqueeze(0)
LABELS = torch.tensor([[[1, 1, 0, VOID], [1, VOID, 0, 0], [2, 2, 0, VOID], [VOID, 2, 0, 1]]])


def prototypes(labels: torch.Tensor):
    return class_prototypes(*TASK.labelled_features(FEATURES, labels), num_classes=3)


def test_prototypes_of_a_map_worked_by_hand():
    found = prototypes(LABELS)
    # Class 1 at 0, 1, 4 and 15: mean 5. Class 2 at 8, 9 and 13: mean 10.
    assert found.count.tolist() == [0, 4, 3]
    assert found.mean.tolist() == [[0, 0], [5, 10], [10, 10]]


def test_labels_of_a_finer_map_are_those_of_the_nearest_pixel():
    fine = torch.full((1, 12, 12), VOID)
    fine[:, 1::3, 1::3] = LABELS  # the middle of each 3×3 block of pixels
    assert prototypes(fine).count.tolist() == [0, 4, 3]
    assert torch.equal(prototypes(fine).sum, prototypes(LABELS).sum)


def test_a_map_of_void_alone_has_no_prototypes():
    assert prototypes(torch.full_like(LABELS, VOID)).count.tolist() == [0, 0, 0]


def test_the_main_score_follows_the_task():
    assert headline(["loss", "accuracy"]) == "accuracy"
    assert headline(["loss", "miou", "iou_cat", "validation_miou"]) == "miou"
    assert headline(["validation_loss", "validation_miou"]) == "validation_miou"
    assert headline([]) == "accuracy"
