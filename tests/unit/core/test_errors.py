from __future__ import annotations

import pickle

import pytest

from surefoot.core import errors
from surefoot.core.errors import CheckpointError, ConfigError, Corrupt, DataError, SurefootError, error_for_exit_code, error_from_json


@pytest.mark.parametrize(
    ("name", "exit_code"),
    [
        ("SurefootError", 1),
        ("ConfigError", 2),
        ("PlanInfeasible", 3),
        ("DataError", 4),
        ("CheckpointError", 5),
        ("Corrupt", 5),
        ("Incomplete", 5),
        ("Incompatible", 5),
        ("TrainingHalted", 6),
        ("Held", 7),
        ("PeerLost", 75),
        ("Preempted", 75),
        ("Deterministic", 93),
    ],
)
def test_every_error_ends_with_its_exit_code(name: str, exit_code: int) -> None:
    kind = getattr(errors, name)
    assert issubclass(kind, SurefootError)
    assert kind.exit_code == exit_code


def test_an_error_says_what_where_and_what_to_do() -> None:
    error = DataError("block 3 differs", where="00001.tok", hint="fetch it again", got="aa", wanted="bb")
    assert str(error) == "00001.tok: block 3 differs — fetch it again"
    assert error.values == {"got": "aa", "wanted": "bb"}
    expected = {"code": "data", "what": "block 3 differs", "where": "00001.tok", "hint": "fetch it again"}
    assert error.as_json() == {"error": expected}


def test_errors_survive_pickling_with_everything() -> None:
    error = pickle.loads(pickle.dumps(Corrupt("flipped", where="a.distcp", hint="fall back", tensor="model.x")))
    assert type(error) is Corrupt
    assert (error.what, error.where, error.hint, error.values) == ("flipped", "a.distcp", "fall back", {"tensor": "model.x"})
    assert isinstance(error, CheckpointError)


def test_an_exit_code_finds_its_error_and_a_signal_is_the_unexpected() -> None:
    assert error_for_exit_code(2) is ConfigError
    assert error_for_exit_code(-9) is SurefootError


@pytest.mark.parametrize("kind", [SurefootError, ConfigError, Corrupt])
def test_an_error_told_as_json_is_of_its_own_class_again(kind: type[SurefootError]) -> None:
    again = error_from_json(kind("what", where="where", hint="hint").as_json())
    assert type(again) is kind
    assert (again.what, again.where, again.hint) == ("what", "where", "hint")


def test_an_error_of_a_newer_surefoot_is_the_unexpected() -> None:
    assert type(error_from_json({"error": {"code": "of-tomorrow", "what": "w", "where": "", "hint": ""}})) is SurefootError
