"""`brimful forecast`: the memory of a training step, judged against a card."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from brimful.core.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from brimful.core.runfile import RunFile


# flag → run file key; the flags below are named after these
_KEYS = {
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


def forecast(
    target: Annotated[
        str,
        typer.Argument(metavar="MODEL|RUN.yaml", help="Hub id, folder, catalogue name, module:Class, or a run file."),
    ],
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
    as_json: Annotated[bool, typer.Option("--json", help="Print the forecast as JSON.")] = False,
    timeline: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="Write memory over the step as a page that opens offline.")
    ] = None,
) -> None:
    """Forecast the GPU memory of a training step, without a GPU.

    Flags mirror the keys of the run file and win over it. Exit code 3: it does not fit the card.
    """
    given = {name: value for name, value in locals().items() if name in _KEYS}
    run = build_run(target, {_KEYS[name]: value for name, value in given.items()}, settings or ())
    _show(run, as_json, timeline)


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


def _show(run: "RunFile", as_json: bool, timeline: Path | None) -> None:
    from rich.console import Console

    side = Console(stderr=True)
    with side.status(f"tracing {run.model} …"):
        # here and not above: these import torch and transformers, which takes seconds
        from brimful.core.forecast import Verdict
        from brimful.forecast import forecast as make_forecast

        result, tape = make_forecast(run)
    if as_json:
        from brimful.report.as_json import to_json

        typer.echo(to_json(result))
    else:
        from brimful.report.terminal import show_forecast

        show_forecast(result, Console())
    if timeline is not None:
        from brimful.report import timeline as page

        page.write(timeline, result, tape)
        side.print(f"wrote {timeline}", highlight=False, soft_wrap=True)
    if result.verdict is Verdict.NO:
        raise typer.Exit(ExitCode.NOTHING_FITS)
