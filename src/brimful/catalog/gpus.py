"""GPUs and the cloud instances that carry them: memory as the driver reports it, rates, prices, and their sources."""

import re
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any, Literal

import yaml

from brimful.core.errors import UnknownName
from brimful.core.units import MiB

CudaKind = Literal["measured", "torch", "torch-gib", "estimate"]


@dataclass(frozen=True)
class Gpu:
    """One card. `gpus.yaml` says what each figure means; rates are dense, None where the hardware has no such unit."""

    name: str
    title: str
    architecture: str
    compute_capability: str
    multiprocessors: int
    threads_per_multiprocessor: int
    memory_mib: int
    cuda_mib: int
    cuda_kind: CudaKind
    context_mib: int
    context_measured: bool
    reservable_mib: int
    bandwidth_gbs: float
    bf16_tflops: float | None
    fp16_tflops: float
    tf32_tflops: float | None
    fp32_tflops: float
    measured: bool
    source: str = field(repr=False)
    aliases: tuple[str, ...] = ()

    @property
    def memory(self) -> int:
        """Bytes that the driver reports as the card's total."""
        return self.memory_mib * MiB

    @property
    def total(self) -> int:
        """Bytes that CUDA reports to a process: torch's `total_memory`."""
        return self.cuda_mib * MiB

    @property
    def context(self) -> int:
        """Bytes that the CUDA context and the loaded kernels take by the end of a run."""
        return self.context_mib * MiB

    @property
    def reservable(self) -> int:
        """Bytes that PyTorch can reserve at most."""
        return self.reservable_mib * MiB

    @property
    def capability(self) -> tuple[int, int]:
        """The compute capability as torch gives it: (8, 6) for sm_86."""
        major, minor = self.compute_capability.split(".")
        return int(major), int(minor)


@dataclass(frozen=True)
class Instance:
    """One cloud machine: `count` cards of one kind, host RAM, and what an hour cost when somebody last looked."""

    name: str
    cloud: str
    gpu: Gpu
    count: int
    host_ram_gib: int
    usd_per_hour: float | None
    spot_usd_per_hour: float | None
    price_date: str | None
    source: str = field(repr=False)
    aliases: tuple[str, ...] = ()


def gpu_names() -> tuple[str, ...]:
    """The catalogue's GPUs, sorted by name."""
    return tuple(sorted(_gpus()))


def instance_names() -> tuple[str, ...]:
    """The catalogue's cloud instances, sorted by name."""
    return tuple(sorted(_instances()))


def find_gpu(name: str) -> Gpu | None:
    """The GPU called `name`: its key, an alias, what the driver calls it, or an instance that carries it; else None."""
    gpu = _gpu_index().get(_key(name))
    if gpu is not None:
        return gpu
    instance = find_instance(name)
    return instance.gpu if instance is not None else None


def find_instance(name: str) -> Instance | None:
    """The cloud instance called `name`, or None."""
    return _instance_index().get(_key(name))


def get_gpu(name: str) -> Gpu:
    """Like `find_gpu`, but refuses an unknown name and offers the nearest known ones."""
    gpu = find_gpu(name)
    if gpu is None:
        raise UnknownName("GPU", name, (*gpu_names(), *instance_names()))
    return gpu


def _key(name: str) -> str:
    """`NVIDIA GeForce RTX 5090`, `RTX_5090` and `rtx-5090` are one card: the brand tells none from another."""
    words = re.split(r"[\s_\-]+", name.strip().casefold())
    return "-".join(word for word in words if word not in {"nvidia", "geforce", "tesla", ""})


@cache
def _gpu_index() -> dict[str, Gpu]:
    return {_key(spelling): gpu for gpu in _gpus().values() for spelling in (gpu.name, *gpu.aliases)}


@cache
def _instance_index() -> dict[str, Instance]:
    return {_key(spelling): one for one in _instances().values() for spelling in (one.name, *one.aliases)}


@cache
def _data() -> dict[str, dict[str, dict[str, Any]]]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times faster where libyaml is there
    text = files("brimful.catalog").joinpath("gpus.yaml").read_text(encoding="utf-8")
    data: dict[str, dict[str, dict[str, Any]]] = yaml.load(text, Loader=loader)
    return data


@cache
def _gpus() -> dict[str, Gpu]:
    return {
        name: Gpu(**{**fields, "name": name, "aliases": tuple(fields["aliases"])})
        for name, fields in _data()["gpus"].items()
    }


@cache
def _instances() -> dict[str, Instance]:
    instances: dict[str, Instance] = {}
    for name, fields in _data()["instances"].items():
        given = {key: value for key, value in fields.items() if key != "kind"}
        given |= {"name": name, "gpu": _gpus()[fields["gpu"]], "aliases": tuple(fields["aliases"])}
        instances[name] = Instance(**given)
    return instances
