"""The interface of engines: run jobs, test models; no knowledge of rounds or methods."""

from __future__ import annotations

import abc
import contextlib
import enum
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar, Literal

import torch
from torch import nn

from fedproto.callback import Callback
from fedproto.data.federation import Federation
from fedproto.data.tasks import Task
from fedproto.engines.augment import AugmentOptions
from fedproto.engines.layers import draws_by_generator
from fedproto.engines.training import TrainOptions
from fedproto.errors import ConfigError, reason_of, unknown_name
from fedproto.options import Options, Registry, option
from fedproto.rng import Indices
from fedproto.rng.schedule import BatchOrder
from fedproto.strategies.base import PERSONAL, Strategy
from fedproto.strategies.sections import Method
from fedproto.types import ClientFailure, ClientUpdate, ServerState, Tensors, part

AUTO = "auto"
"""In place of an engine's name: `fedproto.engines.auto` chooses one."""


@dataclass(frozen=True)
class EngineOptions(Options):
    """Engine, device and precision."""

    name: str = option(AUTO, "engine; 'auto' chooses by device and amount of work")
    device: str = option("auto", "device: 'auto', 'cpu', 'cuda' or 'cuda:N'")
    devices: int = option(
        1, "number of CUDA devices that share the jobs of a round; 0 for all", at_least=0
    )
    dtype: Literal["float32", "float64"] = option("float32", "floating type of weights and inputs")
    eval_batch_size: int = option(1000, "samples per batch in evaluation", at_least=1)
    amp: bool = option(
        False, "mixed precision on CUDA: products in bfloat16, weights in the floating type"
    )
    channels_last: bool = option(
        False, "channels-last memory format for images; not for the stacked engine"
    )
    tune: bool = option(
        False, "CUDA: benchmark kernels for each new shape; helps where shapes rarely change"
    )
    tf32: bool = option(False, "CUDA: faster matrix products with TF32, 10 bits of mantissa")
    compile: bool = option(
        True, "stacked engine on CUDA: custom kernels and compiled pointwise operations"
    )
    workers: int = option(
        0, "processes engine: number of processes; 0 for one per core", at_least=0
    )

    def torch_device(self) -> torch.device:
        """The device to use."""
        cpu_only = self.name == "processes"
        if self.device == "auto":
            cuda = torch.cuda.is_available() and not cpu_only
            return torch.device("cuda" if cuda else "cpu")
        try:
            device = torch.device(self.device)
        except RuntimeError:
            raise ConfigError(f"engine.device '{self.device}' is not a device; try 'cpu'") from None
        if cpu_only and device.type != "cpu":
            raise ConfigError(
                f"engine.device '{self.device}': engine 'processes' runs on the CPU; use 'cpu', or"
                " engine.name = 'stacked'"
            )
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise ConfigError(
                f"engine.device '{self.device}': this machine has {torch.cuda.device_count()} CUDA"
                " devices; use 'cpu' or 'auto'"
            )
        if device.type != "cpu":
            _check_device(device)
        return device

    def process_devices(self) -> list[torch.device]:
        """The devices that share out jobs; on a CPU, processes stand in for them."""
        device = self.torch_device()
        if self.devices == 1:
            return [device]
        if device.type != "cuda":
            return [device] * max(self.devices, 1)
        first, there = device.index or 0, torch.cuda.device_count()
        if first + self.devices > there:
            raise ConfigError(
                f"engine.devices = {self.devices}: this machine has {there} CUDA devices, of which"
                f" cuda:{first} is the first to be used; use 0 for all from there on"
            )
        end = first + self.devices if self.devices else there
        return [torch.device("cuda", number) for number in range(first, end)]

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Makes a CUDA device the current one, with float32 products as configured, for a while.

        Kernels start and graphs are captured on the current device, wherever their tensors lie.
        """
        device = self.torch_device()
        if device.type != "cuda":
            yield
            return
        with torch.cuda.device(device), products(tf32=self.tf32, tune=self.tune):
            yield

    def autocast(self, device: torch.device) -> contextlib.AbstractContextManager[object]:
        """Mixed precision where it was asked for and the device is a GPU.

        In bfloat16, whose range is that of float32, because every job has a new optimizer:
        with float16 each job would spend its first steps on finding a scale for the loss.
        """
        if not self.amp or device.type != "cuda":
            return contextlib.nullcontext()
        return torch.autocast(device.type, torch.bfloat16)

    def torch_dtype(self) -> torch.dtype:
        """The floating type to use."""
        return torch.float64 if self.dtype == "float64" else torch.float32


class Capability(enum.StrEnum):
    """A capability that jobs may need and not every engine has; the value completes a notice."""

    CPU = "training on a CPU"
    CUDA = "training on CUDA"
    FLOAT64 = "float64"
    LABEL_MAPS = "a label per pixel"
    GENERATOR = "layers that draw from PyTorch's generator"
    BATCH_TERM = "batch terms"
    TRAINABLE = "phases of training"
    PERSONAL_MODEL = "personal models"


EVERYTHING = frozenset(Capability)


@dataclass(frozen=True)
class Workload:
    """The model, data and options that all jobs of an engine share.

    Attributes:
        model: The architecture; its own weights are neither used nor changed.
        callback: Follows the jobs.
    """

    federation: Federation
    model: nn.Module
    task: Task
    options: EngineOptions
    callback: Callback = field(default_factory=Callback)

    @cached_property
    def needs(self) -> frozenset[Capability]:
        """The capabilities that every job needs."""
        cuda = self.options.torch_device().type == "cuda"
        asked = {
            Capability.CUDA if cuda else Capability.CPU: True,
            Capability.FLOAT64: self.options.dtype == "float64",
            Capability.LABEL_MAPS: not self.task.one_label,
            Capability.GENERATOR: draws_by_generator(self.model),
        }
        return frozenset(name for name, needed in asked.items() if needed)


def needs_of(method: Method) -> frozenset[Capability]:
    """The capabilities that jobs of a method need, beside those of their workload."""
    needs = method.needs
    asked = {
        Capability.BATCH_TERM: "batch_term" in needs.hooks,
        Capability.TRAINABLE: "trainable" in needs.hooks,
        Capability.PERSONAL_MODEL: needs.personal_model,
    }
    return frozenset(name for name, needed in asked.items() if needed)


@dataclass(frozen=True)
class LocalJob:
    """Train this client from this state with this strategy for these epochs.

    Attributes:
        state: The received state; its memory stays with the server.
        method: The strategy and sections, which give the local objective and the report.
        batches: The epochs to do and the order of the samples in each.
        seed: For randomness inside the model (dropout).
        augment: Augmentation of training images; None for none.
        broadcast: Tensors that the strategy sends beside the weights.
        memory: Tensors that the client kept; empty where the client itself keeps them.
        run: Digest of the run's configuration, by which a client that remembers tells runs apart.
        last_round: The last round whose update of this client was accepted; None for none.
        keep_from: The earliest round to which the run may go back.
    """

    client: int
    state: ServerState
    method: Method
    batches: BatchOrder
    train: TrainOptions
    lr: float
    seed: int
    augment: AugmentOptions | None = None
    broadcast: Tensors = field(default_factory=dict)
    memory: Tensors = field(default_factory=dict)
    run: str = ""
    last_round: int | None = None
    keep_from: int = 0

    @property
    def strategy(self) -> Strategy:
        """The method's strategy."""
        return self.method.strategy

    @property
    def observed(self) -> ServerState:
        """The model under which statistics before training are taken."""
        return self.method.serve.observed(self.state, self.broadcast)

    def personalised(self) -> LocalJob:
        """The same job from the received model with the client's personal parameters over it."""
        own = {} if self.method.needs.personal_model else part(PERSONAL, self.memory)
        return replace(self, state=laid_over(self.state, own)) if own else self

    @property
    def personal_model(self) -> ServerState:
        """The client's own model: as received, with all that stays on the client over it."""
        return laid_over(self.state, part(PERSONAL, self.memory))


def laid_over(state: ServerState, own: Tensors) -> ServerState:
    """A model with a client's own tensors in place of some of its own."""
    if not own:
        return state
    return replace(
        state,
        params={name: own.get(name, one) for name, one in state.params.items()},
        buffers={name: own.get(name, one) for name, one in state.buffers.items()},
    )


class Engine(abc.ABC):
    """Runs jobs.

    Attributes:
        name: The engine's name in ``run.json``.
        capabilities: Capabilities of the engine itself.
        fallbacks: Names of engines for jobs that need more; the last one can do everything.
        holds_data: Whether the clients' samples can be read where the engine is.
        clients_remember: Whether clients keep their memory themselves, out of the run's reach.
    """

    capabilities: ClassVar[frozenset[Capability]] = EVERYTHING
    fallbacks: ClassVar[tuple[str, ...]] = ("reference",)
    holds_data: bool = True
    clients_remember: bool = False

    def __init__(self, workload: Workload) -> None:
        self.workload, self.name = workload, type(self).__name__.removesuffix("Engine").lower()
        self._substitutes: dict[str, Engine] = {}
        self._noticed: set[str] = set()

    def train(self, jobs: Sequence[LocalJob]) -> list[ClientUpdate | ClientFailure]:
        """One result per job of a round, in the jobs' order.

        Jobs that need more than the engine is capable of go to a fallback, with one notice per
        reason.
        """
        engines = [self._engine_for(job) for job in jobs]
        results: dict[int, ClientUpdate | ClientFailure] = {}
        for engine in dict.fromkeys(engines):
            places = [place for place, one in enumerate(engines) if one is engine]
            train = self.train_natively if engine is self else engine.train
            results |= zip(places, train([jobs[place] for place in places]), strict=True)
        return [results[place] for place in range(len(jobs))]

    @abc.abstractmethod
    def train_natively(self, jobs: Sequence[LocalJob]) -> list[ClientUpdate | ClientFailure]:
        """One result per job, of jobs that the engine is capable of."""

    def obstacle(self, job: LocalJob) -> str | None:
        """Why a job cannot be trained here, although the declared capabilities suffice.

        For options that an engine lacks, and reasons that show when a model or a hook is tried.
        """
        return None

    def substitute(self, needs: frozenset[Capability] = frozenset()) -> Engine:
        """The first of the fallbacks that is capable of all that is needed."""
        needs |= self.workload.needs
        name = next(one for one in self.fallbacks if needs <= ENGINES.get(one).capabilities)
        if name not in self._substitutes:
            self._substitutes[name] = ENGINES.get(name)(self.workload)
        return self._substitutes[name]

    def _engine_for(self, job: LocalJob) -> Engine:
        """This engine, or the fallback that a job goes to."""
        needs = needs_of(job.method)
        missing = (needs | self.workload.needs) - self.capabilities
        reason = ", ".join(sorted(missing)) or self.obstacle(job)
        if reason is None:
            return self
        engine = self.substitute(needs)
        if reason not in self._noticed:
            self._noticed.add(reason)
            self.workload.callback.on_notice(
                f"engine '{self.name}' cannot run some jobs ({reason}); engine '{engine.name}'"
                " trains them"
            )
        return engine

    @abc.abstractmethod
    def evaluate(self, states: Sequence[ServerState], indices: Indices) -> list[dict[str, float]]:
        """The task's metrics of models, of any run, on some samples."""

    def evaluate_personal(self, jobs: Sequence[LocalJob]) -> list[dict[str, float]]:
        """The task's metrics of each client's own model on its own test part."""
        clients = self.workload.federation.clients
        return [self.evaluate([job.personal_model], clients[job.client].test)[0] for job in jobs]

    def judged(self, usable: Collection[int], refused: Mapping[int, str]) -> None:
        """Receives which updates of a round were used, over all its runs.

        Args:
            usable: Clients of whom an update entered an average.
            refused: Why none did, by client.
        """
        del usable, refused

    def take_incidents(self) -> list[str]:
        """Incidents since the last call for the round's record, in sentences.

        A job that gave no update is a `ClientFailure` instead.
        """
        return []

    def close(self) -> None:
        """Frees the engine's resources."""
        for engine in self._substitutes.values():
            engine.close()
        self._substitutes.clear()


@contextlib.contextmanager
def products(*, tf32: bool, tune: bool) -> Iterator[None]:
    """Sets the precision of CUDA's float32 products and cuDNN's autotuning for a while."""
    cudnn = torch.backends.cudnn
    before = torch.get_float32_matmul_precision(), cudnn.allow_tf32, cudnn.benchmark
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    cudnn.allow_tf32, cudnn.benchmark = tf32, tune
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        cudnn.allow_tf32, cudnn.benchmark = before[1:]


def available_cores() -> int:
    """The cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


ENGINES: Registry[Engine] = Registry("engine", "fedproto.engines")


def check_engine_name(name: str) -> None:
    """Checks that there is such an engine."""
    if name not in (AUTO, *ENGINES.names()):
        raise ConfigError(unknown_name("engine", name, (AUTO, *ENGINES.names())))


def _check_device(device: torch.device) -> None:
    """Checks that the device computes, since a known kind of device need not work."""
    try:
        float(torch.ones(1, device=device).sum())
    # Every kind of device has its own way of saying that it is not there.
    except Exception as error:  # noqa: BLE001
        raise ConfigError(
            f"engine.device '{device}' cannot be used here: {reason_of(error).partition('. ')[0]}"
        ) from None
