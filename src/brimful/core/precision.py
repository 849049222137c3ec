"""The precisions of a run: what the numbers are stored in and computed with. They decide the result."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from brimful.core.errors import RunFileError
from brimful.core.nearest import nearest

BITS = {"fp16": 16, "bf16": 16, "fp32": 32, "fp64": 64}
KEYS = {
    "weights": "what the model's weights are stored in",
    "compute": "what matrix products are computed in; by autocast where it differs from the weights",
    "gradients": "what gradients are accumulated in",
    "optimizer": "what the optimizer's state is kept in",
    "adapter": "what LoRA's own weights are stored in; their gradients and optimizer state are at least that precise",
}


@dataclass(frozen=True)
class Precision:
    """Four precisions and the adapter's, each one of fp16, bf16, fp32, fp64."""

    weights: str
    compute: str
    gradients: str
    optimizer: str
    adapter: str

    @property
    def autocast(self) -> bool:
        """Whether operations are cast on the way, because the weights are stored in something else."""
        return self.compute != self.weights

    @property
    def loss_scaling(self) -> bool:
        """Whether the loss is scaled up before backward: fp16 gradients underflow otherwise."""
        return self.compute == "fp16"

    def __post_init__(self) -> None:
        for key, value in asdict(self).items():
            if value not in BITS:
                raise RunFileError(f"precision.{key}: {value!r} is not a precision", f"use one of {', '.join(BITS)}")
        if BITS[self.compute] > BITS[self.weights]:
            raise RunFileError(
                f"precision.compute: {self.compute} is wider than the {self.weights} weights it would read",
                f"set precision.weights: {self.compute}, or precision.compute: {self.weights}",
            )
        if BITS[self.compute] == 16 and BITS[self.weights] == 16 and self.compute != self.weights:
            raise RunFileError(
                f"precision.compute: {self.compute} over {self.weights} weights loses range and digits alike",
                f"set precision.compute: {self.weights}, or store the weights in fp32",
            )
        for key in ("gradients", "optimizer"):
            value = getattr(self, key)
            if BITS[value] < BITS[self.weights] or (BITS[value] == 16 and value != self.weights):
                raise RunFileError(
                    f"precision.{key}: {value} cannot hold an update of {self.weights} weights",
                    f"set precision.{key}: {self.weights} or wider",
                )
        if self.adapter == "fp16":
            raise RunFileError(
                "precision.adapter: fp16 adapters underflow in training", "set precision.adapter: fp32 or bf16"
            )
        if self.adapter == "fp64" and self.weights != "fp64":
            raise RunFileError(
                f"precision.adapter: fp64 over {self.weights} weights gains nothing",
                "set precision.adapter: fp32, or all precisions to fp64",
            )

    @staticmethod
    def parse(value: "str | Mapping[str, object] | Precision") -> "Precision":
        """A preset's name, or a mapping whose missing keys follow the weights (the adapter: fp32)."""
        if isinstance(value, Precision):
            return value
        if isinstance(value, str):
            if value not in PRESETS:
                likely = nearest(value, PRESETS, 1)
                offer = f"did you mean {likely[0]}? " if likely else ""
                if value == "fp16":
                    offer = "fp16-scaled keeps fp32 weights; frozen fp16 weights under LoRA are {weights: fp16}; "
                raise RunFileError(
                    f"precision: {value!r} is not a preset", f"{offer}use one of {', '.join(PRESETS)}, or a mapping"
                )
            return PRESETS[value]
        if not isinstance(value, Mapping):
            raise RunFileError(
                f"precision: {value!r} is not a precision", f"use one of {', '.join(PRESETS)}, or a mapping"
            )
        for key in value:
            if key not in KEYS:
                likely = nearest(str(key), KEYS, 1)
                offer = f"did you mean {likely[0]}? " if likely else ""
                raise RunFileError(f"unknown key precision.{key}", f"{offer}known here: {', '.join(KEYS)}")
        weights = str(value.get("weights", "bf16"))
        default = dict.fromkeys(KEYS, weights) | {"adapter": "fp64" if weights == "fp64" else "fp32"}
        return Precision(**(default | {key: str(given) for key, given in value.items()}))

    def to_mapping(self) -> str | dict[str, str]:
        """The preset's name where this is one, else the mapping that `parse` reads."""
        return next((name for name, preset in PRESETS.items() if preset == self), asdict(self))


PRESETS = {
    "bf16": Precision("bf16", "bf16", "bf16", "bf16", "fp32"),
    "fp32-autocast": Precision("fp32", "bf16", "fp32", "fp32", "fp32"),
    "fp16-scaled": Precision("fp32", "fp16", "fp32", "fp32", "fp32"),
    "fp32": Precision("fp32", "fp32", "fp32", "fp32", "fp32"),
}
