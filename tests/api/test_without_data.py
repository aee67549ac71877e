"""A run's model where its data is not: a server builds, exports and applies what it trained."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import fedproto
from fedproto.cli.app import main
from fedproto.data.federation import Federation
from fedproto.flower.nodes import RemoteSamples
from fedproto.store import RunStore

Image = pytest.importorskip("PIL.Image", reason="needs Pillow (fedproto[images])")
pytest_plugins = ["data_fixtures"]
pytestmark = pytest.mark.usefixtures("cache")

TINY = {"rounds": 2, "cohort": 2, "epochs": 1}


@pytest.fixture
def pictures(tmp_path):
    """Grey pictures of two classes."""
    path = tmp_path / "hospitals"
    for name, grey in (("dark", 40), ("light", 200)):
        (path / name).mkdir(parents=True)
        for number in range(10):
            Image.new("L", (6, 6), grey + number).save(path / name / f"{number}.png")
    return path


@pytest.mark.parametrize("normalize", ["given", "pixel"])
def test_a_run_needs_its_data_neither_to_export_nor_to_predict(
    pictures, tmp_path, capsys, normalize
):
    data = {
        "name": "images", "path": str(pictures), "clients": 3, "partition": "iid", "size": 6,
        "channels": 1, "normalize": normalize,
    }  # fmt: skip
    model = {"name": "mlp", "hidden": 4, "features": 4}
    run = tmp_path / "run"
    result = fedproto.run(data, model, "fedavg", out=run, **TINY)
    shown = tmp_path / "new.png"
    Image.new("L", (6, 6), 180).save(shown)
    expected = fedproto.predict(result, shown)
    shutil.rmtree(pictures)
    loaded = fedproto.load(run)
    assert fedproto.predict(loaded, shown) == expected
    assert list(expected[0].probabilities) == ["dark", "light"]
    assert main(["predict", str(run), str(shown), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["classes"] == expected[0].probabilities
    assert main(["export", str(run), "--out", str(tmp_path / "model")]) == 0
    weights = load_file(tmp_path / "model" / "model.safetensors")
    for name, tensor in result.model.state_dict().items():
        assert torch.equal(tensor, weights[name])
    card = (tmp_path / "model" / "README.md").read_text(encoding="utf-8")
    assert "## Preprocessing" in card
    assert ("standard deviation" in card) == (normalize == "pixel")
    capsys.readouterr()
    assert main(["analyse", str(run)]) == 2
    assert "takes its data: do so where that is" in capsys.readouterr().err


def remote(federation: Federation) -> Federation:
    return replace(federation, samples=RemoteSamples(len(federation.samples)))


@pytest.mark.parametrize(
    ("options", "mean"),
    [({}, []), ({"mean": [0.5], "std": [0.2]}, [0.5]), ({"normalize": "pixel"}, None)],
)
def test_a_server_knows_the_normalisation_that_its_configuration_gives(tmp_path, options, mean):
    data = {"name": "digits", "clients": 4, **options}
    model = {"name": "mlp", "hidden": 4, "features": 4}
    fedproto.run(data, model, "fedavg", out=tmp_path / "run", **TINY)
    store = RunStore.open(tmp_path / "run")
    store.describe(data=remote(fedproto.load_data(**data)).about())
    result = fedproto.load(tmp_path / "run")
    assert result.about_data()["mean"] == mean
    if mean is not None:
        inputs = np.zeros((1, *result.about_data()["input_shape"]), dtype=np.float32)
        assert len(fedproto.predict(result, inputs)) == 1
