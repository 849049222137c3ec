"""The flags that mirror the run file, written once for every command that takes a run."""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any

import typer

from brimful.core.errors import UsageError

if TYPE_CHECKING:
    from brimful.core.runfile import RunFile

_TARGET = typer.Argument(
    metavar="MODEL|RUN.yaml", help="Hub id, folder, catalogue name, module:Class, or a run file.", show_default=False
)

# flag → run file key; the flags below are named after the former
KEYS = {
    "gpu": "hardware.gpu",
    "headroom": "hardware.headroom",
    "method": "method",
    "batch": "batch",
    "max_length": "data.max_length",
    "max_target_length": "data.max_target_length",
    "precision": "precision",
    "adapter_precision": "precision.adapter",
    "optimizer": "optimizer.name",
    "lora_rank": "lora.rank",
    "lora_targets": "lora.targets",
    "lora_variant": "lora.variant",
    "lora_dropout": "lora.dropout",
    "micro_batch": "pin.micro_batch",
    "layout": "pin.layout",
    "recompute": "pin.recompute",
    "loss": "pin.loss",
    "loss_chunk": "pin.loss_chunk",
    "attention": "pin.attention",
    "optimizer_impl": "pin.optimizer_impl",
    "allocator": "pin.allocator",
    "trust_remote_code": "trust_remote_code",
}


def _flags(
    gpu: Annotated[str | None, typer.Option(help="Card to judge against, such as a10g.")] = None,
    method: Annotated[str | None, typer.Option(help="full, lora, qlora or scratch.")] = None,
    batch: Annotated[
        str | None, typer.Option(help='Effective batch: "16" (sequences) or "16384 tokens". Default: 1 sequence.')
    ] = None,
    micro_batch: Annotated[
        int | None, typer.Option(help="Rows in one forward-backward slice. Default: the whole batch.")
    ] = None,
    max_length: Annotated[int | None, typer.Option(help="Longest row in tokens. Default: 1024.")] = None,
    max_target_length: Annotated[
        int | None, typer.Option(help="Longest target in tokens, for encoder-decoder models.")
    ] = None,
    layout: Annotated[str | None, typer.Option(help="padded or unpadded.")] = None,
    recompute: Annotated[
        str | None, typer.Option(help="Layers recomputed in backward: none, all, half, every-2nd, or 3,7.")
    ] = None,
    loss: Annotated[str | None, typer.Option(help="plain, fused or chunked.")] = None,
    loss_chunk: Annotated[int | None, typer.Option(help="Tokens in one chunk of the chunked loss.")] = None,
    attention: Annotated[str | None, typer.Option(help="Attention implementation.")] = None,
    optimizer: Annotated[
        str | None, typer.Option(help="adamw, adamw-8bit, adamw-paged-8bit, sgd or adafactor.")
    ] = None,
    optimizer_impl: Annotated[str | None, typer.Option(help="foreach or fused.")] = None,
    precision: Annotated[str | None, typer.Option(help="bf16, fp32-autocast, fp16-scaled or fp32.")] = None,
    lora_rank: Annotated[int | None, typer.Option(help="Width of the adapter.")] = None,
    lora_targets: Annotated[str | None, typer.Option(help="q_proj,v_proj … or all-linear.")] = None,
    lora_variant: Annotated[str | None, typer.Option(help="lora, rslora or dora.")] = None,
    lora_dropout: Annotated[float | None, typer.Option(help="Share of the adapter's inputs dropped.")] = None,
    adapter_precision: Annotated[str | None, typer.Option(help="bf16 or fp32.")] = None,
    allocator: Annotated[
        str | None, typer.Option(help="PyTorch's allocator settings, such as expandable_segments:True.")
    ] = None,
    headroom: Annotated[str | None, typer.Option(help="Memory to leave alone on the card, such as 1GiB.")] = None,
    trust_remote_code: Annotated[
        bool | None, typer.Option("--trust-remote-code", help="Let the model's own Python code run here.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any key of the run file; may be repeated.")
    ] = None,
) -> None:
    """Only its signature is used."""


def takes_run(*, optional: bool = False) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A command whose first parameter is a run file: the target and the flags on its command line make one.

    With `optional` the target may be left out, and the command gets None.
    """
    target = inspect.Parameter(
        "target",
        inspect.Parameter.KEYWORD_ONLY,
        annotation=Annotated[str | None if optional else str, _TARGET],
        default=None if optional else inspect.Parameter.empty,
    )

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def run_command(target: str | None, settings: list[str] | None, **given: Any) -> None:
            flags = {KEYS[name]: given.pop(name) for name in KEYS}
            command(None if target is None else build_run(target, flags, settings or ()), **given)

        shared = inspect.signature(_flags).parameters.values()
        own = list(inspect.signature(command).parameters.values())[1:]
        in_order = [target, *(each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in (*shared, *own))]
        run_command.__signature__ = inspect.Signature(in_order)  # type: ignore[attr-defined]
        run_command.__annotations__ = {each.name: each.annotation for each in in_order}
        return run_command

    return decorate


def build_run(target: str, flags: dict[str, object], settings: "list[str] | tuple[()]") -> "RunFile":
    """The run file that a command line means: the file or the bare model, then flags, then `--set`."""
    from brimful.core.runfile import RunFile, load, override

    is_file = target.lower().endswith((".yaml", ".yml"))
    return override(load(target) if is_file else RunFile(model=target), flags | parse_settings(settings))


def parse_settings(settings: "list[str] | tuple[()]") -> dict[str, object]:
    """`optimizer.clip=0.5` as the run file would read it: values are YAML."""
    import yaml

    out: dict[str, object] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or not name.strip():
            raise UsageError(f"--set {setting}: no value is given", "write it as --set optimizer.clip=0.5")
        try:
            out[name.strip()] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise UsageError(f"--set {setting}: the value is not YAML", "put quotes around text") from None
    return out
