"""Random scale, crop and flip: pure functions that move images and label maps together."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedproto.engines.augment import AugmentOptions
from fedproto.errors import ConfigError
from fedproto.rng.schedule import BatchOrder
from fedproto.types import VOID

ALL = AugmentOptions(flip=True, scale=(0.5, 2.0))


def batch(size: int = 12, images: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Images whose values are their label maps', so that moving both alike can be seen."""
    generator = torch.Generator().manual_seed(1)
    masks = torch.randint(1, 5, (images, size, size), generator=generator)
    return masks.unsqueeze(1).float(), masks


def draws(*rows: tuple[float, float, float, float]) -> np.ndarray:
    return np.array(rows)


def test_nothing_is_done_by_default():
    assert not AugmentOptions().active
    images, masks = batch()
    moved, followed = AugmentOptions().apply(images, masks, np.random.RandomState(0).rand(3, 4))
    assert torch.allclose(moved, images, atol=1e-5)
    assert torch.equal(followed, masks)


def test_a_flip_mirrors_image_and_mask():
    images, masks = batch(images=2)
    moved, followed = AugmentOptions(flip=True).apply(
        images, masks, draws((0, 0, 0, 0.2), (0, 0, 0, 0.7))
    )
    assert torch.allclose(moved[0], images[0].flip(-1), atol=1e-5)
    assert torch.equal(followed[0], masks[0].flip(-1))
    assert torch.equal(followed[1], masks[1])


def test_a_padded_crop_moves_by_whole_pixels():
    """With two pixels of padding a window starts at one of −2, −1, 0, 1 and 2, equally often."""
    images, masks = batch(size=6, images=1)
    options = AugmentOptions(pad=2)
    assert options.active
    # u = 0.1 gives −2 along the width; u = 0.7 gives 1 along the height.
    moved, followed = options.apply(images, masks, draws((0, 0.1, 0.7, 0.9)))
    assert moved.shape == images.shape
    assert torch.equal(followed[:, :5, 2:], masks[:, 1:, :4])
    assert (followed[:, 5] == VOID).all()
    assert (followed[:, :, :2] == VOID).all()
    assert torch.allclose(moved[..., :5, 2:], images[..., 1:, :4], atol=1e-5)
    assert float(moved[..., 5, :].abs().max()) < 1e-5
    starts = []
    for place in np.arange(0.05, 1, 0.1):
        wide = torch.arange(1.0, 7).expand(1, 1, 6, 6)
        shown, _ = options.apply(wide, torch.zeros(1), draws((0, place, 0.5, 0.9)))
        starts.append(round(float(shown[0, 0, 3, 3])) - 4)
    assert starts == [-2, -2, -1, -1, 0, 0, 1, 1, 2, 2]


def test_an_image_smaller_than_before_is_surrounded_by_void():
    images, masks = torch.ones(1, 1, 8, 8), torch.ones(1, 8, 8, dtype=torch.int64)
    options = AugmentOptions(scale=(0.5, 0.5))
    # It takes up half of either side: from 2 on along the width, at the end of the height.
    moved, followed = options.apply(images, masks, draws((0, 0.5, 1.0, 0.9)))
    assert (followed[:, 4:, 2:6] == 1).all()
    assert (followed != VOID).sum() == 16
    assert torch.allclose(moved[..., 5:, 3:5], images[..., 5:, 3:5], atol=1e-5)
    assert float(moved[..., :3, :].abs().max()) < 1e-5


def test_scaling_up_shows_a_part_larger():
    masks = torch.tensor([[[1, 1, 2, 2], [1, 1, 2, 2], [3, 3, 4, 4], [3, 3, 4, 4]]])
    options = AugmentOptions(scale=(2.0, 2.0))
    _, followed = options.apply(masks.unsqueeze(1).float(), masks, draws((0.3, 1.0, 0.0, 0.9)))
    assert torch.equal(followed, torch.full((1, 4, 4), 2))


def test_masks_follow_images_whatever_is_drawn():
    smooth = torch.arange(32.0).expand(1, 1, 32, 32)  # every pixel's value is its column
    masks = torch.arange(32).expand(1, 32, 32)
    for seed in range(20):
        drawn = np.random.RandomState(seed).rand(1, 4)
        moved, followed = ALL.apply(smooth, masks, drawn)
        # Where nothing of the surrounding is mixed in, both differ by rounding alone.
        whole, _ = ALL.apply(torch.ones_like(smooth), masks, drawn)
        inside = whole[:, 0] > 0.999
        assert inside.any()
        assert (moved[:, 0] - followed)[inside].abs().max() <= 0.51


def test_labels_stay_as_they_are():
    images, _ = batch()
    labels = torch.tensor([3, 1, 2])
    moved, same = ALL.apply(images, labels, np.random.RandomState(0).rand(3, 4))
    assert same is labels
    assert moved.shape == images.shape


def test_what_is_drawn_depends_on_seed_round_client_epoch_and_sample_alone():
    order = BatchOrder(seed=3, round=5, client=7, num_examples=10, batch_size=4, epochs=2)
    first = ALL.draws(order, 0)
    assert np.array_equal(first, ALL.draws(order, 0))
    other_batches = BatchOrder(seed=3, round=5, client=7, num_examples=10, batch_size=2, epochs=9)
    assert np.array_equal(first, ALL.draws(other_batches, 0))
    others = [
        ALL.draws(order, 1),
        *(
            ALL.draws(BatchOrder(seed, round_, client, 10, 4, 2), 0)
            for seed, round_, client in ((4, 5, 7), (3, 6, 7), (3, 5, 8))
        ),
    ]
    assert all(not np.isclose(first, other).any() for other in others)
    assert len(np.unique(first)) == first.size


@pytest.mark.parametrize("scale", [(0.0, 1.0), (2.0, 1.0), (1.0,)])
def test_impossible_scales_are_refused(scale):
    with pytest.raises(ConfigError, match="smallest and a largest factor"):
        AugmentOptions(scale=scale)


def test_only_images_can_be_varied():
    ALL.check_fits((3, 8, 8))
    AugmentOptions().check_fits((60,))
    with pytest.raises(ConfigError, match=r"not on inputs of shape \(60,\)"):
        ALL.check_fits((60,))
