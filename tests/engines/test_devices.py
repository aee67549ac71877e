"""Jobs shared out among several devices, for which two processes on the CPU stand in."""

import contextlib
import os
import signal
import subprocess
import sys

import pytest
import torch

from engine_cases import (
    MODELS,
    Everything,
    check_same,
    engine_for,
    jobs_of,
    pids,
    small_federation,
    sweep,
)
from fedproto import Ditto, FedAvg, FedProto, Moon, Scaffold, with_features
from fedproto.engines.base import EngineOptions
from fedproto.engines.processes import DevicesEngine, shares_of
from fedproto.engines.stacking.network import Network
from fedproto.errors import ConfigError
from fedproto.models.base import build_model


@pytest.mark.parametrize(("engine", "tolerance"), [("stacked", 1e-9), ("reference", 0.0)])
def test_two_devices_give_what_one_gives(engine, tolerance):
    strategies = [FedAvg(), FedProto(), Scaffold(), Moon(), Ditto(), Everything()]
    truth = sweep(engine, MODELS["cnn"], strategies=strategies)
    found = sweep(engine, MODELS["cnn"], strategies=strategies, devices=2)
    check_same(found, truth, tolerance)
    assert sorted(found.notices) == sorted(truth.notices)


def test_a_device_whose_process_is_killed_does_its_share_again():
    federation = small_federation()
    model = build_model(MODELS["mlp"], federation.input_shape, federation.num_classes, seed=5)
    jobs = jobs_of(federation, model.double(), FedAvg())
    engine = engine_for("stacked", federation, model, [], devices=2)
    assert isinstance(engine, DevicesEngine)
    assert engine.name == "stacked"
    try:
        before = engine.train(jobs)
        os.kill(pids(engine._pool)[1], signal.SIGKILL)
        after = engine.train(jobs)
    finally:
        engine.close()
    for one, other, job in zip(before, after, jobs, strict=True):
        assert one.client == other.client == job.client
        for name, tensor in one.params.items():
            assert torch.equal(tensor, other.params[name])


def test_jobs_are_shared_out_by_their_steps():
    assert shares_of([5, 1, 9, 3], 2) == [[2], [0, 3, 1]]
    assert shares_of([4], 3) == [[0]]
    assert shares_of([0, 0, 0, 0], 2) == [[0, 2], [1, 3]]
    assert shares_of([], 2) == []


def test_what_cannot_be_sent_is_named():
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(72, 4))
    model.forward = lambda x: x
    with pytest.raises(ConfigError, match=r"engine\.devices: model or data"):
        engine_for("reference", small_federation(), with_features(model), [], devices=2)


def test_devices_that_are_not_there_are_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(EngineOptions, "torch_device", lambda _: torch.device("cuda"))
    assert EngineOptions(devices=0).process_devices() == [torch.device("cuda", n) for n in (0, 1)]
    assert EngineOptions().process_devices() == [torch.device("cuda")]
    with pytest.raises(ConfigError, match="this machine has 2 CUDA devices"):
        EngineOptions(devices=3).process_devices()
    monkeypatch.setattr(EngineOptions, "torch_device", lambda _: torch.device("cuda", 1))
    assert EngineOptions(devices=0).process_devices() == [torch.device("cuda", 1)]
    with pytest.raises(ConfigError, match="cuda:1 is the first"):
        EngineOptions(devices=2).process_devices()


@pytest.mark.parametrize("engine", ["reference", "stacked"])
def test_an_engine_works_on_its_device(monkeypatch, engine):
    """Kernels and graphs go to the current device: elsewhere they would find other tensors."""
    current, used = [torch.device("cuda", 0)], []

    @contextlib.contextmanager
    def computing(_):
        current.append(torch.device("cuda", 1))
        yield
        current.pop()

    def watched(self, *given):
        used.append(current[-1])
        return forward(self, *given)

    forward = torch.nn.Module.__call__ if engine == "reference" else Network.outputs
    monkeypatch.setattr(EngineOptions, "computing", computing)
    owner, name = (torch.nn.Module, "__call__") if engine == "reference" else (Network, "outputs")
    federation = small_federation()
    model = build_model(MODELS["mlp"], federation.input_shape, federation.num_classes, seed=5)
    made = engine_for(engine, federation, model.double(), [])
    jobs = jobs_of(federation, model, Everything())
    monkeypatch.setattr(owner, name, watched)
    made.train(jobs)
    made.evaluate([jobs[0].state], federation.test_indices)
    made.evaluate_personal(jobs[:1])
    assert set(used) == {torch.device("cuda", 1)}


def test_the_configured_device_is_the_current_one(monkeypatch):
    entered = []
    monkeypatch.setattr(EngineOptions, "torch_device", lambda _: torch.device("cuda", 1))
    monkeypatch.setattr(
        torch.cuda, "device", lambda device: contextlib.nullcontext(entered.append(device))
    )
    with EngineOptions(tf32=True).computing():
        assert torch.get_float32_matmul_precision() == "high"
    assert torch.get_float32_matmul_precision() == "highest"
    assert entered == [torch.device("cuda", 1)]


def test_a_script_without_a_guard_is_told_where_to_put_one(tmp_path):
    script = tmp_path / "script.py"
    # With more than a pipe holds, which must not keep the parent waiting for ever.
    script.write_text(
        "import functools\n"
        "from fedproto.engines.pool import CPU, WorkerPool\n"
        "make_work = functools.partial(dict, data=bytes(10**6))\n"
        "WorkerPool(make_work, [CPU], forked=False).run([0], print)\n"
    )
    command = [sys.executable, script.name]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith(
        'in a script put the call below `if __name__ == "__main__":`, since every process reads'
        " the script"
    )
