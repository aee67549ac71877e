"""The processes engine's own promises: it survives its workers, and says what goes wrong."""

import os
import signal
import time
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

import pytest
import torch

from engine_cases import (
    CLASSES,
    MODELS,
    PersonalHead,
    check_same,
    engine_for,
    jobs_of,
    pids,
    small_federation,
    sweep,
)
from fedproto import FedAvg, FedProto
from fedproto.api.progress import progress_for
from fedproto.config import RunConfig
from fedproto.config.options import ScheduleOptions
from fedproto.data.tasks import Classification, Task
from fedproto.engines import auto, pool, processes
from fedproto.engines.auto import Demand
from fedproto.engines.base import EngineOptions
from fedproto.engines.training import TrainOptions
from fedproto.errors import ConfigError, TrainingError
from fedproto.models.base import build_model
from fedproto.rounds.run import engine_of
from fedproto.strategies import Strategy
from helpers import Notices as Collected
from helpers import same_tensors


@pytest.fixture
def case():
    federation = small_federation()
    model = build_model(MODELS["cnn"], federation.input_shape, CLASSES, seed=0).double()
    return federation, model


def bits(updates):
    return [[tensor.numpy().tobytes() for tensor in update.params.values()] for update in updates]


def test_a_killed_worker_changes_nothing(case):
    federation, model = case
    jobs = jobs_of(federation, model, FedProto()) * 4
    engine = engine_for("processes", federation, model, [], workers=2)
    try:
        undisturbed = engine.train(jobs)
        killed: list[int] = []

        def kill_one():
            if len(killed) < 3:
                victim = pids(engine._pool)[len(killed) % 2]
                killed.append(victim)
                os.kill(victim, signal.SIGKILL)

        engine.workload.callback.on_job = kill_one
        disturbed = engine.train(jobs)
        assert len(killed) == 3
        assert not set(killed) & set(pids(engine._pool))
        assert bits(disturbed) == bits(undisturbed)
        assert [update.client for update in disturbed] == [job.client for job in jobs]
        for one, other in zip(disturbed, undisturbed, strict=True):
            assert same_tensors(one.payload, other.payload)
            assert one.train_loss == other.train_loss
    finally:
        engine.close()


def test_a_stopped_worker_is_noticed_and_changes_nothing(case, monkeypatch):
    monkeypatch.setattr(pool, "IDLE_CHECKS", 10)
    monkeypatch.setattr(pool, "CHECK_EVERY", 0.1)
    federation, model = case
    jobs = jobs_of(federation, model, FedProto()) * 4
    notices: list[str] = []
    engine = engine_for("processes", federation, model, notices, workers=2)
    try:
        undisturbed = engine.train(jobs)
        victim = pids(engine._pool)[1]
        os.kill(victim, signal.SIGSTOP)
        disturbed = engine.train(jobs)
        assert victim not in pids(engine._pool)
        assert bits(disturbed) == bits(undisturbed)
        assert any("did not respond" in notice for notice in notices)
    finally:
        engine.close()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("reading", [True, False])
def test_a_worker_that_stops_within_a_long_message_is_noticed(monkeypatch, tmp_path, reading):
    """More than a pipe holds: whoever is at its other end waits until all of it is read."""
    monkeypatch.setattr(pool, "IDLE_CHECKS", 5)
    monkeypatch.setattr(pool, "CHECK_EVERY", 0.1)
    sent, once = bytes(10**7), tmp_path / "stopped"

    def write_some(self, buffer, *_):
        once.touch()
        os.write(self.fileno(), buffer[:1000])
        os.kill(os.getpid(), signal.SIGSTOP)

    def work(task):
        if not (reading or once.exists()):
            monkeypatch.setattr(Connection, "_send", write_some)
        return task

    results = {}
    workers = pool.WorkerPool(lambda _: work, [pool.CPU])
    try:
        (before,) = pids(workers)
        if reading:
            os.kill(before, signal.SIGSTOP)
        workers.run([sent], lambda place, result: results.update({place: result}))
        assert pids(workers) != [before]
    finally:
        workers.close()
    assert results == {0: sent}


def test_a_slow_task_is_not_taken_for_a_stopped_one(monkeypatch):
    monkeypatch.setattr(pool, "IDLE_CHECKS", 5)
    monkeypatch.setattr(pool, "CHECK_EVERY", 0.1)

    def compute(seconds):
        ends = time.process_time() + seconds
        while time.process_time() < ends:
            pass
        return os.getpid()

    results = {}
    workers = pool.WorkerPool(lambda _: compute, [pool.CPU])
    try:
        (before,) = pids(workers)
        workers.run([2.0], lambda place, result: results.update({place: result}))
    finally:
        workers.close()
    assert results == {0: before}


def test_the_number_of_workers_changes_nothing(case):
    federation, model = case
    jobs = jobs_of(federation, model, FedProto())
    results = []
    for workers in (1, 3):
        engine = engine_for("processes", federation, model, [], workers=workers)
        results.append(bits(engine.train(jobs)))
        assert len(pids(engine._pool)) == workers
        engine.close()
        assert pids(engine._pool) == []
    assert results[0] == results[1]


@dataclass(frozen=True)
class Deadly(Strategy):
    """Kills the process that trains it, unless that is the one of the tests."""

    owner: int = 0

    def objective(self, local):
        if os.getpid() != self.owner:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().objective(local)


@dataclass(frozen=True)
class Broken(Strategy):
    unexpectedly: bool = False

    def objective(self, local):
        del local
        raise (OSError if self.unexpectedly else ValueError)("out of order")


def test_a_job_that_kills_every_worker_is_an_error(case):
    federation, model = case
    engine = engine_for("processes", federation, model, [], workers=2)
    try:
        with pytest.raises(TrainingError, match="killed or hung 3 times"):
            engine.train(jobs_of(federation, model, Deadly(owner=os.getpid())))
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("unexpectedly", "text"),
    [
        (False, r"training client \d+ in round 0 .*out of order"),
        (True, r"a worker process failed \(OSError: out of order\); engine\.name = 'reference'"),
    ],
)
def test_an_error_in_a_worker_is_told_and_the_engine_goes_on(case, unexpectedly, text):
    federation, model = case
    good = jobs_of(federation, model, FedAvg())
    engine = engine_for("processes", federation, model, [], workers=2)
    try:
        before = bits(engine.train(good))
        with pytest.raises(TrainingError, match=text):
            engine.train(jobs_of(federation, model, Broken(unexpectedly)) + good)
        assert bits(engine.train(good)) == before
    finally:
        engine.close()


def test_strategies_that_cannot_be_sent_are_trained_here():
    @dataclass(frozen=True)
    class Inside(PersonalHead):
        pass

    truth = sweep("reference", MODELS["mlp"], strategies=[Inside(), FedAvg()])
    found = sweep("processes", MODELS["mlp"], strategies=[Inside(), FedAvg()])
    (notice,) = found.notices
    assert "Inside cannot be sent to other processes" in notice
    check_same(found, truth, 1e-9)


def test_where_no_process_can_be_started_one_core_is_used(monkeypatch):
    truth = sweep("processes", MODELS["cnn"], strategies=[FedProto()])

    def refuse(*_, **__):
        raise OSError("not permitted")

    monkeypatch.setattr(processes, "WorkerPool", refuse)
    found = sweep("processes", MODELS["cnn"], strategies=[FedProto()])
    assert found.notices == ["cannot start processes (not permitted); working in one"]
    check_same(found, truth, 0.0)


@pytest.mark.parametrize(
    ("cores", "demand", "choice"),
    [
        (2, Demand(10, 5000), "processes"),
        (2, Demand(10, 100), "reference"),
        (16, Demand(10, 5000), "reference"),
        (1, Demand(10, 5000), "reference"),
        (4, Demand(), "reference"),
    ],
)
def test_auto_chooses_by_cores_and_work(monkeypatch, cores, demand, choice):
    monkeypatch.setattr(auto, "available_cores", lambda: cores)
    chosen = auto.choose(EngineOptions(device="cpu"), [frozenset()], demand)
    assert chosen.name == choice


def test_auto_judges_all_runs_that_train_together(monkeypatch, case):
    """Sixteen short runs are worth the processes that one of them is not."""
    federation, model = case
    monkeypatch.setattr(auto, "available_cores", lambda: 2)
    schedule = ScheduleOptions(rounds=25, cohort=3)
    config = RunConfig(strategy=FedAvg(), train=TrainOptions(epochs=2), schedule=schedule)
    config = replace(config, engine=EngineOptions(device="cpu"))
    said: list[str] = []
    for runs, name in ((1, "reference"), (16, "processes")):
        with engine_of([config] * runs, federation, model, Collected(said)) as engine:
            assert engine.name == name
            assert torch.get_num_threads() == 1
    assert said == [
        "engine: reference (too little work to share out)",
        "engine: processes (2 cores)",
    ]


@pytest.mark.parametrize(("asked", "small"), [("3", 3), (None, 1)])
def test_threads_suit_the_engine_unless_the_environment_says(monkeypatch, asked, small):
    monkeypatch.setattr(auto, "available_cores", lambda: 2)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if asked is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
    needs = [frozenset()]
    free, work = EngineOptions(device="cpu"), Demand(10, 5000)
    assert auto.choose(free, needs, Demand(10, 100)).threads == small
    assert auto.choose(free, needs, work) == auto.Choice("processes", "2 cores", 1)
    reference = EngineOptions(name="reference", device="cpu")
    assert auto.choose(reference, needs, work) == auto.Choice("reference", "asked for", 3)
    began = [{"name": "reference", "device": "cpu", "threads": 2}]
    assert auto.choose(free, needs, work, began) == auto.Choice("reference", "as the runs began", 2)


def test_a_notice_is_shown_once(capsys):
    with progress_for([]) as progress:
        progress.on_notice("engine: reference (one core)")
        progress.on_notice("engine: reference (one core)")
    assert capsys.readouterr().err == "engine: reference (one core)\n"


def test_the_cpu_engine_refuses_another_device():
    assert EngineOptions(name="processes").torch_device().type == "cpu"
    with pytest.raises(ConfigError, match="runs on the CPU"):
        EngineOptions(name="processes", device="cuda").torch_device()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("samples", [1, 10, 57])
def test_slopes_without_automatic_differentiation_have_its_bits(dtype, samples):
    scores = 3 * torch.randn(samples, 10, dtype=dtype)
    labels = torch.randint(0, 10, (samples,))
    task = Classification()
    for found, expected in zip(
        task.loss_and_slope(scores, labels), Task.loss_and_slope(task, scores, labels), strict=True
    ):
        assert torch.equal(found, expected)
