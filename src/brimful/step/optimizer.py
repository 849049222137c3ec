"""The optimizers of the run file, each in the implementation that the plan chose."""

from collections.abc import Iterable
from fnmatch import fnmatch
from typing import Any

import torch
from torch import nn

from brimful.core.errors import MissingPackage, UsageError
from brimful.core.runfile import Group, Optimizer
from brimful.step.target import Target

SMALLEST_8BIT = 4096
BLOCK_8BIT = 256


def build_optimizer(
    parameters: dict[str, nn.Parameter], spec: Optimizer, groups: Iterable[Group], impl: str | None, target: Target
) -> torch.optim.Optimizer:
    """The optimizer over named parameters; `impl` is foreach or fused where the optimizer has both."""
    sorted_groups = parameter_groups(parameters, spec, tuple(groups))
    impl = impl or ("fused" if target.on_cuda else "foreach")
    shared = {"lr": spec.learning_rate, "weight_decay": spec.weight_decay}
    fast = {"fused": True} if impl == "fused" else {"foreach": True}
    if spec.name == "adamw":
        return torch.optim.AdamW(sorted_groups, betas=spec.betas, **shared, **fast)
    if spec.name == "sgd":
        return torch.optim.SGD(sorted_groups, momentum=spec.momentum, **shared, **fast)
    if spec.name == "adafactor":
        return torch.optim.Adafactor(sorted_groups, foreach=False, **shared)
    paged = spec.name == "adamw-paged-8bit"
    if target.traced:
        return Described8bitAdamW(sorted_groups, paged=paged, betas=spec.betas, **shared)
    return _bitsandbytes(paged)(sorted_groups, betas=spec.betas, **shared)


def parameter_groups(
    parameters: dict[str, nn.Parameter], spec: Optimizer, groups: tuple[Group, ...]
) -> list[dict[str, Any]]:
    """Parameters by the first group whose pattern matches their name; the rest keep the run's rate."""
    members: list[list[nn.Parameter]] = [[] for _ in range(len(groups) + 1)]
    for name, parameter in parameters.items():
        place = next((i for i, group in enumerate(groups) if fnmatch(name, group.match)), len(groups))
        members[place].append(parameter)
    for group, matched in zip(groups, members, strict=False):
        if not matched:
            raise UsageError(
                f"groups: {group.match!r} matches no weight that is trained and in no group before it",
                hint=f"such as {next(iter(parameters), 'none')}; * stands for anything",
            )
    rates = [_rate(group.learning_rate, spec.learning_rate) for group in groups]
    sorted_groups = [{"params": m, "lr": rate} for m, rate in zip(members, rates, strict=False) if m]
    return [*sorted_groups, {"params": members[-1]}] if members[-1] else sorted_groups


def _rate(wanted: float | str | None, base: float) -> float:
    if isinstance(wanted, str):
        return base * float(wanted[1:])
    return base if wanted is None else wanted


def _bitsandbytes(paged: bool) -> type[torch.optim.Optimizer]:
    try:
        import bitsandbytes
    except ImportError as error:
        raise MissingPackage("bitsandbytes", "an 8-bit optimizer", extra="cuda") from error
    return bitsandbytes.optim.PagedAdamW8bit if paged else bitsandbytes.optim.AdamW8bit


class Described8bitAdamW(torch.optim.Optimizer):
    """The memory of bitsandbytes' AdamW8bit without the package: for traces, where nothing is computed.

    Two bytes of state per weight, an fp32 scale per block of 256 and moment, fp32 state for small tensors. A paged
    state lives in unified memory, which PyTorch's allocator never sees.
    """

    def __init__(self, params: Any, *, paged: bool, **defaults: Any) -> None:
        super().__init__(params, defaults)
        self.paged = paged

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Make the state where it does not exist yet."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and not self.state[p]:
                    self._make_state(p)

    def _make_state(self, p: nn.Parameter) -> None:
        if "maps" not in self.defaults:
            self.defaults["maps"] = [torch.zeros(256, device=p.device) for _ in range(2)]
        small = p.numel() < SMALLEST_8BIT
        large = p.numel() >= 100_000  # bitsandbytes pages only what is worth it
        for moment in ("state1", "state2"):
            if not (self.paged and large):
                self.state[p][moment] = torch.zeros_like(p, dtype=torch.float32 if small else torch.uint8)
        if not small:
            blocks = -(-p.numel() // BLOCK_8BIT)
            for moment in ("absmax1", "absmax2"):
                self.state[p][moment] = torch.zeros(blocks, dtype=torch.float32, device=p.device)
