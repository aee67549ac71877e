"""A model gets out of a run and back into the class it came from."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import fedproto
from fedproto import Federation, with_features
from fedproto.cli import main
from fedproto.disk.integrity import sealed, unsealed
from fedproto.errors import StoreError

TINY = {"rounds": 1, "cohort": 2, "epochs": 1, "engine": "reference"}


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x))) + x


class Residual(nn.Module):
    """With batch norm, dropout by `self.training`, a parameter and a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.body = nn.Sequential(Block(4), Block(4))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("shift", torch.zeros(1))
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.body(self.stem(x))).flatten(1)
        x = F.dropout(x * self.scale + self.shift, 0.5, self.training)
        return self.fc(x)


def federation() -> Federation:
    rng = np.random.RandomState(0)
    return Federation.from_clients(
        [(rng.rand(9, 1, 8, 8).astype(np.float32), rng.randint(0, 3, 9)) for _ in range(3)],
        num_classes=3,
        class_names=["cat", "dog", "eel"],
    )


@pytest.fixture(scope="module")
def own():
    model = Residual()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    result = fedproto.run(federation(), with_features(model, head="fc"), "fedproto", **TINY)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), "training starts from a copy"
    return result


def test_weights_load_into_the_users_own_class(own, tmp_path):
    assert own.export(tmp_path) == tmp_path
    fresh, x = Residual(), torch.rand(2, 1, 8, 8)
    fresh.load_state_dict(own.model.state_dict(), strict=True)
    fresh = Residual()
    fresh.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=True)
    assert torch.equal(fresh.eval()(x), own.model(x))
    assert not torch.equal(fresh.scale, torch.ones(1))


def test_a_sequential_model_keeps_its_names_too(tmp_path):
    def build() -> nn.Sequential:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 3))

    fedproto.run(federation(), with_features(build()), "fedavg", out=tmp_path / "run", **TINY)
    assert main(["export", str(tmp_path / "run"), f"--out={tmp_path / 'out'}"]) == 0
    build().load_state_dict(load_file(tmp_path / "out" / "model.safetensors"), strict=True)


def test_the_module_keeps_working_while_it_is_wrapped():
    model = Residual()
    wrapped = with_features(model, head="fc")
    wrapped.eval()
    assert not model.training
    x = torch.rand(2, 1, 8, 8)
    assert torch.equal(wrapped(x), model(x))
    assert wrapped.features(x).shape == (2, 4)
    assert dict(wrapped.named_parameters()).keys() == dict(model.named_parameters()).keys()
    wrapped.double()
    assert model.scale.dtype == torch.float64


def test_the_card_says_what_the_model_is(own, tmp_path):
    own.export(tmp_path)
    card = (tmp_path / "README.md").read_text()
    for text in ("# fedproto on own data", "cat, dog, eel", "| accuracy |", "2 of 3 clients"):
        assert text in card
    assert card.startswith("---\nlibrary_name: fedproto\n")


def test_what_cannot_be_written_is_a_clear_error(own, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="choose another path"):
        own.export(tmp_path / "file" / "folder")


def test_the_printed_code_loads_the_model(tmp_path, capsys):
    options = ["data.name=digits", "model.name=cnn", "model.features=8", "schedule.rounds=1"]
    settings = [f"--set={option}" for option in [*options, "engine.name=reference"]]
    out = tmp_path / "run"
    assert main(["run", "quickstart", *settings, f"--out={out}", "-q"]) == 0
    capsys.readouterr()
    assert main(["export", str(out)]) == 0
    code = capsys.readouterr().out.partition("To load it:\n\n")[2]
    check = code + "\nimport torch\nprint(model(torch.ones(1, 1, 8, 8)).sum().item())\n"
    ran = subprocess.run(
        [sys.executable, "-c", check], cwd=out / "export", capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    expected = fedproto.load(out).model(torch.ones(1, 1, 8, 8)).sum().item()
    assert float(ran.stdout) == pytest.approx(expected, rel=1e-5)


def test_a_run_without_weights_exports_nothing(tmp_path, capsys):
    keywords = {"out": tmp_path / "run", "store": {"checkpoint_every": 0}, **TINY}
    fedproto.run(federation(), with_features(Residual(), head="fc"), "fedavg", **keywords)
    assert main(["export", str(tmp_path / "run")]) == 2
    assert "no checkpoint" in capsys.readouterr().err


def hostile(run, **facts):
    """Lets run.json say something else of the data, as somebody would who passes a run on."""
    file = run / "run.json"
    tables = unsealed(file.read_bytes())
    tables["data"] |= facts
    file.write_bytes(sealed(tables))


EVIL = "x\n\n# Free money\n\n```python\nimport os\n```\n[click](https://evil.example) | <script>"


def test_a_card_shows_labels_and_names_as_they_are(tmp_path):
    out = tmp_path / "run"
    settings = ["--set=schedule.rounds=1", f"--set=label={json.dumps(EVIL)}"]
    assert main(["run", "quickstart", "-q", f"--out={out}", *settings]) == 0
    hostile(out, name=EVIL, class_names=[EVIL, "cat"])
    assert main(["export", str(out), f"--out={tmp_path / 'model'}"]) == 0
    card = (tmp_path / "model" / "README.md").read_text()
    headings = [line for line in card.splitlines() if line.startswith("#")]
    assert headings[0].startswith(r"# x\\n\\n\# Free money")
    assert headings[1:] == [
        "## Intended use and limits",
        "## How it was trained",
        "## Preprocessing",
        "## Scores after the last round",
        "## How to load it",
        "## Configuration",
    ]
    assert card.count("\n```") == 4  # two blocks of code
    for line in card.splitlines():
        assert "evil" not in line or r"\[click\]" in line or line.startswith('  "label"')


@pytest.mark.parametrize(
    "facts",
    [
        {"num_classes": "10); import os; os.system('true')  #"},
        {"input_shape": "x"},
        {"task": "classification]\nlicense: mine\n["},
        {"class_names": [1]},
        {"more": 1},
    ],
    ids=lambda facts: next(iter(facts)),
)
def test_facts_that_no_run_would_write_are_refused(tmp_path, capsys, facts):
    out = tmp_path / "run"
    assert main(["run", "quickstart", "-q", f"--out={out}", "--set=schedule.rounds=1"]) == 0
    hostile(out, **facts)
    assert main(["export", str(out)]) == 2
    assert "run.json has an invalid description of its data" in capsys.readouterr().err
    assert not list((out / "export").iterdir())


def test_a_folder_that_cannot_be_written_is_named(own, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be written"):
        own.export(tmp_path / "file" / "model")


def test_a_file_system_that_is_read_only_is_named(own, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(StoreError, match="cannot be written: Read-only file system"):
        own.export(tmp_path)
