"""What accelerators can do, from their data sheets: dense peaks, memory, links. Own hardware is described in TOML with the same keys.

A data sheet that prints a peak "with sparsity" prints twice the dense one; only dense peaks stand here.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from surefoot.core.errors import ConfigError

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One device and the node around it. Peaks are dense FLOP/s by dtype; bandwidths are bytes/s of one device in one direction.

    `memory_bytes` is what the driver offers, `node_link` connects devices of a node, `fabric_link` one device to other nodes (a node's
    network shared out), `host_link` device and host memory, `disk` is a node's local disk.
    """

    name: str
    peaks: Mapping[str, float]
    memory_bytes: float
    memory_bandwidth: float
    devices_per_node: int
    node_link: float
    fabric_link: float
    host_link: float
    disk: float
    source: str

    def peak_flops(self, dtype: str = "bf16") -> float:
        """FLOP/s. Raises ConfigError for a dtype that it has no matrix units for."""
        if dtype not in self.peaks:
            known = ", ".join(self.peaks)
            raise ConfigError(f"no peak of {dtype} is known for {self.name}", where="plan", hint=f"it has {known}", got=dtype)
        return self.peaks[dtype]


def _nvidia(
    name: str, *, peaks: dict[str, float], gib: float, bandwidth: float, link: float, fabric: float, host: float, source: str, node: int = 8
) -> Accelerator:
    return Accelerator(
        name=name,
        peaks=peaks,
        memory_bytes=gib * GIB,
        memory_bandwidth=bandwidth,
        devices_per_node=node,
        node_link=link,
        fabric_link=fabric,
        host_link=host,
        disk=10e9,
        source=source,
    )


_HOPPER = {"bf16": 989.4e12, "fp16": 989.4e12, "fp8": 1978.9e12, "tf32": 494.7e12, "fp32": 66.9e12}
_AMPERE = {"bf16": 312e12, "fp16": 312e12, "tf32": 156e12, "fp32": 19.5e12}

_TABLE = (
    _nvidia(
        "h100",
        peaks=_HOPPER,
        gib=79.6,
        bandwidth=3.35e12,
        link=450e9,
        fabric=50e9,
        host=55e9,
        source="NVIDIA H100 SXM5 data sheet (dense); NVLink 4 450 GB/s each way; 400 Gb/s InfiniBand per device (DGX H100); PCIe 5 x16",
    ),
    _nvidia(
        "h200",
        peaks=_HOPPER,
        gib=139.8,
        bandwidth=4.8e12,
        link=450e9,
        fabric=50e9,
        host=55e9,
        source="NVIDIA H200 SXM data sheet (dense); links as DGX H100",
    ),
    _nvidia(
        "h800",
        peaks=_HOPPER,
        gib=79.6,
        bandwidth=3.35e12,
        link=200e9,
        fabric=50e9,
        host=55e9,
        source="H100 with NVLink cut to 400 GB/s in both directions together (DeepSeek-V3, arXiv 2412.19437)",
    ),
    _nvidia(
        "a100",
        peaks=_AMPERE,
        gib=79.2,
        bandwidth=2.04e12,
        link=300e9,
        fabric=25e9,
        host=25e9,
        source="NVIDIA A100 80GB SXM data sheet (dense); NVLink 3 300 GB/s each way; 200 Gb/s per device (DGX A100); PCIe 4 x16",
    ),
    _nvidia(
        "a100-40gb",
        peaks=_AMPERE,
        gib=39.4,
        bandwidth=1.56e12,
        link=300e9,
        fabric=25e9,
        host=25e9,
        source="NVIDIA A100 40GB SXM data sheet (dense); links as A100 80GB",
    ),
    _nvidia(
        "b200",
        peaks={"bf16": 2250e12, "fp16": 2250e12, "fp8": 4500e12, "tf32": 1125e12, "fp32": 75e12},
        gib=178.0,
        bandwidth=7.7e12,
        link=900e9,
        fabric=50e9,
        host=55e9,
        source="NVIDIA DGX B200 data sheet, halved where it prints sparse peaks; NVLink 5 900 GB/s each way; 400 Gb/s per device",
    ),
    _nvidia(
        "gb200",
        peaks={"bf16": 2500e12, "fp16": 2500e12, "fp8": 5000e12, "tf32": 1250e12, "fp32": 80e12},
        gib=184.0,
        bandwidth=8e12,
        link=900e9,
        fabric=50e9,
        host=200e9,
        node=72,
        source="NVIDIA GB200 NVL72 data sheet, halved where it prints sparse peaks; one NVLink domain of 72",
    ),
    _nvidia(
        "b300",
        peaks={"bf16": 2250e12, "fp16": 2250e12, "fp8": 4500e12, "tf32": 1125e12, "fp32": 75e12},
        gib=267.9,
        bandwidth=7.7e12,
        link=900e9,
        fabric=100e9,
        host=55e9,
        source=(
            "NVIDIA HGX B300 data sheet, halved where it prints sparse peaks; 800 Gb/s per device; "
            "memory: 275,040 MiB of nvidia-smi less 0.7 GiB, as a B200 keeps"
        ),
    ),
    _nvidia(
        "gb300",
        peaks={"bf16": 2500e12, "fp16": 2500e12, "fp8": 5000e12, "tf32": 1250e12, "fp32": 80e12},
        gib=276.8,
        bandwidth=8e12,
        link=900e9,
        fabric=100e9,
        host=200e9,
        node=72,
        source=(
            "NVIDIA GB300 NVL72 data sheet, halved where it prints sparse peaks; one NVLink domain of 72; 800 Gb/s per device; "
            "memory: 284,208 MiB of nvidia-smi less 0.7 GiB, as a B200 keeps"
        ),
    ),
    _nvidia(
        "h20",
        peaks={"bf16": 148e12, "fp16": 148e12, "fp8": 296e12, "tf32": 74e12, "fp32": 44e12},
        gib=95.0,
        bandwidth=4.0e12,
        link=450e9,
        fabric=50e9,
        host=55e9,
        source="no public data sheet: dense peaks, 96 GB and 4 TB/s as the press has them; links as DGX H100",
    ),
    _nvidia(
        "l40s",
        peaks={"bf16": 362e12, "fp16": 362e12, "fp8": 733e12, "tf32": 183e12, "fp32": 91.6e12},
        gib=44.5,
        bandwidth=0.864e12,
        link=25e9,
        fabric=6.25e9,
        host=25e9,
        source="NVIDIA L40S data sheet (dense; bf16 362.05 as printed); no NVLink: PCIe 4 x16; 400 Gb/s for a node of 8 (AWS g6e.48xlarge)",
    ),
    _nvidia(
        "a10g",
        peaks={"bf16": 70e12, "fp16": 70e12, "tf32": 35e12, "fp32": 35e12},
        gib=22.0,
        bandwidth=0.6e12,
        link=12e9,
        fabric=1.56e9,
        host=12e9,
        source="NVIDIA A10G data sheet of AWS (dense); no NVLink: PCIe 4, taken as 8 lanes; 100 Gb/s for a node of 8 (AWS g5.48xlarge)",
    ),
    _nvidia(
        "v100",
        peaks={"fp16": 125e12, "fp32": 15.7e12},
        gib=31.7,
        bandwidth=0.9e12,
        link=150e9,
        fabric=6.25e9,
        host=12e9,
        source="NVIDIA V100 SXM2 32GB data sheet; no bf16; NVLink 2 150 GB/s each way; four 100 Gb/s for a node of 8 (DGX-1)",
    ),
    Accelerator(
        name="mi300x",
        peaks={"bf16": 1307.4e12, "fp16": 1307.4e12, "fp8": 2614.9e12, "tf32": 653.7e12, "fp32": 163.4e12},
        memory_bytes=191.0 * GIB,
        memory_bandwidth=5.3e12,
        devices_per_node=8,
        node_link=448e9,
        fabric_link=50e9,
        host_link=55e9,
        disk=10e9,
        source="AMD Instinct MI300X data sheet (dense); 7 Infinity Fabric links of 64 GB/s each way; 400 Gb/s per device",
    ),
    Accelerator(
        name="cpu",
        peaks={"fp32": 160e9},
        memory_bytes=4.0 * GIB,
        memory_bandwidth=10e9,
        devices_per_node=64,
        node_link=5e9,
        fabric_link=1e9,
        host_link=10e9,
        disk=1e9,
        source="a core of a server, nominal: AVX-512, 64 FLOP a cycle at 2.5 GHz (Intel optimization manual); describe your own in a TOML",
    ),
    Accelerator(
        name="mi250x",
        peaks={"bf16": 191.5e12, "fp16": 191.5e12, "fp32": 47.9e12},
        memory_bytes=63.9 * GIB,
        memory_bandwidth=1.6e12,
        devices_per_node=8,
        node_link=50e9,
        fabric_link=12.5e9,
        host_link=36e9,
        disk=2e9,
        source="AMD Instinct MI250X data sheet, one of two dies; Frontier's node of 8: Infinity Fabric 50 GB/s, four 200 Gb/s Slingshot",
    ),
)

ACCELERATORS: Mapping[str, Accelerator] = {entry.name: entry for entry in _TABLE}

_ALIASES = {
    "h100_80gb": "h100",
    "h100-sxm": "h100",
    "h100-80gb": "h100",
    "a100_80gb": "a100",
    "a100-80gb": "a100",
    "a100_40gb": "a100-40gb",
    "v100-32gb": "v100",
}


def accelerator(name: str) -> Accelerator:
    """By name, or from the TOML file that `name` is the path of. Raises ConfigError that lists what there is."""
    if name.endswith(".toml"):
        return read_accelerator(Path(name))
    key = name.lower()
    key = _ALIASES.get(key, key)
    if key not in ACCELERATORS:
        near = difflib.get_close_matches(key, ACCELERATORS, n=1)
        meant = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(
            f"accelerator {name!r} is not known",
            where="--accelerator",
            hint=f"{meant}known: {', '.join(ACCELERATORS)}; or a TOML file with {', '.join(_KEYS)}",
            got=name,
        )
    return ACCELERATORS[key]


def peak_of_device(name: str, *, dtype: str) -> float:
    """FLOP/s of the GPU that its driver calls `name`, as "NVIDIA H100 80GB HBM3"; 0 where it is none of ours, or has no units for `dtype`.

    The longest name that fits counts: an A100-40GB is no A100 of 80. Cards for a PCIe slot are slower than the modules in the table.
    """
    told = name.lower().replace(" ", "-")
    if "pcie" in told or "nvl" in told:
        return 0.0
    fitting = [known for known in ACCELERATORS if all(part in told for part in known.split("-"))]
    return ACCELERATORS[max(fitting, key=len)].peaks.get(dtype, 0.0) if fitting else 0.0


_KEYS = tuple(field.name for field in fields(Accelerator))


def read_accelerator(path: Path) -> Accelerator:
    """A TOML with the fields of `Accelerator`, `[peaks]` a table of FLOP/s by dtype. Raises ConfigError."""
    try:
        told: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot be read: {error}", where=str(path), hint=f"a TOML file with {', '.join(_KEYS)}") from error
    told.setdefault("name", path.stem)
    told.setdefault("source", str(path))
    for problem in _problems(told):
        raise ConfigError(problem, where=str(path), hint=f"it has {', '.join(_KEYS)}; bandwidths in bytes/s, peaks in dense FLOP/s")
    return Accelerator(**told)


def _problems(told: Mapping[str, Any]) -> list[str]:
    problems = [f"{name} is not a key" for name in told if name not in _KEYS]
    problems += [f"{name} is missing" for name in _KEYS if name not in told]
    peaks = told.get("peaks")
    if peaks is not None and not (isinstance(peaks, dict) and peaks and all(_is_positive(value) for value in peaks.values())):
        problems.append("[peaks] is not a table of FLOP/s above 0")
    numbers = [name for name in _KEYS if name not in ("name", "source", "peaks")]
    problems += [f"{name} is {told[name]!r}, not a number above 0" for name in numbers if name in told and not _is_positive(told[name])]
    if not problems and not isinstance(told["devices_per_node"], int):
        problems.append(f"devices_per_node is {told['devices_per_node']!r}, not a whole number")
    return problems


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")
