"""Accelerators are read by name: what is not said is unknown, whatever the driver's generation and wherever the answer ends."""

from __future__ import annotations

from dataclasses import fields

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.coordinate.telemetry.dcgm import parse_dcgm, parse_metrics
from surefoot.coordinate.telemetry.gpu_xml import parse_nvidia_smi
from surefoot.coordinate.telemetry.nvlink import parse_nvlink_status, with_nvlinks
from surefoot.coordinate.telemetry.records import GpuSample
from surefoot.coordinate.telemetry.words import count, is_blank, num_bytes, number


def gpu_xml(body: str, *, id: str = "00000000:41:00.0") -> str:
    return f'<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "x.dtd">\n<nvidia_smi_log><gpu id="{id}">{body}</gpu></nvidia_smi_log>'


FULL = """
<product_name>Made Up</product_name><uuid>GPU-1</uuid>
<pci><pci_gpu_link_info><pcie_gen><current_link_gen>5</current_link_gen></pcie_gen>
<link_widths><max_link_width>16x</max_link_width><current_link_width>8x</current_link_width></link_widths></pci_gpu_link_info>
<replay_counter>17</replay_counter></pci>
<fb_memory_usage><total>1000 MiB</total><used>250 MiB</used></fb_memory_usage>
<utilization><gpu_util>93 %</gpu_util></utilization>
<ecc_mode><current_ecc>Enabled</current_ecc></ecc_mode>
<ecc_errors><volatile><sram_correctable>1</sram_correctable><sram_uncorrectable_parity>2</sram_uncorrectable_parity>
<sram_uncorrectable_secded>4</sram_uncorrectable_secded><dram_correctable>8</dram_correctable><dram_uncorrectable>N/A</dram_uncorrectable>
</volatile></ecc_errors>
<remapped_rows><remapped_row_corr>0</remapped_row_corr><remapped_row_unc>3</remapped_row_unc>
<remapped_row_pending>Yes</remapped_row_pending><remapped_row_failure>No</remapped_row_failure></remapped_rows>
<temperature><gpu_temp>71 C</gpu_temp></temperature>
<gpu_power_readings><average_power_draw>600.5 W</average_power_draw><instant_power_draw>N/A</instant_power_draw></gpu_power_readings>
<clocks><sm_clock>1980 MHz</sm_clock></clocks>
"""


def test_figures_come_with_their_units_and_counts_are_added_by_kind() -> None:
    (gpu,) = parse_nvidia_smi(gpu_xml(FULL))
    assert (gpu.name, gpu.uuid, gpu.utilization_percent, gpu.temperature_c, gpu.sm_clock_mhz) == ("Made Up", "GPU-1", 93, 71, 1980)
    assert (gpu.memory_used_bytes, gpu.memory_total_bytes) == (250 << 20, 1000 << 20)
    assert (gpu.ecc_volatile_corrected, gpu.ecc_volatile_uncorrected) == (9, 6)
    assert (gpu.ecc_aggregate_corrected, gpu.ecc_aggregate_uncorrected) == (None, None)
    assert (gpu.remapped_rows_uncorrected, gpu.remap_pending, gpu.remap_failed) == (3, True, False)
    assert (gpu.pcie_replays, gpu.pcie_generation, gpu.pcie_width, gpu.max_pcie_width) == (17, 5, 8, 16)
    assert gpu.power_w == 600.5
    assert gpu.slowed_by is None


@pytest.mark.parametrize("word", ["throttle", "event"])
def test_reasons_of_both_generations_are_one_and_idling_is_none(word: str) -> None:
    def reason(name: str, is_active: bool) -> str:
        tag = f"clocks_{word}_reason_{name}"
        return f"<{tag}>{'Active' if is_active else 'Not Active'}</{tag}>"

    body = reason("gpu_idle", True) + reason("hw_thermal_slowdown", True) + reason("sw_power_cap", False)
    (gpu,) = parse_nvidia_smi(gpu_xml(f"<clocks_{word}_reasons>{body}</clocks_{word}_reasons>"))
    assert gpu.slowed_by == ("hw_thermal_slowdown",)


UNSAID = [field.name for field in fields(GpuSample) if field.name not in ("id", "name", "uuid")]


@pytest.mark.parametrize(
    "body", ["", "<ecc_errors/>", "<remapped_rows>N/A</remapped_rows>", "<temperature><gpu_temp>N/A</gpu_temp></temperature>"]
)
def test_what_is_missing_or_not_available_is_unknown(body: str) -> None:
    (gpu,) = parse_nvidia_smi(gpu_xml(body))
    assert {name: getattr(gpu, name) for name in UNSAID} == dict.fromkeys(UNSAID)


@given(cut=st.integers(0, 10_000))
@settings(max_examples=60, deadline=None)
def test_of_an_answer_that_was_cut_off_only_whole_accelerators_are_kept(cut: int) -> None:
    whole = gpu_xml(FULL).replace("</gpu>", f'</gpu><gpu id="2">{FULL}</gpu>')
    complete = parse_nvidia_smi(whole)
    assert len(complete) == 2
    found = parse_nvidia_smi(whole[:cut])
    assert found == complete[: len(found)]


@given(noise=st.binary(max_size=200))
@settings(max_examples=100, deadline=None)
def test_garbage_is_no_accelerator(noise: bytes) -> None:
    assert parse_nvidia_smi(noise) == ()
    assert parse_nvidia_smi(gpu_xml(FULL).encode()[:300] + noise) == ()
    assert parse_dcgm(noise) == ()
    assert parse_nvlink_status(noise) == ()


@pytest.mark.parametrize("text", ["", "N/A", "[Not Supported]", "ERR!", "nan", "1e999", "12 34", "0x10"])
def test_words_are_no_numbers(text: str) -> None:
    assert number(text) is None
    assert count(text) is None
    assert num_bytes(text) is None


def test_counters_are_whole_and_sizes_have_units() -> None:
    assert count("18446744073709551615") == 2**64 - 1
    assert count("-1") is None
    assert count("1.5") is None
    assert num_bytes("3 GiB") == 3 << 30
    assert num_bytes("3 W") is None


DCGM = """# HELP DCGM_FI_DEV_GPU_TEMP t
DCGM_FI_DEV_GPU_TEMP{gpu="1",UUID="GPU-b",pci_bus_id="00000000:0B:00.0",modelName="M"} 44
DCGM_FI_DEV_GPU_TEMP{gpu="10",UUID="GPU-c"} 45
DCGM_FI_DEV_XID_ERRORS{gpu="1",UUID="GPU-b",pci_bus_id="00000000:0B:00.0"} 79
DCGM_FI_DEV_ECC_DBE_VOL_TOTAL{gpu="1",UUID="GPU-b",pci_bus_id="00000000:0B:00.0"} 9223372036854775794
DCGM_FI_DEV_POWER_USAGE{gpu="1",UUID="GPU-b",pci_bus_id="00000000:0B:00.0"} 140737488355328
DCGM_FI_DEV_PCIE_REPLAY_COUNTER{gpu="1",UUID="GPU-b",pci_bus_id="00000000:0B:00.0"} 0
DCGM_FI_DEV_GPU_TEMP{gpu="1",GPU_I_ID="5"} 99
DCGM_FI_DEV_GPU_TEMP{gpu="1" 3
other_metric{gpu="7"} NaN
"""


def test_blanks_of_dcgm_are_unknown_and_a_stated_zero_is_zero() -> None:
    first, second = parse_dcgm(DCGM)
    assert (first.id, first.temperature_c, first.last_xid) == ("00000000:0b:00.0", 44, 79)
    assert (first.ecc_volatile_uncorrected, first.power_w) == (None, None)
    assert first.pcie_replays == 0
    assert (second.id, second.pcie_replays) == ("10", None)
    assert all(metric.name != "other_metric" for metric in parse_metrics(DCGM))


@pytest.mark.parametrize("value", [2147483632, 2147483635, 9223372036854775792, 9223372036854775794, 140737488355328.0])
def test_every_blank_is_one(value: float) -> None:
    assert is_blank(value)
    assert not is_blank(value / 2)


def test_links_that_carry_nothing_are_counted_apart() -> None:
    text = "GPU 0: X (UUID: GPU-1)\n\t Link 0: 25 GB/s\n\t Link 1: <inactive>\n\t Link 2: nonsense\nGPU 1: X (UUID: GPU-9)\n"
    status = parse_nvlink_status(text)
    assert status[0].links == ((0, 25.0), (1, None))
    with_links, without = with_nvlinks((GpuSample("a", uuid="GPU-1"), GpuSample("b", uuid="GPU-2")), status)
    assert (with_links.nvlinks, with_links.nvlinks_up) == (2, 1)
    assert (without.nvlinks, without.nvlinks_up) == (None, None)
