"""LoRA and QLoRA through peft, on a model that still has no memory."""

from dataclasses import replace

import torch
from torch import nn

from brimful.core.errors import ModelError, UsageError
from brimful.core.nearest import nearest
from brimful.core.precision import Precision
from brimful.core.runfile import Lora
from brimful.step.model import TrainModel
from brimful.step.nf4 import NF4Linear, replace_linears
from brimful.step.target import dtype


def adapt(model: TrainModel, method: str, lora: Lora, precision: Precision) -> TrainModel:
    """Freeze, quantise and wrap the model as the method asks; `full` and `scratch` train everything."""
    if method in ("full", "scratch"):
        return model
    if lora.source is not None:
        raise UsageError("lora.from: continuing from an adapter is not there yet", hint="leave lora.from out")
    if method == "qlora":
        if lora.variant == "dora":
            raise UsageError("DoRA needs the base weights whole", hint="use variant: lora or rslora with qlora")
        # transformers leaves these in floating point too: T5 casts activations to the type of its `wo`
        whole = getattr(model.module, "_keep_in_fp32_modules", None) or ()
        own_head = () if model.source.custom is None else ("head",)
        if not replace_linears(model.module, ("lm_head", "embed_out", "score", "classifier", *own_head, *whole)):
            raise UsageError(
                f"{model.source.name} has no linear layers that can be kept in nf4", hint="use method: lora or full"
            )
    return replace(model, module=_wrap(model, lora, precision))


def linear_names(module: nn.Module) -> list[str]:
    """The distinct last names of the linear layers, which is what LoRA targets are matched against."""
    kinds = (nn.Linear, NF4Linear)
    names = {name.rpartition(".")[2] for name, part in module.named_modules() if _is_linear(part, kinds)}
    return sorted(names)


def _is_linear(part: nn.Module, kinds: tuple[type, ...]) -> bool:
    return isinstance(part, kinds) or type(part).__name__ == "Conv1D"


def default_targets(module: nn.Module) -> list[str]:
    """Query and value projections, under the name that the family gives them."""
    names = linear_names(module)
    for pair in (["q_proj", "v_proj"], ["q", "v"], ["query_key_value"], ["qkv_proj"], ["c_attn"], ["Wqkv"]):
        if all(name in names for name in pair):
            return pair
    raise ModelError(
        "no attention projections with a known name", hint=f"set lora.targets; there are {', '.join(names)}"
    )


def _wrap(model: TrainModel, lora: Lora, precision: Precision) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    names = {part for name, _ in model.module.named_modules() for part in (name, name.rpartition(".")[2])}
    for wanted in lora.save_modules:
        if wanted not in names:
            raise UsageError(
                f"lora.save_modules: {wanted!r} is no module of this model",
                hint=f"did you mean {', '.join(likely)}?" if (likely := nearest(wanted, names, 3)) else None,
            )
    targets = lora.targets if isinstance(lora.targets, str) else list(lora.targets or default_targets(model.module))
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=targets,
        modules_to_save=list(lora.save_modules) or None,
        use_rslora=lora.variant == "rslora",
        use_dora=lora.variant == "dora",
        fan_in_fan_out=any(type(part).__name__ == "Conv1D" for part in model.module.modules()),  # GPT-2's linears
    )
    try:
        with torch.device("meta"):
            module = get_peft_model(model.module, config, autocast_adapter_dtype=False)
    except ValueError as error:
        if "target modules" not in str(error).lower():
            raise UsageError(f"peft cannot adapt {model.source.name} so: {str(error).splitlines()[0]}") from error
        names = ", ".join(linear_names(model.module))
        raise UsageError(f"LoRA targets {targets} match nothing in this model", hint=f"there are {names}") from error
    for place, part in module.named_modules():
        for name, p in part._parameters.items():
            if p is not None and p.requires_grad and ".modules_to_save." not in f"{place}.":
                part._parameters[name] = nn.Parameter(p.detach().to(dtype(precision.adapter)))
    return module
