"""The model of a step: built without memory on the meta device, then given its tensors on the target."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from brimful.core.errors import ModelError
from brimful.core.precision import Precision
from brimful.step import attention, context
from brimful.step.batch import MicroBatch
from brimful.step.dropout import module_id
from brimful.step.placement import untied_names
from brimful.step.shards import holds_weights, read_folder
from brimful.step.source import ModelSource, users_line
from brimful.step.target import dtype

ENCODER_DECODERS = ("t5", "mt5")  # whose sides and biases are told apart below


@dataclass(frozen=True)
class TrainModel:
    """A model as a step sees it: something that makes hidden states, layers to recompute, and a head for the loss."""

    module: nn.Module
    source: ModelSource
    layers: tuple[nn.Module, ...]
    softcap: float | None = None
    scale: float = 1.0

    @property
    def base(self) -> Any:
        """The model below its adapters."""
        return self.module.get_base_model() if hasattr(self.module, "get_base_model") else self.module

    @property
    def head(self) -> nn.Module | None:
        """The projection to the vocabulary; none when a custom model returns logits itself."""
        if self.source.custom is not None:
            return getattr(self.base, "head", None)
        head = self.base.get_output_embeddings()
        saved = getattr(head, "modules_to_save", None)  # peft keeps a trained copy beside the original
        return saved["default"] if saved is not None else head

    def trainable(self) -> dict[str, nn.Parameter]:
        """The parameters that learn, by name."""
        return {name: p for name, p in self.module.named_parameters() if p.requires_grad}

    def hidden(self, batch: MicroBatch) -> torch.Tensor:
        """Hidden states of every position, one after the other: (positions, width)."""
        if self.source.custom is not None:
            states = self._custom(batch)
        elif self.source.encoder_decoder:
            states = self._encode_decode(batch)
        else:
            inner = getattr(self.base, self.base.base_model_prefix)
            states = inner(input_ids=batch.input_ids, position_ids=batch.layout.positions, use_cache=False)[0]
        if self.source.custom is None and not context.current().attended:
            raise ModelError(
                f"{self.source.name} ({self.source.config.model_type}) does its attention by itself, out of our reach",
                hint="rows could not be kept apart in it; use a model whose attention can be chosen",
            )
        return states.reshape(-1, states.shape[-1])

    def _encode_decode(self, batch: MicroBatch) -> torch.Tensor:
        base = self.base
        encoded = base.get_encoder()(input_ids=batch.input_ids)[0]
        decoder = base.get_decoder()
        return decoder(input_ids=batch.decoder_input_ids, encoder_hidden_states=encoded, use_cache=False)[0]

    def _custom(self, batch: MicroBatch) -> torch.Tensor:
        layout = batch.layout
        positions = layout.positions
        if positions is None:
            positions = torch.arange(layout.width, device=batch.input_ids.device).unsqueeze(0)
        return self.base(batch.input_ids, positions, layout.row_starts)


def build(source: ModelSource, precision: Precision) -> TrainModel:
    """Build the model on the meta device: shapes and structure, no memory."""
    weights = dtype(precision.weights)
    if source.custom is not None:
        return _build_custom(source, weights)
    if source.encoder_decoder and source.config.model_type not in ENCODER_DECODERS:
        raise ModelError(
            f"{source.name}: encoder-decoders of type {source.config.model_type} are not known yet",
            hint=f"known are {', '.join(ENCODER_DECODERS)}",
        )
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    family = AutoModelForSeq2SeqLM if source.encoder_decoder else AutoModelForCausalLM
    # grouped_mm has no fp64; batched_mm computes the same with more memory, which only proofs on small models use
    experts = "batched_mm" if weights == torch.float64 else "grouped_mm"
    extra = {"experts_implementation": experts} if _has_experts(source.config) else {}
    try:
        with torch.device("meta"):
            module = family.from_config(
                source.config,
                dtype=weights,
                attn_implementation=attention.NAME,
                trust_remote_code=source.trust_remote_code,
                **extra,
            )
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{source.name} cannot be built: {str(error).splitlines()[0]}") from error
    # transformers ties them while building, whatever the published weights hold
    for name in source.untied or _stored_apart(source, module):
        owner, _, last = name.rpartition(".")
        part = module.get_submodule(owner)
        setattr(part, last, nn.Parameter(getattr(part, last).detach().clone()))
    config = source.config
    scale = 1.0 / config.logits_scaling if getattr(config, "logits_scaling", None) else 1.0
    scale = getattr(config, "logit_scale", None) or getattr(config, "lm_head_multiplier", None) or scale
    if getattr(config, "scale_decoder_outputs", False):
        scale *= config.d_model**-0.5
    _mark_attention(module, source.encoder_decoder)
    return TrainModel(module, source, _layers(module), getattr(config, "final_logit_softcapping", None), scale)


def _stored_apart(source: ModelSource, module: nn.Module) -> tuple[str, ...]:
    """Names of tied weights for which the source's files hold values of their own."""
    return untied_names(read_folder(source.folder), module) if holds_weights(source.folder) else ()


def _has_experts(config: Any) -> bool:
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return any(getattr(config, name, None) for name in names)


def _build_custom(source: ModelSource, weights: torch.dtype) -> TrainModel:
    assert source.custom is not None
    previous = torch.get_default_dtype()
    torch.set_default_dtype(weights)
    try:
        with torch.device("meta"):
            module = source.custom(**source.options)
    except Exception as error:  # the user's code may raise anything
        what = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        raise ModelError(
            f"{source.name} failed to build{users_line(error)}: {what}",
            hint="it is called as Class(**model_config) on the meta device, where tensors have shapes but no values",
        ) from error
    finally:
        torch.set_default_dtype(previous)
    if not isinstance(module, nn.Module):
        raise ModelError(
            f"{source.name} makes a {type(module).__name__}, not a torch.nn.Module",
            hint="a custom model is a subclass of torch.nn.Module",
        )
    layers = getattr(module, "layers", None)
    if not isinstance(layers, Iterable):
        raise ModelError(f"{source.name} has no attribute `layers`", hint="a custom model lists its layers there")
    for name, part in module.named_modules():
        part.attention_role = "decoder"
        part.dropout_id = module_id(name)
    return TrainModel(module, source, tuple(layers))


def _layers(module: nn.Module) -> tuple[nn.Module, ...]:
    """The repeated layers, in order: the members of every longest list of modules (an encoder-decoder has two).

    A list inside a layer (T5 keeps a layer's parts in one) is no list of layers, however long it is.
    """
    found = [(name, m) for name, m in module.named_modules() if isinstance(m, nn.ModuleList) and len(m)]
    lists = [m for name, m in found if not any(name.startswith(f"{outer}.") for outer, _ in found)]
    if not lists:
        return ()
    widest = max(len(m) for m in lists)
    outer = [m for m in lists if len(m) == widest or type(m[0]).__name__.endswith(("Block", "DecoderLayer"))]
    return tuple(layer for m in outer for layer in m)


def _mark_attention(module: nn.Module, encoder_decoder: bool) -> None:
    """Tell every part which side of the model it is on: attention and dropout need to know whose positions they see."""
    for name, part in module.named_modules():
        role = "decoder"
        if encoder_decoder:
            role = "cross" if "EncDecAttention" in name else "encoder" if name.startswith("encoder") else "decoder"
        part.attention_role = role
        part.dropout_id = module_id(name)
        if hasattr(part, "compute_bias"):
            part.compute_bias = _shared(part.compute_bias, role)


def _shared(function: Callable[..., torch.Tensor], role: str) -> Callable[..., torch.Tensor]:
    return lambda *args, **kwargs: attention.shared_bias(role, function(*args, **kwargs))


def materialise(model: TrainModel, device: torch.device) -> None:
    """Give every parameter and buffer its memory on the device, in the order in which the model names them."""
    made: dict[nn.Parameter, nn.Parameter] = {}  # a tied weight is met twice and made once
    for part in model.module.modules():
        for name, old in part._parameters.items():
            if old is None or old.device.type != "meta":
                continue
            if old not in made:
                new = torch.empty(old.shape, dtype=old.dtype, device=device)
                made[old] = nn.Parameter(new, requires_grad=old.requires_grad)
            part._parameters[name] = made[old]
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.device.type == "meta":
                part._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)
