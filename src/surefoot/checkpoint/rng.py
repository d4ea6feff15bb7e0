"""The random streams of one process (Python, NumPy, torch, its device) as bytes of canonical JSON: no pickle."""

from __future__ import annotations

import base64
import json
import random
from array import array
from typing import Any

import numpy as np
import torch

from surefoot.core.errors import Corrupt
from surefoot.core.strict_json import canonical, loads

_PAD_BYTES = 4096


def capture_rng(device: torch.device) -> torch.Tensor:
    """Local. The present state of every stream, as a uint8 CPU tensor. Padded with spaces: numbers of other lengths give no other shape."""
    version, words, gauss = random.getstate()
    numpy_name, numpy_words, position, has_gauss, cached = np.random.get_state(legacy=True)
    state = {
        "python": {"version": version, "words": _pack(array("I", words).tobytes()), "gauss": gauss},
        "numpy": {
            "name": numpy_name,
            "words": _pack(np.asarray(numpy_words, dtype="<u4").tobytes()),
            "position": position,
            "has_gauss": has_gauss,
            "cached": cached,
        },
        "torch": _pack(torch.get_rng_state().numpy().tobytes()),
        "cuda": _pack(torch.cuda.get_rng_state(device).numpy().tobytes()) if device.type == "cuda" else None,
    }
    raw = canonical(state)
    return torch.frombuffer(bytearray(raw.ljust(-(-len(raw) // _PAD_BYTES) * _PAD_BYTES)), dtype=torch.uint8)


def restore_rng(stored: torch.Tensor, *, device: torch.device) -> None:
    """Local. Put every stream back; a device stream only where there is a device of that kind. Raises Corrupt for foreign bytes."""
    try:
        state: dict[str, Any] = loads(stored.cpu().numpy().tobytes())
        python, numpy = state["python"], state["numpy"]
        random.setstate((python["version"], tuple(array("I", _unpack(python["words"]))), python["gauss"]))
        words = np.frombuffer(_unpack(numpy["words"]), dtype="<u4")
        np.random.set_state((numpy["name"], words, numpy["position"], numpy["has_gauss"], numpy["cached"]))
        torch.set_rng_state(_tensor(state["torch"]))
        if device.type == "cuda" and state["cuda"] is not None:
            torch.cuda.set_rng_state(_tensor(state["cuda"]), device)
    except (KeyError, TypeError, ValueError, RuntimeError, json.JSONDecodeError) as error:
        raise Corrupt(f"the stored random state cannot be read: {error}", where="rng") from error


def _pack(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def _unpack(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(_unpack(text)), dtype=torch.uint8)
