"""Which pools (type and zone) can take a worker: a plain function over what EC2 says of types and zones."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from savedworker.fleet.ec2.settings import Ec2Settings
from savedworker.model.placement import Fit, Pool, cpu_probably_fits
from savedworker.model.spec import WorkerSpec

MACHINES = {"x86_64": "x86_64", "arm64": "aarch64"}
"""EC2's names of architectures, and ``uname -m``'s."""


MEMORY_TOLERANCE = 0.2
"""Share by which a GPU's memory as its driver tells it may differ from the one that EC2 tells: 39.4 of 40 GiB, 14.6 of 16."""


@dataclass(frozen=True)
class Card:
    """A GPU, as EC2 tells of it. Memory in bytes, 0 where it is not told."""

    model: str
    memory: int = 0


@dataclass(frozen=True)
class Type:
    """One type of instance, as DescribeInstanceTypes tells. Memory in bytes."""

    name: str
    cpus: int
    memory: int
    architectures: tuple[str, ...]
    gpus: tuple[Card, ...] = ()

    @property
    def family(self) -> str:
        """What its processors are of: ``m6i``."""
        return _family(self.name)

    @classmethod
    def parse(cls, answer: Mapping[str, Any]) -> Type:
        """From one element of the answer."""
        gpus: list[Card] = []
        for kind in answer.get("GpuInfo", {}).get("Gpus", ()):
            memory = int(kind.get("MemoryInfo", {}).get("SizeInMiB", 0)) << 20
            gpus += [Card(str(kind.get("Name", "")), memory)] * int(kind.get("Count", 1))
        return cls(
            name=answer["InstanceType"],
            cpus=int(answer.get("VCpuInfo", {}).get("DefaultVCpus", 1)),
            memory=int(answer.get("MemoryInfo", {}).get("SizeInMiB", 0)) << 20,
            architectures=tuple(answer.get("ProcessorInfo", {}).get("SupportedArchitectures", ())),
            gpus=tuple(gpus),
        )


@dataclass(frozen=True)
class Suitable:
    """The pools that can take the worker. ``why_not`` has, of every other type, the reason."""

    pools: tuple[Pool, ...]
    why_not: Mapping[str, str]
    fixable: bool
    """True when types were left out only because of the checkpoint: another time or policy may do, other settings need not."""


def suitable(
    types: Sequence[Type],
    offered: Collection[tuple[str, str]],
    zones: Collection[str],
    spec: WorkerSpec,
    fit: Fit,
    settings: Ec2Settings,
) -> Suitable:
    """``offered``: pairs of type and zone that exist. ``zones``: those of the fleet's subnets."""
    pools: list[Pool] = []
    why_not: dict[str, str] = {}
    by_checkpoint = 0
    # What one size of a family lacks, the others will lack, too.
    doubtful = {_family(x) for x in fit.unfit} - {_family(x) for x in fit.ran_on}
    for kind in types:
        too_small = _too_small(kind, spec, settings)
        misfit = "" if too_small else _misfit(kind, fit)
        here = [zone for zone in sorted(zones) if (kind.name, zone) in offered]
        if too_small or misfit or not here:
            why_not[kind.name] = too_small or misfit or f"not offered in {', '.join(sorted(zones))}"
            by_checkpoint += bool(misfit)
            continue
        probable = not fit.ran_on or cpu_probably_fits(fit.ran_on[0], kind.name, settings.alike)
        probable = probable and kind.family not in doubtful
        pools += [Pool(kind.name, zone, probable or fit.fingerprint is None) for zone in here]
    return Suitable(tuple(pools), why_not, fixable=by_checkpoint > 0)


def _too_small(kind: Type, spec: WorkerSpec, settings: Ec2Settings) -> str:
    if settings.architecture not in kind.architectures:
        return f"not {settings.architecture}"
    if spec.cpus is not None and kind.cpus < spec.cpus:
        return f"{kind.cpus} processors, not {spec.cpus:g}"
    if spec.memory is not None and kind.memory < spec.memory + settings.memory_reserve:
        wanted = (spec.memory + settings.memory_reserve) / (1 << 30)
        return f"{kind.memory / (1 << 30):.1f} GiB of memory, not {wanted:.1f}"
    if settings.gpu_count and len(kind.gpus) < settings.gpu_count:
        return f"{len(kind.gpus)} GPUs, not {settings.gpu_count}"
    if settings.gpu_model and any(gpu.model != settings.gpu_model for gpu in kind.gpus):
        return f"GPU {kind.gpus[0].model}, not {settings.gpu_model}"
    return ""


def _family(type_name: str) -> str:
    return type_name.partition(".")[0]


def _misfit(kind: Type, fit: Fit) -> str:
    """Why the worker's checkpoint cannot be restored on that type, as far as it is known before one boots."""
    if kind.name in fit.unfit:
        return "an agent there found that it does not fit the checkpoint"
    wanted = fit.fingerprint
    if wanted is None:
        return ""
    if wanted.machine not in (MACHINES.get(each) for each in kind.architectures):
        return f"not {wanted.machine}, as the checkpoint is"
    if len(wanted.gpus) != len(kind.gpus) and wanted.gpus:
        return f"{len(kind.gpus)} GPUs, and the checkpoint has {len(wanted.gpus)}"
    if kind.name == next(iter(fit.ran_on), None):
        return ""  # whatever EC2 calls its GPUs: the checkpoint is of that type
    for there, gpu in zip(kind.gpus, wanted.gpus, strict=False):
        if not _same_model(there, gpu.model):
            return f"GPU {there.model}, and the checkpoint has {gpu.model}"
        if there.memory and abs(gpu.memory - there.memory) > MEMORY_TOLERANCE * there.memory:
            sizes = (
                f"{there.memory / (1 << 30):.0f} GiB, and the checkpoint's has {gpu.memory / (1 << 30):.0f}"
            )
            return f"GPU {there.model} with {sizes}"
    return ""


def _same_model(there: Card, model: str) -> bool:
    """NVML says "NVIDIA A10G" and "NVIDIA RTX PRO 6000 Blackwell Server Edition", EC2 says "A10G" and "RTX PRO Server 6000"."""
    words = set(model.lower().replace("-", " ").split())
    return set(there.model.lower().replace("-", " ").split()) <= words
