"""Dropout's masks: what they depend on, and what they do not."""

import pytest
import torch
from torch import nn

from engine_cases import CLASSES, check_same, small_federation, sweep
from fedproto import FedAvg
from fedproto.engines.layers import Masks
from fedproto.models import with_features


def masks_of(layer: nn.Module) -> Masks:
    masks = Masks(layer, torch.device("cpu"))
    masks.begin_job(2**40 + 7)
    masks.begin_step()
    masks.begin_pass()
    return masks


def test_so_many_are_dropped_and_the_mean_stays():
    layer = nn.Dropout(0.3)
    masks_of(layer)
    found = layer(torch.ones(200, 500))
    assert float((found == 0).float().mean()) == pytest.approx(0.3, abs=0.005)
    assert float(found.mean()) == pytest.approx(1.0, abs=0.01)
    # No sample and no unit is preferred.
    assert float((found == 0).float().mean(dim=0).std()) == pytest.approx(0.0324, abs=0.004)
    assert float((found == 0).float().mean(dim=1).std()) == pytest.approx(0.0205, abs=0.004)


def test_every_job_step_and_place_has_its_own_mask():
    layer, ones = nn.Dropout(0.5), torch.ones(1, 4000)
    masks = masks_of(layer)
    found = [layer(ones), layer(ones)]
    masks.begin_step()
    masks.begin_pass()
    found.append(layer(ones))
    masks.begin_job(2**41 + 7)
    masks.begin_step()
    masks.begin_pass()
    found.append(layer(ones))
    alike = torch.corrcoef(torch.cat(found)) - torch.eye(len(found))
    assert float(alike.abs().max()) < 0.06


def test_a_mask_does_not_depend_on_memory_or_on_the_rest_of_the_batch():
    images = torch.randn(6, 3, 4, 4)
    found = []
    for given in (images, images.to(memory_format=torch.channels_last), images[:4]):
        layer = nn.Dropout(0.5)
        masks_of(layer)
        found.append(layer(given)[:4])
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_channels_are_dropped_as_a_whole():
    layer = nn.Dropout2d(0.5)
    masks_of(layer)
    found = layer(torch.ones(8, 16, 3, 3)).flatten(2)
    assert set(found.mean(dim=2).flatten().tolist()) == {0.0, 2.0}


@pytest.mark.parametrize(("p", "expected"), [(0.0, 1.0), (1.0, 0.0)])
def test_nothing_or_everything_is_dropped(p, expected):
    layer, ones = nn.Dropout(p), torch.ones(5, requires_grad=True)
    masks_of(layer)
    layer(ones).sum().backward()
    assert ones.grad.tolist() == [expected] * 5
    assert torch.equal(layer.eval()(ones), ones)


def test_processes_drop_what_the_reference_drops():
    torch.manual_seed(0)
    model = with_features(
        nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.Dropout(0.3), nn.MaxPool2d(2), nn.Dropout2d(0.3), nn.Flatten(),
            nn.Linear(36, CLASSES),
        )
    )  # fmt: skip
    options = {"strategies": [FedAvg()], "federation": small_federation()}
    truth = sweep("reference", model, **options)
    check_same(sweep("processes", model, **options, workers=1), truth, 1e-12)
