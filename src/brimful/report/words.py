"""How jobs, ops, modules and culprits are called, the same in the terminal and on the page."""

from collections.abc import Mapping, Sequence

from brimful.core.forecast import Forecast
from brimful.core.units import format_bytes

LAST_STRAW = 0.02
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}


def job_words(job: Mapping[str, object]) -> str:
    """The run file in one line: what decides memory, and what was pinned."""
    words = [str(job[key]) for key in ("model", "method", "batch") if job.get(key)]
    data, lora, pin = _inside(job, "data"), _inside(job, "lora"), _inside(job, "pin")
    if "lora" in str(job.get("method")) and lora.get("rank"):
        variant = lora.get("variant", "lora")
        with_variant = "" if variant == "lora" else f" ({variant})"
        words[1:2] = [f"{job['method']}{with_variant} rank {lora['rank']}"]
    if data.get("max_length"):
        target = f" → {data['max_target_length']}" if data.get("max_target_length") else ""
        words.append(f"≤ {data['max_length']}{target} tokens")
    precision = job.get("precision")
    words.append("/".join(map(str, precision.values())) if isinstance(precision, Mapping) else str(precision or ""))
    words.append(str(_inside(job, "optimizer").get("name") or ""))
    for key, value in pin.items():
        if value is not None and (key, value) != ("recompute", "none"):
            listed = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
            words.append(f"{key.replace('_', ' ')} {listed}")
    return " · ".join(filter(None, words))


def _inside(job: Mapping[str, object], key: str) -> Mapping[str, object]:
    inner = job.get(key)
    return inner if isinstance(inner, Mapping) else {}


def op_word(name: str) -> str:
    """`mm`, `mul`, `sum`: the overload says which arguments were given, which nobody asks."""
    return name.partition(".")[0]


def module_word(name: str) -> str:
    """What peft wraps a model in, and its adapter's name, say nothing about where in the model one is."""
    return name.removeprefix("base_model.model.").removesuffix(".default")


def dtype_word(name: str) -> str:
    """The run file's word for a type."""
    return _DTYPES.get(name, name)


def last_straw(forecast: Forecast) -> str:
    """Said of a culprit that only happened to be the last of many: what was there before it is to blame."""
    size, before = forecast.culprit.size, forecast.allocated - forecast.culprit.size
    if size >= LAST_STRAW * forecast.allocated:
        return ""
    inside = {name: size for name, size in forecast.items.items() if name not in ("context", "fragmentation")}
    largest = max(inside, key=inside.__getitem__, default="")
    return f"only the last straw: {format_bytes(before)} were there before it" + (
        f", {largest} above all" if largest else ""
    )


def shape_words(shape: Sequence[int], times: str = "×") -> str:
    """`4096×32768`."""
    return times.join(map(str, shape))
