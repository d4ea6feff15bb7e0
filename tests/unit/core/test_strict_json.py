from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.core.events import Event
from surefoot.core.strict_json import canonical, dumps, loads

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@dataclass(frozen=True)
class Point:
    x: float
    name: str


def test_a_non_finite_number_becomes_null_and_is_flagged() -> None:
    assert json.loads(dumps({"a": {"b": [1.0, math.nan]}, "c": math.inf})) == {
        "a": {"b": [1.0, None]},
        "c": None,
        "nonfinite": {"a.b[1]": "nan", "c": "inf"},
    }
    assert "nonfinite" not in json.loads(dumps({"a": 1.0}))


def test_records_enums_and_paths_have_a_form() -> None:
    value = {"point": Point(1.0, "p"), "event": Event.RUN_CREATED, "path": Path("a/b")}
    assert json.loads(dumps(value)) == {"point": {"x": 1.0, "name": "p"}, "event": "run.created", "path": "a/b"}


def test_what_has_no_form_is_named() -> None:
    with pytest.raises(TypeError, match="object at a"):
        dumps({"a": object()})


@pytest.mark.parametrize("text", ["NaN", "[Infinity]", '{"a": -Infinity}'])
def test_constants_that_are_not_json_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not JSON"):
        loads(text)


@given(st.dictionaries(st.text(), VALUES))
def test_the_canonical_form_does_not_depend_on_the_order_of_keys(value: dict[str, object]) -> None:
    assert canonical(value) == canonical(dict(reversed(value.items())))
    assert loads(canonical(value)) == value
