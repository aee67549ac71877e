"""A trained model for use elsewhere: weights and a model card.

model.safetensors   the state dict under the names that the module itself has
README.md           the model card: training data, scores, how to load it
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor, nn

from fedproto.api.result import Result
from fedproto.api.table import as_markdown
from fedproto.disk.files import write_output
from fedproto.engines.layers import statistics_names
from fedproto.errors import StoreError
from fedproto.models.adapter import original

WEIGHTS = "model.safetensors"


def export(result: Result, folder: str | Path) -> list[Path]:
    """Writes a run's newest model with a model card; returns the files.

    Raises:
        StoreError: If the run kept no weights, or the folder cannot be written.
    """
    folder = Path(folder)
    weights, card = save(state_dict(result), {"format": "pt"}), model_card(result)
    contents = {WEIGHTS: weights, "README.md": card.encode()}
    return [write_output(folder / name, content) for name, content in contents.items()]


def state_dict(result: Result) -> dict[str, Tensor]:
    """The weights by the names that the user's own module has for them.

    Batch-norm statistics that were never sent are those of the module as it was built.
    """
    if result.build is not None:
        tensors: Mapping[str, Tensor] = result.model.state_dict()
    elif result.state is not None:
        served = result.state.served
        tensors = {**served.params, **served.buffers}
    else:
        raise StoreError(f"{result.path} has no checkpoint yet; nothing to export")
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def loading_code(result: Result) -> str:
    """Python code that loads the model."""
    build = _constructor(result)
    head = "import fedproto\n" if "fedproto." in build else ""
    return (
        f"{head}from safetensors.torch import load_file\n\nmodel = {build}\n"
        f'model.load_state_dict(load_file("{WEIGHTS}"))\nmodel.eval()'
    )


CARD = """---
library_name: fedproto
tags: [federated-learning, pytorch, {task}]
---

# {title} on {name}

A model for {task} of inputs of shape {shape} into {classes}.

## Intended use and limits

For research on federated learning, and for inputs like those of the clients that trained it. It
was not checked for safety, fairness or security, and may reveal facts about its training data.

## How it was trained

By federated learning with strategy `{strategy}`: {rounds} rounds, {cohort} of {clients} clients a
round, seed {seed}. The clients had {train} training and {test} test samples.{remarks}

## Preprocessing

{preprocessing}

## Scores after the last round

| metric | value |
|---|---|
{scores}

They were measured on the clients' own test samples; expect lower ones on other data.
`mean_client_…` is the mean over clients, `worst_tenth_…` the mean of the tenth of clients with the
lowest scores.

## How to load it

```python
{code}
```

## Configuration

```json
{settings}
```
"""


def model_card(result: Result) -> str:
    """The model card, in the form that model hubs show."""
    config, data = result.config, result.about_data()
    names = ", ".join(map(as_markdown, data["class_names"]))
    return CARD.format(
        **data | {"name": as_markdown(data["name"])},
        classes=names or f"{data['num_classes']} classes",
        shape=tuple(data["input_shape"]),
        title=as_markdown(config.title),
        strategy=config.to_dict()["strategy"]["name"],
        rounds=len(result.records),
        cohort=config.schedule.cohort,
        seed=config.seed,
        remarks=_remarks(result),
        preprocessing=_preprocessing(data),
        scores="\n".join(
            f"| {as_markdown(name)} | {value:.4g} |" for name, value in result.metrics.items()
        ),
        code=loading_code(result),
        settings=json.dumps(config.to_dict(), indent=2),
    )


def _preprocessing(data: Mapping[str, Any]) -> str:
    """The preprocessing of inputs, in words."""
    shape = data["input_shape"]
    text = "Inputs are not preprocessed."
    if len(shape) == 3:
        text = (
            f"Images are converted to {shape[0]} channels and resized to {shape[1]}×{shape[2]}"
            " pixels; bytes are divided by 255."
        )
    mean, std = data.get("mean"), data.get("std")
    if mean is None:
        return f"{text} The mean and standard deviation of the normalisation are unknown."
    if not mean and not std:
        return text
    if max(len(mean), len(std or [])) > shape[0]:
        return (
            f"{text} Then every pixel is normalised by a mean and a standard deviation of its own,"
            " which `run.json` holds under `data`."
        )
    return f"{text} Then the mean {mean} is subtracted and the standard deviation {std} divided by."


def _remarks(result: Result) -> str:
    sent = result.config.train.batch_norm != "local"
    if sent or result.build is None or not statistics_names(result.model):
        return ""
    return (
        "\n\nBatch-norm statistics were never exchanged: those in the files are the initial ones."
        " Estimate them from your own inputs before use."
    )


def _constructor(result: Result) -> str:
    data = result.about_data()
    if result.config.model is not None:
        given = result.config.to_dict()["model"]
        name = given.pop("name")
        options = ", ".join(f"{key}={value!r}" for key, value in given.items())
        shape, classes = tuple(data["input_shape"]), data["num_classes"]
        return f'fedproto.MODELS.get("{name}")({options}).build({shape}, {classes})'
    if result.build is None:
        return "YourModule()  # the module that was trained"
    own = original(result.build())
    if isinstance(own, nn.Sequential):
        return "nn.Sequential(...)  # the layers that were trained"
    return f"{type(own).__name__}()  # as it was built for training"
