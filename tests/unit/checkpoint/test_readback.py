"""Forgetting what memory has of files, so that the disk answers."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from surefoot.checkpoint.readback import drop_cached


def test_what_could_not_be_written_is_named_and_forgotten_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "part").write_bytes(b"bytes")
    forgotten: list[int] = []

    def refuse(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", refuse)
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, offset, size, advice: forgotten.append(advice))
    drop_cached(tmp_path)
    assert forgotten == [os.POSIX_FADV_DONTNEED]
    assert f"{tmp_path / 'part'}: what the disk has of it is read now: [Errno 5] Input/output error" in caplog.text
