"""What our own loop measures inside a step: how large the gradient of this rank is before others are added to it, and where the time goes.

Norms are taken of the flat buffers that are about to be reduced, one small kernel each, and read by nobody before the exchange. They are of
the last computation of a step: one that is repeated starts anew.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

Moment = float | torch.cuda.Event


class Gauges:
    """A GaugePort. Of a pipeline, whose stages compute forwards and backwards in turn, no times are known.

    Where gradients are reduced in every micro-step (`parallel.zero_stage` 2 and 3) the squared norm is the sum of those of the
    micro-steps: as large on every rank, but not the norm of their sum. Stages and tensor-parallel ranks have it of their own parameters.
    """

    def __init__(self, *, device: torch.device) -> None:
        self._device = device
        self._squares: list[torch.Tensor] = []
        self._spans: list[tuple[str, Moment, Moment]] = []
        self._waited_s = self._gathered_s = self._waited_before_s = 0.0
        self._knows_reductions = device.type != "cuda"
        self._last_launch_s: float | None = None

    def begin(self) -> None:
        self._spans.clear()
        self._waited_s = self._gathered_s = 0.0
        self.begin_pass()

    def squared_local_norm(self) -> torch.Tensor | None:
        if not self._squares:
            return None
        squares = [square.to(torch.float64) for square in self._squares]
        if self._device.type == "cuda":  # they were made on the stream of the reductions, which the backward has waited for
            for square in self._squares:
                square.record_stream(torch.cuda.current_stream(self._device))
        return torch.stack(squares).sum()

    def waited_s(self) -> float:
        """Of the host: what streams of an accelerator wait for is not in it."""
        return self._waited_s + self._gathered_s - self._waited_before_s

    def times_s(self) -> Mapping[str, float]:
        """Seconds; on a GPU between events. A backward whose reductions are not told apart includes them."""
        spent: dict[str, float] = {}
        for name, began, ended in self._spans:
            spent[name] = spent.get(name, 0.0) + _seconds(began, ended)
        if spent and self._knows_reductions:
            spent["reduce_s"] = self._waited_s
            spent["backward_s"] = max(0.0, spent.get("backward_s", 0.0) - self._waited_s)
        return spent

    # --- told by runners and reductions ---

    def reductions_are_inside(self) -> None:
        """Local. Nothing tells how long this loop waits for its reductions."""
        self._knows_reductions = False

    def begin_pass(self) -> None:
        """Local. The gradient of this step is computed from here on."""
        self._squares.clear()
        self._waited_before_s = self._waited_s + self._gathered_s

    def note_contribution(self, flat: torch.Tensor) -> None:
        """Local. `flat` is about to be reduced. What is not finite makes the norm so; float16 alone would overflow at 65,504."""
        dtype = torch.promote_types(flat.dtype, torch.float32)
        self._squares.append(torch.linalg.vector_norm(flat, dtype=dtype).to(torch.float64).square())

    def note_launch(self) -> None:
        """Local. A reduction that goes on beside the backward was begun, maybe the last: what the backward lasts on is waiting for it."""
        self._last_launch_s = time.monotonic()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Local. Around what only waits for a reduction."""
        began_s = time.monotonic()
        try:
            yield
        finally:
            self._waited_s += time.monotonic() - began_s

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """Local. Around what gathers parameters, and so waits for the last rank that comes."""
        began_s = time.monotonic()
        try:
            yield
        finally:
            self._gathered_s += time.monotonic() - began_s

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Local."""
        began = self._now()
        yield
        self._spans.append(("forward_s", began, self._now()))

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Local."""
        self._last_launch_s = None
        began = self._now()
        yield
        self._spans.append(("backward_s", began, self._now()))
        if self._last_launch_s is not None:
            self._waited_s += time.monotonic() - self._last_launch_s

    def _now(self) -> Moment:
        if self._device.type != "cuda":
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        event.record()
        return event


def _seconds(began: Moment, ended: Moment) -> float:
    if isinstance(began, float) and isinstance(ended, float):
        return ended - began
    assert isinstance(began, torch.cuda.Event)
    assert isinstance(ended, torch.cuda.Event)
    ended.synchronize()  # long over: the exchange has read the device since
    return float(began.elapsed_time(ended)) / 1000
