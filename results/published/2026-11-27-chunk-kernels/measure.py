"""Time the chunk kernels of this checkout on an H100 or H200, and count where a position spends its cycles.

python measure.py times 6x384x64 4x256x64         # layers x width x sequences
python measure.py times 6x384x64 --groups 16 32   # positions of a group
python measure.py times 6x384x64 --loop           # the loop over positions
python measure.py cycles 6x384x64
python measure.py kernels 6x384x64
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[3]))

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from mixers.ops.weights import LayerWeights
from mixers.rt.wavefront import chunk, schedule
from mixers.rt.wavefront.backward import Backward
from mixers.rt.wavefront.forward import Forward
from mixers.rt.wavefront.passes import layers_method
from mixers.rt.wavefront.setup import WavefrontSetting

LENGTH, HEAD_DIM, DEVICE = 512, 64, torch.device("cuda", 0)
STEPS = {"forward": ("attend", "out", "mlp", "z", "kv"), "backward": ("pair", "kv", "mlp", "u", "out")}
STAMPS = 4 * len(STEPS["forward"])
"""Clock readings of a position: before and after both halves of each barrier."""


class Case:
    """A stack of layers with random weights, inputs and gradients in bfloat16.

    Args:
        name: layers x width x sequences.
    """

    def __init__(self, name: str) -> None:
        self.L, D, B = map(int, name.split("x"))
        self.D, self.B = D, B
        torch.manual_seed(self.L + D + B)

        def matrix(rows: int, columns: int) -> Tensor:
            return torch.randn(self.L, rows, columns, device=DEVICE) * columns**-0.5

        def gain() -> Tensor:
            return 1 + 0.2 * torch.randn(self.L, D, device=DEVICE)

        self.weights = LayerWeights(
            norm_D=gain(),
            wq_DD=matrix(D, D),
            wk_DD=matrix(D, D),
            wv_DD=matrix(D, D),
            q_norm_D=gain(),
            k_norm_D=gain(),
            wo_DD=matrix(D, D),
            mlp_norm_D=gain(),
            up_FD=matrix(4 * D, D),
            down_DF=matrix(D, 4 * D),
        )
        self.x, self.dz = (torch.randn(1, B, LENGTH, D, device=DEVICE) for _ in range(2))
        H = D // HEAD_DIM
        slopes = 2.0 ** -torch.linspace(8 / H, 8, H, device=DEVICE)
        self.setting = WavefrontSetting(
            slopes_H=slopes, scale=(2 * self.L) ** -0.5, persistent_norm=True, dtype=torch.bfloat16
        )

    def forward(self) -> Any:
        """Outputs and what the backward needs."""
        return self.method.forward(self.x, *self.each)

    def both(self) -> None:
        """Both passes."""
        outputs, saved = self.forward()
        self.method.backward((self.dz,), (self.x, *self.each), outputs, saved)

    @property
    def method(self) -> Any:
        return layers_method(self.L, self.setting)

    @property
    def each(self) -> list[Tensor]:
        """Each field of the weights for all layers in order."""
        return [y[i : i + 1] for y in self.weights for i in range(self.L) if y is not None]


def times(case: Case, name: str, groups: list[int], loop: bool) -> None:
    """Print medians of five replays of a CUDA graph."""
    own = schedule.group_size(case.L, case.B)
    for group in groups or [own]:
        with (
            patch.object(schedule, "group_size", lambda *_, size=group: size),
            patch.object(chunk, "supported", (lambda _: False) if loop else chunk.supported),
        ):
            figures = [milliseconds(run) for run in (case.forward, case.both)]
        (forward, _), (both, _) = figures
        spread = max(of_all for _, of_all in figures)
        form = "loop" if loop else "chunk"
        print(
            f"{name} group {group} {form}: forward {forward:.2f} both {both:.2f} ms (spread {spread:.1%})", flush=True
        )


def milliseconds(run: Callable[[], Any]) -> tuple[float, float]:
    """Median and relative range."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()

    found = []
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end))
    return median(found), (max(found) - min(found)) / median(found)


def with_stamps(source: str) -> str:
    """A kernel that also writes clock readings, behind what its programs exchange."""
    head, start, body = source.partition('extern "C" __global__')
    for call in ("arrive();", "wait();"):
        body = body.replace(call, f"STAMP; {call} STAMP;")
    for loop in ("for (int t = 0; t < CHUNK; t++) {", "for (int t = CHUNK - 1; t >= 0; t--) {"):
        body = body.replace(loop, f"i64* stamp = stamps;\n{loop}")
    before, room, after = body.partition("char* const room =")
    line, end, after = after.partition(";")
    stamps = f"i64* stamps = (i64*)(room + ROOM_BYTES) + c * {STAMPS * chunk.CHUNK};"
    macro = "#define STAMP if (threadIdx.x == 0) *stamp++ = clock64()\n"
    return f"{head}{macro}{start}{before}{room}{line}{end}\n{stamps}{after}"


def cycles(case: Case, name: str) -> None:
    """Print the cycles of each step, of the last cluster when all layers are at work."""
    source, room_bytes, constants_of = chunk.source, chunk.room_bytes, chunk.constants_of
    size = 8 * STAMPS * chunk.CHUNK  # of a program

    def constants(D: int, K: int, row_tiles: int, *norms: bool) -> dict[str, float]:
        return {**constants_of(D, K, row_tiles, *norms), "ROOM_BYTES": room_bytes(D, row_tiles)}

    with (
        patch.object(chunk, "source", lambda direction: with_stamps(source(direction))),
        patch.object(chunk, "room_bytes", lambda D, row_tiles: room_bytes(D, row_tiles) + chunk.PROGRAMS[D] * size),
        patch.object(chunk, "constants_of", constants),
    ):
        forward = Forward(case.x, case.weights, case.setting)
        _, saved = forward.run()
        backward = Backward(case.dz, case.weights, case.setting, saved)
        backward.run()
        torch.cuda.synchronize()

    for direction, owner in (("forward", forward), ("backward", backward)):
        made = owner.chunk_kernel
        if made is None:
            print(f"{name} {direction}: loop")
            continue
        C, most = chunk.PROGRAMS[case.D], owner.sizes.schedule.most
        clusters = most * min(-(-case.B // (16 * made.row_tiles)), max(1, made.kernel.fit // most))
        begin = room_bytes(case.D, made.row_tiles)
        read = made.room[clusters - 1, begin : begin + C * size].clone().view(torch.int64).double()
        read = read.view(C, chunk.CHUNK, len(STEPS[direction]), 4)
        ends = torch.cat([torch.zeros_like(read[:, :1, -1, 3]), read[:, :-1, -1, 3]], 1)  # of the position before
        starts = torch.cat([ends[:, :, None], read[:, :, :-1, 3]], 2)
        parts = torch.stack([read[..., 0] - starts, *(read[..., i + 1] - read[..., i] for i in range(3))], -1)[:, 2:15]
        total = float((read[:, -1, -1, 3] - read[:, 1, -1, 3]).mean()) / (chunk.CHUNK - 2)
        print(f"{name} {direction} {16 * made.row_tiles} rows, cycles a position {total:.0f}")
        for i, step in enumerate(STEPS[direction]):
            work, arrive, meanwhile, wait = parts[:, :, i].mean((0, 1)).tolist()
            slowest = float(parts[:, :, i, 0].amax(0).mean())
            print(
                f"  {step:7s} work {work:6.0f} (slowest program {slowest:6.0f}) arrive {arrive:6.0f} "
                f"meanwhile {meanwhile:6.0f} wait {wait:6.0f}"
            )


def kernels(case: Case, name: str) -> None:
    """Print time and calls of the kernels of both passes."""
    case.both()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as measured:
        case.both()
        torch.cuda.synchronize()
    rows = sorted(measured.key_averages(), key=lambda row: -row.self_device_time_total)
    print(f"{name} sum {sum(row.self_device_time_total for row in rows) / 1000:.2f} ms")
    for row in rows[:32]:
        print(f"  {row.self_device_time_total / 1000:8.3f} ms {row.count:5d}  {row.key[:90]}")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("figure", choices=("times", "cycles", "kernels"))
    parser.add_argument("cases", nargs="+")
    parser.add_argument("--groups", nargs="*", type=int, default=[])
    parser.add_argument("--loop", action="store_true")
    options = parser.parse_args()
    print(torch.cuda.get_device_name(DEVICE))
    for name in options.cases:
        case = Case(name)
        if options.figure == "times":
            times(case, name, options.groups, options.loop)
        elif options.figure == "cycles":
            cycles(case, name)
        else:
            kernels(case, name)


if __name__ == "__main__":
    main()
