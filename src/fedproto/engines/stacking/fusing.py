"""Making the parts between matrix products faster: compiled, or left as they are."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

Function: TypeAlias = Callable[..., Any]
Fuse: TypeAlias = Callable[[Function], Function]
"""Turns a function of tensors into a faster one, or leaves it as it is."""


def unfused(function: Function) -> Function:
    """Leaves a function as it is."""
    return function


class Compiled:
    """Compiles functions of stacked tensors, each once for any number of jobs."""

    def __init__(self) -> None:
        self._known: dict[Function, Function] = {}
        # Which of two ways the compiler takes for the softmax is nothing that a user could change.
        warnings.filterwarnings("ignore", message=r"\s*Online softmax is disabled")

    def __call__(self, function: Function) -> Function:
        """The compiled form; the first dimension of tensors may vary from call to call."""
        if function not in self._known:
            compiled = torch.compile(function)

            def call(*args: Any, **kwargs: Any) -> Any:
                for leaf in tree_leaves(args):
                    if isinstance(leaf, Tensor) and leaf.dim():
                        torch._dynamo.maybe_mark_dynamic(leaf, 0)
                return compiled(*args, **kwargs)

            self._known[function] = call
        return self._known[function]
