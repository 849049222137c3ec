"""The forecast: trace, replay, itemise, judge."""

import threading
import time
from collections import defaultdict
from collections.abc import Iterator

from brimful import __version__
from brimful.catalog.gpus import Gpu, get_gpu
from brimful.core.errors import UsageError
from brimful.core.forecast import Card, Culprit, Forecast, LiveTensor
from brimful.core.runfile import RunFile, to_mapping
from brimful.core.tape import Category, Phase, Tape
from brimful.core.units import format_bytes
from brimful.forecast.allocator import Settings, replay, smallest_capacity
from brimful.forecast.budget import card_of, judge

_ONE_AT_A_TIME = threading.Lock()  # a trace overrides what belongs to the whole process; in parallel, use processes
REFERENCE = "h200"  # the card that the rules were measured on stands in where none is named


def forecast_run(run: RunFile) -> tuple[Forecast, Tape]:
    """Forecast one run; the card comes from the run file, and without one there is no verdict."""
    started = time.perf_counter()
    if run.hardware.count > 1:
        raise UsageError(
            f"hardware.count is {run.hardware.count}: a forecast is for one GPU so far", hint="set it to 1"
        )
    gpu = get_gpu(run.hardware.gpu) if run.hardware.gpu else None
    settings = Settings.parse(run.pin.allocator or "")
    from brimful.forecast.reductions import Multiprocessors
    from brimful.forecast.trace import trace  # torch takes seconds to import: names are checked first

    card_like = gpu or get_gpu(REFERENCE)
    multiprocessors = Multiprocessors(card_like.multiprocessors, card_like.threads_per_multiprocessor)
    with _ONE_AT_A_TIME:
        traced = trace(run, card_like.capability, multiprocessors)
    tape = traced.tape
    result = replay(tape, settings)
    smallest = smallest_capacity(tape, settings)
    card = card_of(gpu, run.hardware.headroom) if gpu else None
    context = card_like.context
    live = _live_at(tape, result.peak_allocated_event)
    items = _items(tape, live)
    items["fragmentation"] = result.peak_reserved - sum(items.values())
    items["context"] = context
    return Forecast(
        job=to_mapping(run),
        allocated=result.peak_allocated,
        reserved=result.peak_reserved,
        device_used=result.peak_reserved + context,
        smallest_capacity=smallest,
        verdict=judge(smallest, card.line) if card else None,
        card=card,
        items=items,
        phases=result.phases,
        culprit=_culprit(tape, result.peak_allocated_event),
        largest=_largest(tape, live),
        trainable_parameters=traced.trainable_parameters,
        total_parameters=traced.total_parameters,
        host_ram=traced.loading.peak,
        notes=(*_notes(gpu), *_warnings(run, gpu, traced.unquantised), *_cache(result.peak_reserved, smallest, card)),
        versions=_versions(),
        trace_s=time.perf_counter() - started,
    ), tape


def _notes(gpu: Gpu | None) -> tuple[str, ...]:
    if gpu is None or gpu.measured:
        return ()
    if gpu.capability == get_gpu(REFERENCE).capability:
        return (f"{gpu.title}: its generation was measured, on an H200; its own memory and context were not",)
    return (f"{gpu.title}: this generation was never measured; its kernels are taken to behave as a Hopper's",)


def _warnings(run: RunFile, gpu: Gpu | None, unquantised: int) -> Iterator[str]:
    """What the run file may not have meant."""
    if gpu is not None and gpu.capability < (8, 0) and run.precision.compute == "bf16":
        yield f"{gpu.title} has no bf16 of its own: attention runs unfused and slowly; fp16-scaled suits it better"
    if unquantised:
        yield f"{unquantised / 1e9:.1f} B weights of experts stay in {run.precision.weights}: nf4 is for linear layers"


def _cache(reserved: int, smallest: int, card: Card | None) -> Iterator[str]:
    if card is not None and smallest <= card.line < reserved:
        size = format_bytes(reserved - smallest)
        yield f"PyTorch would cache {size} more than it needs with these settings; on this card it gives that back"


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    return {"brimful": __version__} | {name: version(name) for name in ("torch", "transformers", "peft")}


def _live_at(tape: Tape, event: int) -> set[int]:
    """The allocations that are alive just after an event."""
    live: set[int] = set()
    for number in tape.events[: event + 1]:
        if number > 0:
            live.add(number - 1)
        else:
            live.discard(-number - 1)
    return live


def _items(tape: Tape, live: set[int]) -> dict[str, int]:
    items = {str(category): 0 for category in Category}
    for index in live:
        allocation = tape.allocations[index]
        items[str(allocation.category)] += allocation.size
    return items


def _culprit(tape: Tape, event: int) -> Culprit:
    """The op whose call made the peak, with all that the call took: an op on a list takes many tensors in a row."""
    allocation = tape.allocations[tape.events[event] - 1]
    size, first = 0, event
    while first >= 0 and tape.events[first] > 0:
        made = tape.allocations[tape.events[first] - 1]
        if (made.op, made.module) != (allocation.op, allocation.module):
            break
        size, first = size + made.size, first - 1
    phase = next((span.phase for span in tape.spans if span.start <= event < span.end), Phase.LOAD)
    return Culprit(allocation.op, allocation.module, allocation.line, phase, size)


def _largest(tape: Tape, live: set[int], most: int = 10) -> tuple[LiveTensor, ...]:
    """The ten largest tensors; those alike in shape and origin but for the layer's number count as one entry."""
    groups: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for index in live:
        a = tape.allocations[index]
        module = ".".join("*" if part.isdigit() else part for part in a.module.split("."))
        groups[(a.category, a.op, module, a.shape, a.dtype, a.size)].append(index)
    biggest = sorted(groups.items(), key=lambda group: -group[0][5])[:most]
    return tuple(
        LiveTensor(size, len(members), category, op, module, shape, dtype)
        for (category, op, module, shape, dtype, size), members in biggest
    )
