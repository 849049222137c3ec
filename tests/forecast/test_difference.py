import random
import time

from brimful.core.tape import Allocation, Category, Phase, Span, Tape
from brimful.core.units import KiB, MiB
from brimful.forecast.difference import History, align, partings


class Script:
    """A step as it is forecast; `history` is what a GPU does that does just that."""

    def __init__(self) -> None:
        self.allocations: list[Allocation] = []
        self.events: list[int] = []
        self.names: dict[str, int] = {}

    def take(self, name: str, size: int, op: str = "mm", module: str = "") -> None:
        self.allocations.append(Allocation(size, Category.ACTIVATIONS, op, module))
        self.names[name] = len(self.allocations)
        self.events.append(len(self.allocations))

    def free(self, name: str) -> None:
        self.events.append(-self.names[name])

    def tape(self) -> Tape:
        return Tape(self.allocations, self.events, (Span(Phase.STEADY, 0, len(self.events)),))

    def history(self) -> list[tuple[int, str]]:
        return [
            (self.allocations[abs(event) - 1].size * (1 if event > 0 else -1), "model.py:7") for event in self.events
        ]


def layers(count: int = 24) -> Script:
    """Layers whose tensors have different sizes; forward keeps two of three, backward frees them."""
    script = Script()
    for layer in range(count):
        script.take(f"q{layer}", 8 * MiB, "mm", f"block.{layer}.attention")
        script.take(f"t{layer}", 3 * MiB + 512 * layer, "mul", f"block.{layer}.attention")
        script.take(f"m{layer}", 20 * MiB, "silu", f"block.{layer}.mlp")
        script.free(f"t{layer}")
    for layer in reversed(range(count)):
        script.take(f"g{layer}", 12 * MiB, "flash_backward", f"block.{layer}.attention")
        script.free(f"m{layer}")
        script.free(f"q{layer}")
        script.free(f"g{layer}")
    script.take("end", MiB)
    return script


def inserted(history: History, changes: dict[int, list[int]]) -> list[tuple[int, str]]:
    """The history with the events given put before those at the indices given."""
    out: list[tuple[int, str]] = []
    for index, event in enumerate(history):
        out += [(size, "kernel.py:3") for size in changes.get(index, ())]
        out.append(event)
    return out


def test_equal_tapes_do_not_part() -> None:
    script = layers()
    assert partings(script.tape(), script.history()) == ()


def test_the_bytes_that_round_to_the_same_block_are_no_parting() -> None:
    script = layers()
    near = [(size - 100 if size > 0 else size + 100, line) for size, line in script.history()]
    assert partings(script.tape(), near) == ()


def test_small_events_and_the_order_of_neighbouring_frees_are_ignored() -> None:
    script = layers()
    history = inserted(script.history(), {i: [32 * KiB, -32 * KiB] for i in range(0, 90, 7)})
    frees = [i for i in range(len(history) - 1) if history[i][0] < 0 and history[i + 1][0] < 0]
    for i in frees[::3]:
        history[i], history[i + 1] = history[i + 1], history[i]
    assert partings(script.tape(), history) == ()


def test_what_the_process_lets_go_at_its_end_is_no_parting() -> None:
    script = layers()
    assert partings(script.tape(), [*script.history(), (-MiB, ""), (-8 * MiB, "")]) == ()


def test_a_kernels_own_memory_is_found_at_its_op_and_told_once_for_all_layers() -> None:
    script = layers()
    # the kernel of each layer's backward takes 5 MiB while it runs
    places = [i for i, e in enumerate(script.events) if e > 0 and script.allocations[e - 1].op == "flash_backward"]
    history = inserted(script.history(), {i + 1: [5 * MiB, -5 * MiB] for i in places})
    (found,) = partings(script.tape(), history)
    assert (found.after.op, found.after.module) == ("flash_backward", "block.*.attention")
    assert (found.bytes, found.times) == (5 * MiB, 24)
    assert found.measured == (5 * MiB,)
    assert found.after.phase is Phase.STEADY
    text = "at flash_backward in block.*.attention the GPU also takes 5.00 MiB (24 times), at kernel.py:3"
    assert str(found).startswith(text)


def test_what_is_open_at_the_peak_adds_up_to_the_difference_there() -> None:
    script = layers()
    history = inserted(script.history(), {2: [7 * MiB], 10: [2 * MiB], 150: [-7 * MiB]})
    found = partings(script.tape(), history)
    assert sum(parting.at_peak for parting in found) == 9 * MiB
    assert found[0].bytes == 7 * MiB
    assert "7.00 MiB more at the peak" in str(found[0])


def test_where_the_forecasts_peak_is_the_higher_one_the_difference_there_is_told() -> None:
    script = layers()
    script.take("phantom", 500 * MiB, "embedding_backward", "embed")
    script.free("phantom")
    script.take("last", MiB)
    history = [event for event in script.history() if abs(event[0]) != 500 * MiB]
    (found,) = partings(script.tape(), history)
    assert found.at_peak == 0  # the peak is in the layers, which agree
    script.allocations[script.names["phantom"] - 1] = Allocation(900 * MiB, Category.GRADIENTS, "embedding_backward")
    (found,) = partings(script.tape(), history)
    assert found.at_peak == -900 * MiB


def test_another_size_at_one_place_is_one_parting() -> None:
    script = layers()
    history = [(s // 2 if abs(s) == 12 * MiB else s, line) for s, line in script.history()]
    (found,) = partings(script.tape(), history)
    assert found.times == 24
    assert "takes 6.00 MiB where 12 MiB are forecast" in str(found)


def test_what_the_gpu_does_not_take_is_told_as_such() -> None:
    script = layers()
    history = [event for event in script.history() if abs(event[0]) != 12 * MiB]
    (found,) = partings(script.tape(), history)
    assert (found.bytes, found.times, found.after.op) == (-12 * MiB, 24, "flash_backward")
    assert "does not take 12 MiB" in str(found)


def test_what_the_gpu_keeps_longer_is_told_with_where_it_ends() -> None:
    script = Script()
    script.take("a", 9 * MiB, "mm", "first")
    script.take("b", 5 * MiB, "relu", "first")
    script.free("a")
    for index in range(8):
        script.take(f"c{index}", (10 + index) * MiB, "mul", "second")
    script.take("d", 4 * MiB, "sum", "third")
    script.take("e", 4 * MiB, "mm", "third")
    history = [event for event in script.history() if event[0] != -9 * MiB]
    history.insert(-1, (-9 * MiB, ""))
    (found,) = partings(script.tape(), history)
    assert str(found).startswith("at relu in first the GPU keeps 9.00 MiB until sum in third")


def test_the_alignment_leaves_equal_sequences() -> None:
    draw = random.Random(0)
    for _ in range(200):
        ours = [draw.choice((1, 2, 3, 4)) for _ in range(draw.randrange(40))]
        theirs = [size for size in ours if draw.random() > 0.2]
        for _ in range(draw.randrange(10)):
            theirs.insert(draw.randrange(len(theirs) + 1), draw.choice((1, 2, 3, 4)))
        steps = align(ours, theirs)
        left = {i for measured, i, _ in steps if not measured}
        right = {j for measured, _, j in steps if measured}
        assert [s for i, s in enumerate(ours) if i not in left] == [s for j, s in enumerate(theirs) if j not in right]


def test_a_long_stretch_that_only_one_side_has_does_not_confuse_what_follows() -> None:
    draw = random.Random(1)
    ours = [draw.choice((1, -1)) * draw.randrange(1, 200) for _ in range(5000)]
    theirs = ours[:2000] + [draw.randrange(300, 400) for _ in range(700)] + ours[2000:]
    assert len(align(ours, theirs)) == 700


def test_two_hundred_thousand_events_take_seconds() -> None:
    draw = random.Random(2)
    layer = [draw.choice((1, -1)) * draw.randrange(1, 50) for _ in range(200)]
    ours = layer * 1000
    theirs = [size for size in ours if draw.random() > 0.001]
    started = time.perf_counter()
    steps = align(ours, theirs)
    assert time.perf_counter() - started < 10
    assert len(steps) <= 1.2 * (len(ours) - len(theirs)) + 10
