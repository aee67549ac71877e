"""Plain PyTorch loops: what a researcher writes by hand.

    plain.py WORK OUT {plain,loader,channels-last}

`plain` gathers batches by index, `loader` reads them through a `DataLoader`, `channels-last` is
`plain` with the memory layout that suits CPUs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
from common import Work, average, quiet, serve
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the name everyone uses
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    """Serves rounds."""
    path, out, kind = sys.argv[1:]
    quiet()
    work = Work(path)
    model = work.model()
    if kind == "channels-last":
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def batches(order: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        if kind == "loader":
            data = TensorDataset(work.inputs[order], work.targets[order])
            yield from DataLoader(data, batch_size=work.batch_size)
        else:
            for batch in order.split(work.batch_size):
                yield work.inputs[batch], work.targets[batch]

    def train_round(round_: int) -> dict[str, Tensor]:
        nonlocal weights
        trained, sizes = [], []
        for client in work.cohorts[round_].tolist():
            model.load_state_dict(weights)
            optimizer = torch.optim.SGD(model.parameters(), lr=work.lr)
            for epoch in range(work.epochs):
                for inputs, targets in batches(work.order(round_, client, epoch)):
                    optimizer.zero_grad()
                    F.cross_entropy(model(inputs), targets).backward()
                    optimizer.step()
            trained.append({name: one.clone() for name, one in model.state_dict().items()})
            sizes.append(int(work.sizes[client]))
        weights = average(trained, sizes)
        return weights

    serve(train_round, out)


if __name__ == "__main__":
    main()
