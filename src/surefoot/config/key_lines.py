"""Where each key of a TOML document stands. tomlkit keeps every byte but no positions, so this walks the text once more.

The walk expects a document that parsed: it knows just enough of the grammar (strings, comments, brackets) not to be misled by a value.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

_TOKEN = re.compile(
    r'''"""(?:[^\\]|\\.)*?"{3,5}|\'\'\'.*?\'{3,5}|"(?:[^"\\\n]|\\.)*"|'[^'\n]*'|\#[^\n]*|\n|[\[\]{}=,.]|[^\s\[\]{}=,.\#"']+''',
    re.DOTALL,
)


def key_lines(text: str) -> Mapping[str, int]:
    """The 1-based line of each table header and key: `train`, `train.num_steps`, `data.sources[0].files`.

    The first place wins when a name stands twice. Keys inside inline tables are not listed; `line_of` gives the line of their parent.
    """
    lines: dict[str, int] = {}
    for path, line, _ in _places(text):
        for end in [match.start() for match in re.finditer(r"[.\[]", path)]:
            lines.setdefault(path[:end], line)
        lines.setdefault(path, line)
    return lines


def second_place(text: str) -> tuple[str, int] | None:
    """(path, line) of the first key that stands in the document a second time."""
    seen: set[str] = set()
    for path, line, is_header in _places(text):
        if path in seen and not is_header:
            return path, line
        seen.add(path)
    return None


def line_of(path: str, *, lines: Mapping[str, int]) -> int | None:
    """The line of `path`, or of the closest thing around it that has one."""
    while path:
        if path in lines:
            return lines[path]
        path = path[: max(path.rfind("."), path.rfind("["), 0)]
    return None


def _places(text: str) -> Iterator[tuple[str, int, bool]]:
    """(path, line, whether it is a table header) in the order of the document."""
    num_items: dict[str, int] = {}
    prefix = ""
    for line, tokens in _statements(text):
        if tokens[0] == "[":
            prefix = _join("", [token for token in tokens if token not in "[]."], num_items, is_array=tokens[1] == "[")
            yield prefix, line, True
        elif "=" in tokens:
            names = [token for token in tokens[: tokens.index("=")] if token != "."]
            yield _join(prefix, names, num_items, is_array=False), line, False


def _statements(text: str) -> Iterator[tuple[int, list[str]]]:
    """(first line, tokens) of each header or assignment; a newline ends one unless a bracket is open."""
    tokens: list[str] = []
    line = first_line = 1
    depth = 0
    for match in _TOKEN.finditer(text + "\n"):
        token = match.group()
        if token == "\n" and depth == 0:
            if tokens:
                yield first_line, tokens
            tokens = []
        elif token != "\n" and not token.startswith("#"):
            if not tokens:
                first_line = line
            depth += (token in "[{") - (token in "]}")
            tokens.append(token)
        line += token.count("\n")


def _join(prefix: str, names: list[str], num_items: dict[str, int], *, is_array: bool) -> str:
    """The full path of `names` under `prefix`; a name that is an array of tables means its last item."""
    path = prefix
    for position, quoted in enumerate(names):
        name = quoted[1:-1] if quoted[0] in "\"'" else quoted
        path = f"{path}.{name}" if path else name
        if is_array and position == len(names) - 1:
            num_items[path] = num_items.get(path, 0) + 1
        if path in num_items:
            path = f"{path}[{num_items[path] - 1}]"
    return path
