"""What clients keep between their rounds: addressed by round, committed by records."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import torch

from fedproto import Scaffold, ServerOptions, StoreError, run
from fedproto.config import read_config
from fedproto.config.options import StoreOptions
from fedproto.disk.files import Folder
from fedproto.engines.reference import ReferenceEngine
from fedproto.engines.setting import ClientView
from fedproto.rounds import run_rounds
from fedproto.store import RunStore
from fedproto.store.checkpoints import ClientMemory, ClientMemoryOnDisk
from fedproto.strategies.values import Declared
from fedproto.types import ClientFailure
from helpers import begin, config_of, engine_for, planned, run_from, same_tensors, simulate

KEPT = {"own/rounds": Declared((), torch.float32), "own/way": Declared((2,), torch.float64)}


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {
        "own/rounds": torch.tensor(float(value)),
        "own/way": torch.full((2,), float(value), dtype=torch.float64),
    }


@pytest.mark.parametrize("kind", ["ram", "disk"])
def test_memory_begins_as_declared_and_comes_back(tmp_path, kind):
    memory = ClientMemory() if kind == "ram" else ClientMemoryOnDisk(Folder(tmp_path), "clients")
    assert same_tensors(memory.recall(3, None, KEPT), tensors(0.0))
    memory.save(3, 5, tensors(1.5), keep_from=0)
    assert same_tensors(memory.recall(3, 5, KEPT), tensors(1.5))
    assert memory.recall(3, 4, KEPT) is None
    assert memory.recall(2, 5, KEPT) is None


def test_memory_in_ram_is_not_that_of_all_clients_trained_together():
    memory, stack = ClientMemory(), torch.rand(50, 2)
    memory.save(3, 5, {"own/way": stack[7]}, keep_from=0)
    assert memory.load(3, 5)["own/way"].untyped_storage().nbytes() == stack[7].nbytes


def test_earlier_rounds_are_kept_as_long_as_a_run_may_go_back_to_them(tmp_path):
    memory = ClientMemoryOnDisk(Folder(tmp_path), "clients")
    for round_ in (1, 4, 6, 9):
        memory.save(0, round_, tensors(round_), keep_from=5)
    # from round 5 on the client is as after round 4, or later
    assert memory.load(0, 1) is None
    for round_ in (4, 6, 9):
        assert same_tensors(memory.load(0, round_), tensors(round_))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"checkpoint_every": 1, "keep": 2}, 8),
        ({"checkpoint_every": 4, "keep": 1}, 4),
        ({"checkpoint_every": 4, "keep": 0}, 0),
        ({"checkpoint_every": 0}, 10),
    ],
)
def test_how_far_a_run_may_go_back_follows_from_its_checkpoints(options, expected):
    assert StoreOptions(**options).earliest_return(10) == expected


def test_a_damaged_or_foreign_file_is_named(tmp_path):
    memory = ClientMemoryOnDisk(Folder(tmp_path), "clients")
    memory.save(0, 1, tensors(1.0), keep_from=0)
    with pytest.raises(StoreError, match="other tensors of round 1 than the strategy keeps"):
        memory.recall(0, 1, {"own/way": KEPT["own/way"]})
    (file,) = tmp_path.rglob("*.safetensors")
    file.write_bytes(file.read_bytes()[:20])
    with pytest.raises(StoreError, match=f"{file.name} cannot be read"):
        memory.load(0, 1)


class Refusing(ReferenceEngine):
    """In the second round one client sends rubbish and another nothing."""

    def train(self, jobs):
        results = super().train(jobs)
        if jobs[0].state.round == 1:
            broken = {
                name: torch.full_like(one, torch.nan) for name, one in results[0].params.items()
            }
            results[0] = replace(results[0], params=broken)
            results[1] = ClientFailure(jobs[1].client, "no power")
        return results


def test_what_a_client_kept_and_received_lies_where_its_model_does(small_federation, small_model):
    """Control variates and slopes come from disk or a message; the model may be on a GPU."""
    workload = engine_for(small_federation, small_model).workload
    there = torch.device("meta")  # in place of a GPU: it computes nothing, which is not needed
    (job, *_) = planned(begin(config_of(Scaffold()), small_model), small_federation).jobs
    job = replace(job, memory={"control/a": torch.ones(2)}, broadcast={"control/a": torch.ones(2)})
    local = ClientView(workload, there, lambda _: []).local(job)
    assert {one.device for one in (*local.memory.values(), *local.broadcast.values())} == {there}


def test_an_update_that_is_not_accepted_changes_no_memory(small_federation, small_model):
    engine = Refusing(engine_for(small_federation, small_model).workload)
    begun = begin(config_of(Scaffold(), cohort=6, delta=0, rounds=2), small_model)
    kept = {}
    for going, record in run_rounds([begun], engine):
        if record.round == 0:
            kept = {client: going.memory.load(client, 0) for client in range(6)}
        else:
            assert set(record.failures) == {0, 1}
    assert begun.last_round == {0: 0, 1: 0, 2: 1, 3: 1, 4: 1, 5: 1}
    for client in (0, 1):
        assert same_tensors(begun.memory.load(client, 0), kept[client])


def configuration(**sections):
    tables = {
        "seed": 3,
        "data": {"name": "synthetic", "clients": 6, "seed": 5},
        "model": {"name": "mlp", "hidden": 6, "features": 5},
        "strategy": {"name": "scaffold"},
        "server": {"optimizer": "adam", "lr": 0.1},
        "train": {"epochs": 2, "batch_size": 20, "lr": 0.05},
        "schedule": {"rounds": 6, "cohort": 3, "delta": 0.4},
        "engine": {"name": "reference", "device": "cpu"},
    }
    return read_config({**tables, **sections})


def finished(path, **sections) -> RunStore:
    store = RunStore.create(path, configuration(**sections))
    simulate([store])
    return store


def facts(store: RunStore):
    return [replace(record, seconds=0.0) for record in store.records()]


@pytest.mark.parametrize("back_to", [2, 4, 5])
def test_a_run_that_goes_back_finds_its_clients_as_they_were(tmp_path, back_to):
    options = {"store": {"checkpoint_every": 1, "keep": 0}}
    whole = finished(tmp_path / "whole", **options)
    shutil.copytree(whole.path, tmp_path / "back")
    store = RunStore.open(tmp_path / "back")
    for path in (store.path / "checkpoints").iterdir():
        if int(path.stem.removeprefix("round-")) > back_to:
            path.unlink()
    simulate([store])
    assert facts(store) == facts(whole)
    one, other = store.load_checkpoint(), whole.load_checkpoint()
    assert same_tensors(one.params, other.params)
    assert same_tensors(one.memory, other.memory)


def test_only_what_may_be_needed_stays_on_disk(tmp_path):
    store = finished(tmp_path / "run", schedule={"rounds": 12, "cohort": 3})
    for client in (store.path / "clients").iterdir():
        assert len(list(client.iterdir())) <= 4


def test_missing_memory_is_named_not_begun_anew(tmp_path):
    whole = finished(tmp_path / "run", store={"checkpoint_every": 1, "keep": 0})
    for path in sorted((whole.path / "checkpoints").iterdir())[3:]:
        path.unlink()
    shutil.rmtree(whole.path / "clients")
    with pytest.raises(StoreError, match="is missing; restore the run's folder"):
        simulate([RunStore.open(whole.path)])


def test_a_checkpoint_without_the_memory_is_refused(small_federation, small_model):
    config = replace(config_of(Scaffold()), server=ServerOptions(optimizer="adam"))
    begun = begin(config, small_model)
    later = run_from(config, replace(begun.state, round=1))
    with pytest.raises(StoreError, match="round 1 does not hold 'control/"):
        next(run_rounds([later], engine_for(small_federation, small_model)))


def test_python_runs_with_memory_go_on_in_their_directory(tmp_path, small_federation, small_model):
    def go(out, **options):
        return run(
            small_federation,
            small_model,
            Scaffold(),
            cohort=3,
            epochs=1,
            lr=0.1,
            server=ServerOptions(optimizer="adam", lr=0.05),
            out=out,
            **options,
        )

    one, other = go(tmp_path / "kept", rounds=4), go(None, rounds=4)
    assert same_tensors(one.model.state_dict(), other.model.state_dict())
