from __future__ import annotations

import string
from typing import Any

import tomlkit
from hypothesis import given
from hypothesis import strategies as st

from surefoot.config.key_lines import key_lines, line_of, second_place

DOCUMENT = '''# a comment with [brackets] and key = value
[run]
name = "a # no comment = here"
text = """
fake = 1
[fake]
""\\" still inside
"""
[data] # [not.a.header]
list = [
  1, # x = 2
  "]",
  { inner = 3 },
]
after = 'lite\\ral'
"quoted" = 1
dotted.key = 2

[[data.sources]]
name = "one"
[[data.sources]]
files = ["x"]
[data.sources.more]
deep = true
'''


def test_finds_every_key_and_nothing_inside_values() -> None:
    lines = key_lines(DOCUMENT)
    assert lines == {
        "run": 2,
        "run.name": 3,
        "run.text": 4,
        "data": 9,
        "data.list": 10,
        "data.after": 15,
        "data.quoted": 16,
        "data.dotted": 17,
        "data.dotted.key": 17,
        "data.sources": 19,
        "data.sources[0]": 19,
        "data.sources[0].name": 20,
        "data.sources[1]": 21,
        "data.sources[1].files": 22,
        "data.sources[1].more": 23,
        "data.sources[1].more.deep": 24,
    }


def test_an_unlisted_path_takes_the_line_of_what_is_around_it() -> None:
    lines = key_lines(DOCUMENT)
    assert line_of("data.list[2].inner", lines=lines) == 10
    assert line_of("data.sources[1].weight", lines=lines) == 21
    assert line_of("train.num_steps", lines=lines) is None


def test_second_place_names_a_key_given_twice_only() -> None:
    assert second_place("[a]\nx = 1\ny = 2\nx = 3\n") == ("a.x", 4)
    assert second_place("[a]\nx = 1\n[b]\nx = 1\n[[c]]\nx = 1\n[[c]]\nx = 1\n") is None


names = st.text(alphabet=string.ascii_letters + string.digits + "_-", min_size=1, max_size=6)
values = st.recursive(
    st.one_of(st.integers(-9, 9), st.booleans(), st.text(alphabet="ab=[]{}#'\"\\,. \n", max_size=8)),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(names, st.dictionaries(names, values, max_size=4), max_size=4))
def test_agrees_with_tomlkit_on_any_document_that_it_writes(document: dict[str, dict[str, Any]]) -> None:
    text = tomlkit.dumps(document)
    lines = key_lines(text)
    expected = {section for section in document} | {f"{section}.{key}" for section, content in document.items() for key in content}
    assert set(lines) == expected
    rows = text.splitlines()
    for path in expected:
        assert path.rpartition(".")[2] in rows[lines[path] - 1]
