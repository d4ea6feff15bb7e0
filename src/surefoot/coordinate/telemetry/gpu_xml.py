"""Accelerators out of `nvidia-smi -q -x`, whatever the generation of the driver. Pure.

Names move between generations (throttle reasons became event reasons, one ECC count became two), so everything is looked up by name and
what is not there is unknown. Of an answer that was cut off the accelerators that are whole are kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast
from xml.etree import ElementTree

from surefoot.coordinate.telemetry.records import GpuSample
from surefoot.coordinate.telemetry.words import count, num_bytes, number, total, yes_or_no

MAX_CHARS = 32 << 20
"""A node of 16 accelerators with all their supported clocks is below 1 MiB."""
# No reason to worry: nobody wants it faster, or somebody set its clocks.
_HARMLESS = {"gpu_idle", "applications_clocks_setting", "display_clocks_setting", "none"}
_PREFIXES = ("clocks_event_reason_", "clocks_throttle_reason_")


def parse_nvidia_smi(text: str | bytes) -> tuple[GpuSample, ...]:
    """One sample per accelerator that `text` describes to its end; none for what is no such answer."""
    words = text.decode(errors="replace") if isinstance(text, bytes) else text
    return tuple(_gpu(element) for element in _whole_gpus(words[:MAX_CHARS]))


def _whole_gpus(text: str) -> Iterator[ElementTree.Element]:
    parser: ElementTree.XMLPullParser[Any] = ElementTree.XMLPullParser(("end",))
    gpus: list[ElementTree.Element] = []
    try:
        # Whoever reads bytes as text has decoded them: what the head says about an encoding holds no more.
        parser.feed(text.partition("?>")[2].lstrip() if text.lstrip().startswith("<?xml") else text)
        parser.close()
    except (ElementTree.ParseError, ValueError):
        pass  # cut off or broken: what ended before that was said
    try:
        ended = cast("Iterator[tuple[str, ElementTree.Element]]", parser.read_events())
        gpus += [element for _, element in ended if element.tag == "gpu" and element.get("id")]
    except ElementTree.ParseError:
        pass  # the parser says again what `feed` said
    yield from gpus


def _gpu(gpu: ElementTree.Element) -> GpuSample:
    power = _first(gpu, "gpu_power_readings", "power_readings")
    link = "pci/pci_gpu_link_info"
    return GpuSample(
        id=gpu.get("id", "").lower(),
        name=(gpu.findtext("product_name") or "").strip(),
        uuid=(gpu.findtext("uuid") or "").strip(),
        utilization_percent=number(gpu.findtext("utilization/gpu_util")),
        memory_used_bytes=num_bytes(gpu.findtext("fb_memory_usage/used")),
        memory_total_bytes=num_bytes(gpu.findtext("fb_memory_usage/total")),
        sm_clock_mhz=number(gpu.findtext("clocks/sm_clock")),
        max_sm_clock_mhz=number(gpu.findtext("max_clocks/sm_clock")),
        memory_clock_mhz=number(gpu.findtext("clocks/mem_clock")),
        power_w=_known(power, "instant_power_draw", "power_draw", "average_power_draw"),
        power_limit_w=_known(power, "current_power_limit", "enforced_power_limit", "power_limit"),
        temperature_c=number(gpu.findtext("temperature/gpu_temp")),
        memory_temperature_c=number(gpu.findtext("temperature/memory_temp")),
        slow_temperature_c=number(gpu.findtext("temperature/gpu_temp_slow_threshold")),
        slowed_by=_slowed_by(gpu),
        ecc_is_on=yes_or_no(gpu.findtext("ecc_mode/current_ecc")),
        ecc_volatile_corrected=_ecc(gpu, "volatile", "_correctable"),
        ecc_volatile_uncorrected=_ecc(gpu, "volatile", "_uncorrectable"),
        ecc_aggregate_corrected=_ecc(gpu, "aggregate", "_correctable"),
        ecc_aggregate_uncorrected=_ecc(gpu, "aggregate", "_uncorrectable"),
        remapped_rows_corrected=count(gpu.findtext("remapped_rows/remapped_row_corr")),
        remapped_rows_uncorrected=count(gpu.findtext("remapped_rows/remapped_row_unc")),
        remap_pending=yes_or_no(gpu.findtext("remapped_rows/remapped_row_pending")),
        remap_failed=yes_or_no(gpu.findtext("remapped_rows/remapped_row_failure")),
        pcie_replays=count(gpu.findtext("pci/replay_counter")),
        pcie_generation=count(gpu.findtext(f"{link}/pcie_gen/current_link_gen")),
        pcie_width=count(gpu.findtext(f"{link}/link_widths/current_link_width")),
        max_pcie_width=count(gpu.findtext(f"{link}/link_widths/max_link_width")),
        recovery_action=_said(gpu.findtext("gpu_recovery_action")),
    )


def _first(gpu: ElementTree.Element, *names: str) -> ElementTree.Element | None:
    return next((found for name in names if (found := gpu.find(name)) is not None), None)


def _known(parent: ElementTree.Element | None, *names: str) -> float | None:
    """The first of `names` that holds a number."""
    if parent is None:
        return None
    return next((value for name in names if (value := number(parent.findtext(name))) is not None), None)


def _slowed_by(gpu: ElementTree.Element) -> tuple[str, ...] | None:
    reasons = _first(gpu, "clocks_event_reasons", "clocks_throttle_reasons")
    said = {child.tag: answer for child in (reasons if reasons is not None else ()) if (answer := yes_or_no(child.text)) is not None}
    if not said:
        return None
    active = [_without_prefix(tag) for tag, is_active in said.items() if is_active]
    return tuple(sorted(name for name in active if name not in _HARMLESS))


def _without_prefix(tag: str) -> str:
    return next((tag.removeprefix(prefix) for prefix in _PREFIXES if tag.startswith(prefix)), tag)


def _ecc(gpu: ElementTree.Element, kind: str, name: str) -> int | None:
    """All of one kind, of the chip's own memory and of the large one, as one count or as several by cause."""
    counts = gpu.find(f"ecc_errors/{kind}")
    return total(count(child.text) for child in counts if name in child.tag) if counts is not None else None


def _said(text: str | None) -> str | None:
    words = (text or "").strip()
    return None if words in ("", "N/A") else words
