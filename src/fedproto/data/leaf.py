"""A user's own data in the JSON files of LEAF, one client per user of theirs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedproto.data.base import DATASETS, OnProgress
from fedproto.data.clients import Client
from fedproto.data.federation import Federation, checked_num_classes
from fedproto.data.files import open_tree
from fedproto.data.own import own_path
from fedproto.data.partition import by_key
from fedproto.data.prepared import Arrays, Builder, prepared
from fedproto.data.samples import MappedSamples
from fedproto.data.sharing import HeldOut
from fedproto.disk.files import open_regular, read_limited
from fedproto.disk.integrity import DamagedError, read_json
from fedproto.errors import DataError
from fedproto.options import option


@DATASETS.register("leaf")
@dataclass(frozen=True)
class Leaf(HeldOut):
    """LEAF's JSON: ``users``, ``num_samples`` and ``user_data`` with numbers x and labels y.

    Where the files lie in folders ``train`` and ``test``, as LEAF and FedProx publish them, that
    split is kept and nothing is held out for validation; otherwise every client is split 80/20.
    """

    path: str = option("", "the folder of the JSON files")
    shape: tuple[int, ...] = option((), "shape of one input; as it is in the files by default")
    num_classes: int = option(0, "number of classes; 0 counts them", at_least=0)

    def load(self, root: Path) -> Federation:
        """Reads the files if that was not done before."""
        arrays = self.arrays(root)
        labels, users = np.array(arrays["labels"]), np.array(arrays["users"])
        inputs = torch.from_numpy(arrays["inputs"])
        shape = self._input_shape(tuple(inputs.shape[1:]))
        federation = self.federation(
            Path(self.path).stem,
            MappedSamples(inputs.view(-1, *shape), torch.from_numpy(labels)),
            by_key(users),
            num_classes=checked_num_classes(labels, self.num_classes or None, f"{self.path}: "),
            input_shape=shape,
        )
        if not arrays["test"].any():
            return federation
        # LEAF's own split takes the place of ours; whoever has nothing to train on is no client.
        test = np.array(arrays["test"], dtype=bool)
        clients = [Client(part[~test[part]], part[test[part]]) for part in by_key(users)]
        return replace(
            federation,
            clients=tuple(client for client in clients if len(client.train)),
            validation=np.empty(0, dtype=np.int64),
        )

    def _input_shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        if self.shape and np.prod(self.shape) != np.prod(stored):
            raise DataError(f"shape {list(self.shape)} does not fit inputs of shape {list(stored)}")
        return self.shape or stored

    def arrays(self, root: Path, on_progress: OnProgress | None = None) -> Arrays:
        """Reads the files."""
        folder = own_path(self.path, root)
        sources = {
            name: path for name, path in open_tree(folder).sources.items() if path.suffix == ".json"
        }
        if not sources:
            raise DataError(f"{folder} holds no JSON files")

        def build(builder: Builder) -> None:
            inputs, labels, users, test = [], [], [], []
            for done, (name, path) in enumerate(sources.items(), start=1):
                for user, x, y in _read_users(path):
                    inputs.append(x)
                    labels.append(y)
                    users += [user] * len(y)
                    test += [name.split("/")[0] == "test"] * len(y)
                if on_progress is not None:
                    on_progress(done, len(sources))
            if not inputs:
                raise DataError(f"{folder}: its JSON files name no users")
            if len({part.shape[1:] for part in inputs}) > 1:
                raise DataError(f"{folder}: the users' inputs have different shapes")
            builder.put("inputs", np.concatenate(inputs))
            builder.put("labels", np.concatenate(labels))
            builder.put("users", np.array(users))
            builder.put("test", np.array(test))

        return prepared("leaf", sources, {}, build)


def _whole(labels: Any) -> Any:
    """Labels that were written as 3.0 as whole numbers; others as they are."""
    written_so = labels.dtype.kind == "f" and np.array_equal(labels, np.rint(labels))
    return labels.astype(np.int64) if written_so else labels


def _read_users(path: Path) -> Iterator[tuple[str, Any, Any]]:
    try:
        with open_regular(path) as file:
            content = read_json(read_limited(file, path))
        data = content["user_data"]
        users = {user: (data[user]["x"], data[user]["y"]) for user in content["users"]}
    except (OSError, DamagedError) as error:
        raise DataError(f"{path} cannot be read as JSON: {error}") from None
    except (KeyError, TypeError) as error:
        raise DataError(f"{path} is not in LEAF's form: {error} is missing or wrong") from None
    for user, (x, y) in users.items():
        try:
            inputs, labels = np.asarray(x, dtype=np.float32), _whole(np.asarray(y))
        except (ValueError, TypeError, OverflowError):
            raise DataError(f"{path}: the inputs of user {user} are not numbers") from None
        if inputs.ndim < 2 or not inputs.size or not np.isfinite(inputs).all():
            raise DataError(f"{path}: the inputs of user {user} are not lists of finite numbers")
        if labels.dtype.kind not in "iu" or labels.ndim != 1 or len(labels) != len(inputs):
            raise DataError(
                f"{path}: user {user} has {len(inputs)} inputs and labels of another number or kind"
            )
        yield str(user), inputs, labels.astype(np.int64)
