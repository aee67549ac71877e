"""Segmentation in the engines: gradient accumulation, other engines, augmentation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from fedproto import Federation, FedProto, run
from fedproto.data.shapes import Shapes
from fedproto.data.tasks import Segmentation, task_named
from fedproto.engines.augment import AugmentOptions
from fedproto.engines.base import ENGINES, EngineOptions, LocalJob, Workload
from fedproto.engines.reference import read_state
from fedproto.errors import DataError, TrainingError
from fedproto.models.base import build_model
from fedproto.models.deeplab import SmallDeepLabOptions
from fedproto.strategies.fedproto import COUNT, SUM
from fedproto.types import ClientUpdate, ServerState
from helpers import begin, config_of, engine_for, planned


@pytest.fixture(scope="module")
def federation() -> Federation:
    return Shapes(images=24, size=16, classes=2, clients=3, alpha=100.0).load(Path())


@pytest.fixture
def model(federation) -> nn.Module:
    return build_model(
        SmallDeepLabOptions(channels=8), federation.input_shape, federation.num_classes, seed=2
    )


def jobs_of(
    federation, model, augment: AugmentOptions | None = None, strategy=None, **train
) -> list[LocalJob]:
    options = {"epochs": 1, "batch_size": 4, "lr": 1e-3} | train
    config = config_of(strategy or FedProto(), cohort=3, delta=0.0, **options)
    config = replace(config, augment=augment or AugmentOptions())
    return planned(begin(config, model), federation).jobs


def trained(federation, model, name: str = "reference", **options) -> list[ClientUpdate]:
    workload = Workload(
        federation, model, task_named(federation.task), EngineOptions(device="cpu", dtype="float64")
    )
    engine = ENGINES.get(name)(workload)
    try:
        jobs = jobs_of(federation, model.double(), **options)
        return engine.train(jobs)
    finally:
        engine.close()


def assert_alike(ones: list[ClientUpdate], others: list[ClientUpdate]) -> None:
    for one, other in zip(ones, others, strict=True):
        assert one.train_loss == pytest.approx(other.train_loss, rel=1e-6)
        for name, value in one.params.items():
            assert torch.allclose(value, other.params[name], rtol=1e-6, atol=1e-8), name
        assert torch.equal(one.payload[COUNT], other.payload[COUNT])
        assert torch.allclose(one.payload[SUM], other.payload[SUM], rtol=1e-6)


@pytest.mark.parametrize("name", ["processes", "stacked"])
def test_every_engine_trains_segmentation_like_the_reference(federation, model, name):
    vary = AugmentOptions(flip=True, scale=(0.5, 2.0))
    assert_alike(
        trained(federation, model, augment=vary), trained(federation, model, name, augment=vary)
    )


@pytest.mark.parametrize("policy", ["average", "local"])
def test_processes_test_like_the_reference(federation, model, policy):
    params, buffers = read_state(model)
    state = ServerState(0, params, buffers if policy == "average" else {})
    options = EngineOptions(device="cpu", eval_batch_size=3, workers=2)
    scores = []
    for name in ("reference", "processes"):
        engine = ENGINES.get(name)(Workload(federation, model, Segmentation(), options))
        scores.append(engine.evaluate([state], federation.test_indices)[0])
        engine.close()
    assert scores[0].keys() == scores[1].keys()
    for metric, value in scores[0].items():
        assert scores[1][metric] == pytest.approx(value, abs=1e-3), metric


def test_augmentation_changes_what_is_learned_the_same_way_every_time(federation, model):
    vary = AugmentOptions(flip=True, scale=(0.5, 2.0))
    plain = trained(federation, model)
    once, again = (trained(federation, model, augment=vary) for _ in range(2))
    assert plain[0].train_loss != once[0].train_loss
    assert [update.train_loss for update in once] == [update.train_loss for update in again]


def test_mixed_precision_changes_nothing_on_a_cpu(federation, model):
    updates = [
        engine_for(federation, model, device="cpu", amp=amp).train(jobs_of(federation, model))
        for amp in (False, True)
    ]
    assert [update.train_loss for update in updates[0]] == [
        update.train_loss for update in updates[1]
    ]


def test_a_users_own_label_maps_train_from_python(model):
    images = torch.rand(6, 3, 16, 16)
    masks = (images[:, 0] > 0.5).long() + (images[:, 1] > 0.9)
    masks[:, :2] = 255
    own = Federation.from_clients(
        [(images[:3], masks[:3]), (images[3:], masks[3:])],
        task="segmentation",
        class_names=("ground", "sky", "bird"),
    )
    assert own.num_classes == 3
    vary = AugmentOptions(flip=True)
    result = run(own, model, FedProto(), rounds=1, cohort=2, augment=vary, epochs=1, lr=1e-3)
    assert {"miou", "iou_ground", "iou_sky"} <= result.metrics.keys()
    wrong = masks.masked_fill(masks == 2, 7)
    with pytest.raises(DataError, match="label 7 is outside"):
        Federation.from_clients([(images, wrong)], num_classes=3, task="segmentation")


def test_a_state_of_another_model_is_named(federation, model):
    (job, *_) = jobs_of(federation, model)
    params = {
        "unknown.weight" if place == 0 else name: value
        for place, (name, value) in enumerate(job.state.params.items())
    }
    engine = engine_for(federation, model, device="cpu")
    with pytest.raises(TrainingError, match=r"unknown\.weight"):
        engine.evaluate([ServerState(0, params, job.state.buffers)], federation.test_indices)
