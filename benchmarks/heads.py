"""What a pseudo-inverse in float32 costs ridge regression on frozen features.

    python benchmarks/heads.py --pretrained mobilenet_v2.safetensors --out results/heads.json

Fed3R solves ``W = Y Eᵀ (E Eᵀ + λI)⁻¹`` from sums over all features. FedCOF's code takes PyTorch's
pseudo-inverse in float32, which leaves out directions whose eigenvalue is below 1.5e-4 of the
largest. Both are computed here for the first images of CIFAR-100, in the data root.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor

import fedproto
from fedproto.models.base import build_model
from fedproto.models.mobilenet import MobileNetOptions
from fedproto.store.run import describe_environment

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


def main() -> None:
    """Computes features once, then both heads."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pretrained", required=True, help="weights of MobileNetV2")
    parser.add_argument("--train", type=int, default=12_000)
    parser.add_argument("--test", type=int, default=2_000)
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    given = parser.parse_args()
    data = fedproto.load_data("cifar100", mean=MEAN, std=STD, clients=1, partition="iid")
    options = MobileNetOptions(pretrained=given.pretrained, frozen=True, resize=224)
    net = build_model(options, data.input_shape, data.num_classes, seed=0).eval()

    @torch.no_grad()
    def features(indices: object, count: int) -> tuple[Tensor, Tensor]:
        found, labels = [], []
        for part in torch.as_tensor(indices)[:count].split(50):
            x, y = data.samples.batch(part.numpy())
            found.append(net.features(x))
            labels.append(y)
            print(f"\r{50 * len(found)} of {count}", end="", flush=True)
        print()
        return torch.cat(found).double(), torch.cat(labels)

    x_nd, y_n = features(data.train_indices(0), given.train)
    test_nd, answers_n = features(data.test_indices, given.test)
    sums_cd = x_nd.new_zeros(data.num_classes, x_nd.shape[1]).index_add_(0, y_n, x_nd)
    products_dd = x_nd.t() @ x_nd + 0.01 * torch.eye(x_nd.shape[1]).double()

    def accuracy(weight_cd: Tensor) -> float:
        logits = test_nd @ (weight_cd / weight_cd.norm(dim=1, keepdim=True)).t()
        return 100 * float((logits.argmax(dim=1) == answers_n).double().mean())

    value_d = torch.linalg.eigvalsh(products_dd)
    least = len(value_d) * torch.finfo(torch.float32).eps * value_d[-1]
    scores = {
        "nearest class mean": accuracy(sums_cd),
        "exact": accuracy(torch.linalg.solve(products_dd, sums_cd.t()).t()),
        "pseudo-inverse in float32": accuracy(
            (sums_cd.float() @ torch.linalg.pinv(products_dd.float())).double()
        ),
    }
    figures = {
        "environment": describe_environment(),
        "images": [given.train, given.test],
        "accuracy": scores,
        "directions": [len(value_d), int((value_d > least).sum())],
    }
    print(json.dumps({key: figures[key] for key in ("accuracy", "directions")}, indent=2))
    if given.out:
        given.out.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
