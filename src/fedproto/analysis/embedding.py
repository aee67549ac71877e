"""Features in the plane: t-SNE by scikit-learn, or by openTSNE where that is installed."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedproto.data.masks import palette
from fedproto.errors import ConfigError

OnStep: TypeAlias = Callable[[int, int], None]
"""Is told how many of how many steps are done."""

TsneLibrary: TypeAlias = Literal["auto", "scikit-learn", "openTSNE"]

STEPS = 1000
_EXAGGERATED = 250
_EVERY = 50

# Okabe and Ito's palette and two more that stay apart from it with all kinds of colour vision.
CLASS_COLORS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#000000",
    "#F0E442",
    "#999999",
    "#882255",
)


def embed(
    e_nd: NDArray[np.float32],
    *,
    seed: int = 0,
    perplexity: float = 30.0,
    library: TsneLibrary = "auto",
    on_step: OnStep | None = None,
) -> NDArray[np.float64]:
    """t-SNE (van der Maaten & Hinton 2008): a point in the plane per feature vector.

    Starts from the first two principal components, so that the picture does not depend on luck.

    Args:
        e_nd: Features ``[N, D]``, at least four.
        seed: For what is random in the methods.
        perplexity: Roughly how many neighbours count; brought down to a third of few vectors.
        library: Which implementation; openTSNE, which is faster for many vectors, where installed.
        on_step: Is told how far it is.

    Returns:
        Places ``[N, 2]``.

    Raises:
        ConfigError: If there are too few vectors or the library is not installed.
    """
    if len(e_nd) < 4:
        raise ConfigError(f"t-SNE needs at least four feature vectors, not {len(e_nd)}")
    perplexity = min(perplexity, (len(e_nd) - 1) / 3)
    say = on_step or _silent
    say(0, STEPS)
    if _chosen(library) == "openTSNE":
        points = _by_opentsne(e_nd, seed, perplexity, say)
    else:
        points = _by_sklearn(e_nd, seed, perplexity, say)
    say(STEPS, STEPS)
    return np.asarray(points, dtype=np.float64)


def can_embed() -> bool:
    """Whether one of the libraries is installed."""
    return any(importlib.util.find_spec(name) is not None for name in ("sklearn", "openTSNE"))


def class_colors(num_classes: int, *, label_maps: bool) -> list[str]:
    """A colour per class: PASCAL VOC's for label maps and for many classes."""
    if not label_maps and num_classes <= len(CLASS_COLORS):
        return list(CLASS_COLORS[:num_classes])
    first = 0 if label_maps else 1  # the first of VOC's colours is the background's black
    shown = palette()[np.arange(first, first + num_classes) % 256]
    return ["#{:02x}{:02x}{:02x}".format(*(int(part) for part in colour)) for colour in shown]


def _silent(done: int, total: int) -> None:
    del done, total


def _chosen(library: TsneLibrary) -> str:
    wanted = {"scikit-learn": "sklearn", "openTSNE": "openTSNE"}
    if library == "auto":
        found = importlib.util.find_spec("openTSNE") is not None
        library = "openTSNE" if found else "scikit-learn"
    if importlib.util.find_spec(wanted[library]) is None:
        extra = "'fedproto[analysis]'" if library == "scikit-learn" else "openTSNE"
        raise ConfigError(f"t-SNE needs {library}: pip install {extra}")
    return library


def _by_opentsne(
    e_nd: NDArray[np.float32], seed: int, perplexity: float, say: OnStep
) -> NDArray[np.float64]:
    from openTSNE import TSNE

    done = 0

    def progress(iteration: int, error: float, embedding: Any) -> None:
        nonlocal done
        del iteration, error, embedding  # it counts each of its two phases from the start
        done += _EVERY
        say(min(done, STEPS), STEPS)

    return np.asarray(
        TSNE(
            perplexity=perplexity,
            random_state=seed,
            n_iter=STEPS - _EXAGGERATED,
            early_exaggeration_iter=_EXAGGERATED,
            callbacks=progress,
            callbacks_every_iters=_EVERY,
        ).fit(e_nd)
    )


def _by_sklearn(
    e_nd: NDArray[np.float32], seed: int, perplexity: float, say: OnStep
) -> NDArray[np.float64]:
    from sklearn.manifold import TSNE

    with contextlib.redirect_stdout(_Steps(say)):
        return np.asarray(
            TSNE(
                perplexity=perplexity, random_state=seed, init="pca", max_iter=STEPS, verbose=2
            ).fit_transform(e_nd)
        )


class _Steps(io.TextIOBase):
    """Reads how far scikit-learn is from what it prints, the only way in which it tells."""

    def __init__(self, say: OnStep) -> None:
        self._say = say

    def write(self, text: str) -> int:
        found = re.search(r"Iteration (\d+):", text)
        if found:
            self._say(min(int(found[1]), STEPS), STEPS)
        return len(text)
