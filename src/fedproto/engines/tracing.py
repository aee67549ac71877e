"""A user's network as a list of steps that engines can run in their own way.

A module is traced by `torch.fx` and cut into convolutions, normalisations, dense layers and, for
everything without parameters, plain functions. What usually follows a layer (ReLU, 2×2 max pooling,
a residual sum after a normalisation) becomes a part of its step, so that an engine can compute both
at once. Nothing is guessed: an engine compares the steps' logits with the module's own.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F  # noqa: N812 - the name everyone uses
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from fedproto.engines.layers import HASHED_DROPOUT, evaluating
from fedproto.models.adapter import original
from fedproto.models.layers import StandardizedConv2d

Pool: TypeAlias = Literal["", "valid", "same"]
"""2×2 max pooling after a layer: none, without odd last rows and columns, or with them."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """A part of a forward pass.

    Attributes:
        inputs: The values it takes: 0 is the batch, the others are outputs of earlier steps.
        output: The value it gives.
    """

    inputs: tuple[int, ...]
    output: int


@dataclass(frozen=True, kw_only=True)
class LayerStep(Step):
    """A layer with parameters, ``name.weight`` and ``name.bias``, perhaps followed by ReLU."""

    name: str
    bias: bool = True
    relu: bool = False


@dataclass(frozen=True, kw_only=True)
class DenseStep(LayerStep):
    """A dense layer.

    Attributes:
        image: Channels, height and width where the input is a flattened image.
    """

    units_in: int
    units: int
    image: tuple[int, int, int] | None = None


@dataclass(frozen=True, kw_only=True)
class ConvStep(LayerStep):
    """A convolution; pooled outputs pass a ReLU.

    Attributes:
        channels: Of input and output.
        image: Height and width of the input.
        taps: Height and width of the filters.
        standardize: Whether filters are standardised before they are used.
    """

    channels: tuple[int, int]
    image: tuple[int, int]
    taps: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    pool: Pool = ""
    standardize: bool = False

    @property
    def sides(self) -> tuple[int, int]:
        """Height and width of the output, before pooling."""
        parts = zip(self.image, self.taps, self.stride, self.padding, strict=True)
        height, width = ((i + 2 * p - t) // s + 1 for i, t, s, p in parts)
        return height, width


@dataclass(frozen=True, kw_only=True)
class NormStep(LayerStep):
    """Batch or group normalisation, then perhaps the sum with a second input, ReLU or pooling.

    Attributes:
        channels: How many.
        groups: Of channels, for group normalisation; 0 for batch normalisation.
        momentum: Of the running statistics; None where there are none.
    """

    channels: int
    groups: int
    eps: float
    momentum: float | None = None
    pool: Pool = ""

    @property
    def statistics(self) -> tuple[str, ...]:
        """The names of the running mean and variance; empty if there are none."""
        if self.momentum is None:
            return ()
        return f"{self.name}.running_mean", f"{self.name}.running_var"


@dataclass(frozen=True, kw_only=True)
class PlainStep(Step):
    """A function of tensors ``[B, …]``, channels first, that treats every sample alone.

    It may also give a number, such as the size of the batch, for functions after it.
    """

    function: Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class DropoutStep(Step):
    """Dropout.

    Attributes:
        p: The probability of being dropped.
        whole: Whether channels are dropped as a whole.
        place: Its number among the layers of this kind.
    """

    p: float
    whole: bool
    place: int


@dataclass(frozen=True)
class Trace:
    """A network: its steps in order; the last is the dense layer that gives the logits.

    Attributes:
        shapes: The shape of each value for one sample, channels first; () for numbers.
    """

    steps: tuple[Step, ...]
    shapes: dict[int, tuple[int, ...]]


def trace(model: nn.Module, inputs: Tensor) -> Trace | None:
    """The steps of a module that takes such a batch; None where it has others than these.

    A module whose forward pass depends on values cannot be traced; one that uses a parameter twice,
    not at all or outside of known layers, draws random numbers but for dropout, or has constants is
    left to others.
    """
    model = original(model)
    try:
        graph = _Tracer().trace(model)
        sizes = _Sizes(fx.GraphModule(model, graph)).of(inputs)
        found = _Builder(model, graph, sizes).build()
    except (_Unknown, RuntimeError, TypeError, ValueError, NameError, AttributeError):
        return None
    used = [name for step in found.steps for name in _parameters(step)]
    return found if sorted(used) == sorted(dict(model.named_parameters())) else None


class _Unknown(Exception):  # noqa: N818 - never leaves this module
    """A part of a network that is none of the known steps."""


def _parameters(step: Step) -> list[str]:
    if not isinstance(step, LayerStep):
        return []
    affine = not isinstance(step, NormStep) or step.bias
    return [f"{step.name}.weight"] * affine + [f"{step.name}.bias"] * step.bias


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        known = isinstance(m, StandardizedConv2d)
        return known or super().is_leaf_module(m, module_qualified_name)


class _Sizes(fx.Interpreter):
    """Runs a graph once and keeps the shapes of its values."""

    @torch.no_grad()
    def of(self, inputs: Tensor) -> dict[fx.Node, tuple[int, ...]]:
        self.found: dict[fx.Node, tuple[int, ...]] = {}
        self._batch = len(inputs)
        with evaluating(self.module):
            self.run(inputs)
        return self.found

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if isinstance(value, Tensor) and value.shape[:1] == (self._batch,):
            self.found[n] = tuple(value.shape)
        elif n.op != "output" and not isinstance(value, int | float | torch.Size):
            raise _Unknown
        return value


RELU = (F.relu, F.relu_, torch.relu, torch.relu_, "relu", "relu_")
FLATTEN, FLAT = (torch.flatten, "flatten"), ("start_dim", "end_dim")
POOL = (F.max_pool2d, torch.max_pool2d)
SUM = (operator.add, operator.iadd, torch.add, "add", "add_")
IN_PLACE: dict[Any, Any] = {operator.iadd: operator.add, "add_": torch.add}
"""What takes the place of functions that would change what other steps keep."""
LayerKind = TypeVar("LayerKind", bound=LayerStep)


class _Builder:
    """Turns the nodes of a graph into steps, one after another."""

    def __init__(
        self, model: nn.Module, graph: fx.Graph, sizes: dict[fx.Node, tuple[int, ...]]
    ) -> None:
        self._modules: dict[str, nn.Module] = dict(model.named_modules())
        self._graph, self._sizes = graph, sizes
        self._values: dict[fx.Node, int] = {}
        self._steps: dict[int, Step] = {}

    def build(self) -> Trace:
        """All steps."""
        outputs: list[int] = []
        for node in list(self._graph.nodes):
            if self._changes_nothing(node):
                node.replace_all_uses_with(_first(node))
                self._graph.erase_node(node)
        for node in self._graph.nodes:
            if node.op == "placeholder":
                if self._values:
                    raise _Unknown
                self._values[node] = 0
            elif node.op == "output":
                outputs = [self._values[node.args[0]]]
            elif node.op == "get_attr":
                raise _Unknown
            else:
                self._add(node)
        steps = tuple(self._steps.values())
        if not steps or not isinstance(steps[-1], DenseStep) or steps[-1].relu:
            raise _Unknown
        if outputs != [steps[-1].output] or (steps[-1].image and len(steps) == 1):
            raise _Unknown
        shapes = {
            self._values[node]: self._sizes[node][1:] if node in self._sizes else ()
            for node in self._values
        }
        return Trace(steps, shapes)

    def _layer(self, node: fx.Node) -> nn.Module | None:
        """The layer that a node calls, or for some functions the layer that does the same."""
        if node.op == "call_module":
            return self._modules[str(node.target)]
        if node.op not in ("call_function", "call_method"):
            return None
        args, given = node.args[1:], dict[str, Any](node.kwargs)
        if node.target in RELU:
            return nn.ReLU()
        if node.target in FLATTEN:
            return nn.Flatten(**{"start_dim": 0, **dict(zip(FLAT, args, strict=False)), **given})
        return nn.MaxPool2d(*args, **given) if node.target in POOL else None  # type: ignore[arg-type]

    def _changes_nothing(self, node: fx.Node) -> bool:
        layer = self._layer(node)
        flat = _is_flatten(layer) and len(self._sizes[_first(node)]) == 2
        never = isinstance(layer, _DropoutNd) and not layer.p
        return isinstance(layer, nn.Identity) or flat or never

    def _add(self, node: fx.Node) -> None:
        layer = self._layer(node)
        if isinstance(layer, nn.Linear):
            self._add_dense(node, layer)
        elif type(layer) in (nn.Conv2d, StandardizedConv2d):
            self._add_conv(node, layer)  # type: ignore[arg-type]
        elif isinstance(layer, _BatchNorm | nn.GroupNorm):
            self._add_norm(node, layer)
        elif isinstance(layer, _DropoutNd):
            if type(layer) not in HASHED_DROPOUT:
                raise _Unknown
            place = sum(isinstance(step, DropoutStep) for step in self._steps.values())
            whole = isinstance(layer, nn.Dropout2d)
            self._append(node, DropoutStep, [_first(node)], p=layer.p, whole=whole, place=place)
        elif layer is not None and any(True for _ in (*layer.parameters(), *layer.buffers())):
            raise _Unknown
        elif not self._joined(node, layer):
            self._add_plain(node)

    def _append(
        self, node: fx.Node, kind: type[Step], inputs: Sequence[fx.Node], **more: Any
    ) -> None:
        output = max(self._values.values()) + 1
        own = tuple(self._values[one] for one in inputs)
        self._steps[output] = kind(inputs=own, output=output, **more)
        self._values[node] = output

    def _append_layer(
        self, node: fx.Node, kind: type[LayerStep], layer: Any, before: fx.Node, **more: Any
    ) -> None:
        bias = layer.bias is not None
        self._append(node, kind, [before], name=str(node.target), bias=bias, **more)

    def _layer_before(self, node: fx.Node, kind: type[LayerKind]) -> LayerKind | None:
        """The layer that gives a node, where nothing else uses what it gives."""
        step = self._steps.get(self._values[node])
        return step if isinstance(step, kind) and len(node.users) == 1 else None

    def _merge(self, node: fx.Node, step: LayerStep, **more: Any) -> None:
        """Makes a node a part of the step before it."""
        self._steps[step.output] = replace(step, **more)
        self._values[node] = step.output

    def _joined(self, node: fx.Node, layer: nn.Module | None) -> bool:
        """Whether a function has become a part of a layer's step."""
        if node.op != "call_module" and node.target in SUM and not node.kwargs:
            return self._join_sum(node)
        if not node.args or not isinstance(node.args[0], fx.Node):
            return False
        step = self._layer_before(node.args[0], LayerStep)
        if step is None:
            return False
        if isinstance(layer, nn.ReLU):
            self._merge(node, step, relu=True)
            return True
        pool = _pooling(layer)
        poolable = isinstance(step, ConvStep | NormStep) and not step.pool and len(step.inputs) == 1
        if not pool or not poolable or len(self._sizes[node]) != 4:
            return False
        users = list(node.users)
        followed = len(users) == 1 and isinstance(self._layer(users[0]), nn.ReLU)
        if not step.relu and not followed:
            return False
        self._merge(node, step, pool=pool)
        return True

    def _join_sum(self, node: fx.Node) -> bool:
        """Makes a residual sum a part of the normalisation that is one of its terms."""
        terms = [one for one in node.args if isinstance(one, fx.Node)]
        if len(terms) != 2 or len({self._sizes.get(one) for one in (*terms, node)}) != 1:
            return False
        for term, other in (terms, terms[::-1]):
            step = self._layer_before(term, NormStep)
            if step is not None and not step.relu and not step.pool and len(step.inputs) == 1:
                # It waits for the other term, which may come later.
                del self._steps[step.output]
                self._merge(node, step, inputs=(*step.inputs, self._values[other]))
                return True
        return False

    def _add_dense(self, node: fx.Node, layer: nn.Linear) -> None:
        before, image = _first(node), None
        if len(self._sizes[before]) != 2:
            raise _Unknown
        if _is_flatten(self._layer(before)):
            # The columns of the weight are put in the order of an image instead.
            _, *sides = self._sizes[_first(before)]
            image = tuple(sides) if len(sides) == 3 else None
            if len(before.users) == 1:
                self._steps.pop(self._values[before], None)
            before = _first(before)
        units = {"units_in": layer.in_features, "units": layer.out_features}
        self._append_layer(node, DenseStep, layer, before, **units, image=image)

    def _add_conv(self, node: fx.Node, layer: nn.Conv2d) -> None:
        before = _first(node)
        plain = layer.dilation == (1, 1) and layer.groups == 1 and layer.padding_mode == "zeros"
        if not plain or len(self._sizes[before]) != 4 or isinstance(layer.padding, str):
            raise _Unknown
        self._append_layer(
            node,
            ConvStep,
            layer,
            before,
            channels=(layer.in_channels, layer.out_channels),
            image=self._sizes[before][2:],
            taps=layer.kernel_size,
            stride=layer.stride,
            padding=layer.padding,
            standardize=isinstance(layer, StandardizedConv2d),
        )

    def _add_norm(self, node: fx.Node, layer: _BatchNorm | nn.GroupNorm) -> None:
        kept = isinstance(layer, _BatchNorm) and layer.track_running_stats
        momentum = layer.momentum if kept else None
        # Without momentum, statistics are a plain mean over all batches so far.
        if len(self._sizes[node]) not in (2, 4) or (kept and momentum is None):
            raise _Unknown
        self._append_layer(
            node,
            NormStep,
            layer,
            _first(node),
            channels=self._sizes[node][1],
            groups=layer.num_groups if isinstance(layer, nn.GroupNorm) else 0,
            eps=layer.eps,
            momentum=momentum,
        )

    def _add_plain(self, node: fx.Node) -> None:
        name = str(getattr(node.target, "__name__", node.target))
        if "dropout" in name or "rand" in name:
            raise _Unknown
        inputs, layer = node.all_input_nodes, self._layer(node)
        called: Any = layer if node.op == "call_module" else IN_PLACE.get(node.target, node.target)

        def function(*values: Any) -> Any:
            if isinstance(layer, nn.ReLU):
                return values[0].relu()
            given = dict(zip(inputs, values, strict=True))
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), given.__getitem__)
            if isinstance(called, str):
                own, *rest = args
                return getattr(own, called)(*rest, **kwargs)
            return called(*args, **kwargs)

        self._append(node, PlainStep, inputs, function=function)


def _first(node: fx.Node) -> fx.Node:
    """The input of a layer."""
    if not node.args or not isinstance(node.args[0], fx.Node):
        raise _Unknown
    return node.args[0]


def _is_flatten(layer: nn.Module | None) -> bool:
    """Whether a layer lays out images in rows, from the second dimension on."""
    return isinstance(layer, nn.Flatten) and (layer.start_dim, layer.end_dim) == (1, -1)


def _pooling(layer: nn.Module | None) -> Pool:
    """Which 2×2 max pooling a layer is; none if it is anything else."""
    if not isinstance(layer, nn.MaxPool2d) or layer.return_indices:
        return ""
    sides = (layer.kernel_size, layer.stride, layer.padding, layer.dilation)
    given = [(one, one) if isinstance(one, int) else tuple(one) for one in sides]
    if given != [(2, 2), (2, 2), (0, 0), (1, 1)]:
        return ""
    return "same" if layer.ceil_mode else "valid"
