"""Cutting the files of a source into chunks of whole records: what one process parses and encodes at a time.

Where chunks end follows from the content and the settings alone, not from where a pass began or how much a read gave: an interrupted pass
goes on behind the last chunk that it finished, and cuts the same ones. No file is held in memory: a chunk is, and one record beyond it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from surefoot.core.errors import DataError
from surefoot.data.corpus import CorpusFile
from surefoot.data.parts import Chunk, Cut, Part, Place, too_long
from surefoot.data.unpacking import BLOCK_BYTES, BrokenStream, ByteStream, open_stream

CHUNK_BYTES: Final = 4 << 20  # about a second of one core: little is lost at a kill, and handing it over costs little beside it
MAX_RECORD_BYTES: Final = 64 << 20
CUTTING_VERSION: Final = 2
"""Another one when chunks end elsewhere than before: what an earlier release left half-finished is not gone on with."""


@dataclass(frozen=True, slots=True)
class Cutting:
    """How files are cut. Texts of Parquet files are in the column `text_field`; a record of more than `max_record_bytes` is no document."""

    text_field: str = "text"
    max_record_bytes: int = MAX_RECORD_BYTES
    chunk_bytes: int = CHUNK_BYTES

    def chunks(self, files: Sequence[CorpusFile], *, start: Place | None = None) -> Iterator[Chunk]:
        """The chunks of `files` from `start` on, the end of an earlier one. Raises DataError for a file that cannot be read."""
        start = start or Place()
        parts: list[Part] = []
        num_bytes = 0

        def room() -> int:
            return self.chunk_bytes - num_bytes

        finished_bytes = sum(file.num_bytes for file in files[: start.file])
        for number in range(start.file, len(files)):
            begin = start if number == start.file else Place(number)
            for cut in self._cut_file(files[number], begin=begin, room=room):
                parts.append(cut.part)
                num_bytes += len(cut.part.data)
                if num_bytes >= self.chunk_bytes:
                    yield Chunk(tuple(parts), cut.end, finished_bytes + cut.file_bytes)
                    parts, num_bytes = [], 0
            finished_bytes += files[number].num_bytes
        if parts:
            yield Chunk(tuple(parts), Place(len(files)), finished_bytes)

    def _cut_file(self, file: CorpusFile, *, begin: Place, room: Callable[[], int]) -> Iterator[Cut]:
        try:
            if file.num_bytes == 0 or file.kind == "text":
                yield self._whole_text(file, place=begin)
            elif file.kind == "jsonl":
                with open_stream(file, offset=begin.offset) as stream:
                    yield from self._lines(stream, begin=begin, room=room)
            else:
                from surefoot.data.parquet_rows import cut_rows

                yield from cut_rows(file, text_field=self.text_field, begin=begin, room=room)
        except OSError as error:
            raise DataError(f"cannot read {file.path}: {error.strerror or error}", where=file.name, hint="check the file") from error

    def _whole_text(self, file: CorpusFile, *, place: Place) -> Cut:
        data, reason = bytearray(), ""
        most = self.max_record_bytes + 1
        try:
            with open_stream(file) as stream:
                while len(data) < most and (block := stream.read(min(BLOCK_BYTES, most - len(data)))):
                    data += block
        except BrokenStream as error:
            reason = str(error)
        if len(data) > self.max_record_bytes:
            reason = too_long(self.max_record_bytes)
        part = Part("text", place, reason=reason) if reason else Part("text", place, bytes(data))
        return Cut(part, Place(place.file + 1), file.num_bytes)

    def _lines(self, stream: ByteStream, *, begin: Place, room: Callable[[], int]) -> Iterator[Cut]:
        """Runs of lines, each ending with the first line end that fills the chunk, or before a line that is too long: it fills nothing."""
        place, pending = begin, bytearray()

        def take(num_bytes: int, *, reason: str = "") -> Cut:
            nonlocal place
            part = Part("jsonl", place, b"" if reason else bytes(pending[:num_bytes]), reason)
            place = Place(place.file, place.offset + num_bytes, place.record + (1 if reason else part.data.count(b"\n")))
            del pending[:num_bytes]
            return Cut(part, place, stream.file_bytes())

        while True:
            filled = pending.find(b"\n", max(1, room()) - 1) + 1
            long_line = _find_too_long(pending, end=filled or len(pending), limit=self.max_record_bytes)
            if long_line is not None:
                if long_line:
                    yield take(long_line)
                place = Place(place.file, place.offset + _skip_line(stream, pending), place.record)
                yield take(0, reason=too_long(self.max_record_bytes))
                continue
            if filled:
                yield take(filled)
                continue
            try:
                block = stream.read(BLOCK_BYTES)
            except BrokenStream as error:
                if whole_lines := pending.rfind(b"\n") + 1:
                    yield take(whole_lines)
                yield take(len(pending), reason=str(error))
                return
            pending += block
            if not block:
                if pending:
                    yield take(len(pending))
                return


def _find_too_long(lines: bytearray, *, end: int, limit: int) -> int | None:
    """Where, before `end`, the first line begins of which more than `limit` bytes are there. Looks at every `limit` bytes once."""
    begin = 0
    while end - begin > limit:
        line_end = lines.rfind(b"\n", begin, begin + limit + 1)
        if line_end < 0:
            return begin
        begin = line_end + 1
    return None


def _skip_line(stream: ByteStream, pending: bytearray) -> int:
    """Read to the end of a line, and leave what is behind it in `pending`. The bytes of the line, its end included."""
    num_bytes = 0
    while (end := pending.find(b"\n") + 1) == 0:
        num_bytes += len(pending)
        pending.clear()
        try:
            block = stream.read(BLOCK_BYTES)
        except BrokenStream:
            return num_bytes  # the next read says so, of the record behind
        if not block:
            return num_bytes
        pending += block
    del pending[:end]
    return num_bytes + end
