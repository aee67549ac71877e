"""Needs and capabilities as values: who trains a job follows from comparing them."""

from __future__ import annotations

import pytest
import torch

from engine_cases import check_same, jobs_of, small_federation, sweep
from fedproto import Ditto, FedAvg, FedPer, FedProx, FedRep, Moon
from fedproto.data.tasks import task_named
from fedproto.engines import auto
from fedproto.engines.base import (
    ENGINES,
    EVERYTHING,
    Capability,
    EngineOptions,
    Workload,
    needs_of,
)
from fedproto.engines.reference import ReferenceEngine
from fedproto.engines.training import TrainOptions
from fedproto.models.base import build_model
from fedproto.models.small import MLPOptions
from fedproto.strategies.sections import Method
from helpers import Notices

PLAIN = TrainOptions(epochs=1, batch_size=5, lr=0.05)


def small_model():
    federation = small_federation()
    return build_model(
        MLPOptions(), federation.input_shape, federation.num_classes, seed=5
    ).double()


class ToyEngine(ReferenceEngine):
    """The reference engine, but for batch terms; remembers the strategies it trained."""

    capabilities = EVERYTHING - {Capability.BATCH_TERM}

    def __init__(self, workload):
        super().__init__(workload)
        self.trained = []

    def train_natively(self, jobs):
        assert not any("batch_term" in job.method.needs.hooks for job in jobs)
        self.trained += [type(job.strategy) for job in jobs]
        return super().train_natively(jobs)


def toy(federation, model, notices):
    options = EngineOptions(name="reference", device="cpu", dtype="float64")
    workload = Workload(federation, model, task_named("classification"), options, Notices(notices))
    return ToyEngine(workload)


def test_a_job_beyond_the_capabilities_is_handed_over_with_one_notice():
    federation, model = small_federation(), small_model()
    own, beyond = (jobs_of(federation, model, one) for one in (FedAvg(), Moon()))
    jobs = [job for pair in zip(own, beyond, strict=True) for job in pair]
    engine = toy(federation, model, notices := [])
    found = [engine.train(jobs) for _ in range(2)]
    truth = ReferenceEngine(engine.workload).train(jobs)
    assert notices == [
        "engine 'toy' cannot run some jobs (batch terms); engine 'reference' trains them"
    ]
    assert engine.trained == [FedAvg] * len(own) * 2
    for updates in found:
        assert [one.client for one in updates] == [job.client for job in jobs]
        for update, expected in zip(updates, truth, strict=True):
            for name, tensor in expected.params.items():
                assert torch.equal(update.params[name], tensor)
    engine.close()


def test_an_engine_capable_of_a_job_says_nothing():
    federation, model = small_federation(), small_model()
    engine = toy(federation, model, notices := [])
    engine.train(jobs_of(federation, model, FedProx()))
    assert notices == []
    assert set(engine.trained) == {FedProx}


@pytest.mark.parametrize(
    ("strategy", "needed"),
    [
        (FedProx(), set()),
        (Moon(), {Capability.BATCH_TERM}),
        (FedPer(), set()),
        (FedRep(), {Capability.TRAINABLE}),
        (Ditto(), {Capability.PERSONAL_MODEL}),
    ],
)
def test_needs_follow_from_the_method(strategy, needed):
    assert needs_of(Method(strategy)) == needed


def test_the_last_fallback_of_every_engine_can_do_everything():
    for name in ENGINES.names():
        engine = ENGINES.get(name)
        assert isinstance(engine.capabilities, frozenset)
        assert ENGINES.get(engine.fallbacks[-1]).capabilities == EVERYTHING


@pytest.mark.parametrize(
    ("needs", "name"),
    [
        ([set()], "stacked"),
        ([{Capability.BATCH_TERM}], "stacked"),
        ([{Capability.LABEL_MAPS}], "captured"),
        ([{Capability.TRAINABLE}], "reference"),
        ([{Capability.TRAINABLE}, set()], "stacked"),
        ([{Capability.LABEL_MAPS, Capability.FLOAT64}], "reference"),
    ],
)
def test_auto_chooses_by_needs_and_capabilities(monkeypatch, needs, name):
    monkeypatch.setattr(EngineOptions, "torch_device", lambda _: torch.device("cuda"))
    needs = [frozenset({Capability.CUDA, *one}) for one in needs]
    assert auto.choose(EngineOptions(), needs, auto.Demand()).name == name


def test_stacked_hands_phases_and_personal_models_over():
    strategies = [FedRep(), Ditto(), FedAvg()]
    truth = sweep("reference", small_model(), strategies=strategies)
    found = sweep("stacked", small_model(), strategies=strategies)
    assert len(found.notices) == 2
    assert all("engine 'reference' trains them" in text for text in found.notices)
    check_same(found, truth, 1e-9)
