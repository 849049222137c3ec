"""The device that a step is meant for, whether or not it is in this machine."""

from dataclasses import dataclass

import torch

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Target:
    """`traced` means that the tensors are fake and live on the CPU while the code behaves as it would on `kind`."""

    kind: str
    capability: tuple[int, int] = (0, 0)
    traced: bool = False

    @property
    def tensor_device(self) -> torch.device:
        """Where tensors are really made."""
        return torch.device("cpu" if self.traced else self.kind)

    def put(self, tensor: torch.Tensor | None) -> torch.Tensor | None:
        """A host tensor on the target; a trace makes a copy, because its target is the host too."""
        if tensor is None:
            return None
        return tensor.clone() if self.traced else tensor.to(self.tensor_device)

    @property
    def on_cuda(self) -> bool:
        """Whether CUDA's kernels are the ones to describe."""
        return self.kind == "cuda"


def this_machine() -> Target:
    """The GPU in this machine, or its CPU."""
    if torch.cuda.is_available():
        return Target("cuda", torch.cuda.get_device_capability())
    return Target("cpu")


def dtype(name: str) -> torch.dtype:
    """The torch type of a precision's name in the run file."""
    return DTYPES[name]
