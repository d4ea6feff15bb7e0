"""Requests to an object store: how patient they are, and what a failed one means in our words.

The client is obstore, imported by the rooms that talk to a store. Where the store is and who we are comes from the environment alone
(AWS_ENDPOINT_URL, AWS_REGION, AWS_ACCESS_KEY_ID, ...).
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from surefoot.core.clock import Clock
from surefoot.core.errors import SurefootError
from surefoot.core.tiers import StoreUrl, without_credentials

Answer = TypeVar("Answer")

FINAL_KINDS = ("bucket-missing", "credentials", "missing", "damaged")
_SECRETS = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_ACCESS_KEY_ID")
# What a listing hides behind another error; and without credentials the machine is asked for some, at this path.
_REFUSALS = ("403 Forbidden", "401 Unauthorized", "/latest/api/token")
_DENIALS = ("PermissionDeniedError", "UnauthenticatedError")
_BEYOND = ("416 Range", "InvalidRange", "Requested range was invalid")
_MAX_DETAIL_CHARS = 300


@dataclass(frozen=True, slots=True)
class Patience:
    """Bounds of one request and of one operation.

    A request is retried inside the client (`num_requests` times within `request_limit_s`), an operation on top of it `num_tries` times
    with waits that double from `wait_s` to `max_wait_s`: a store that is being restarted is away for about a minute.
    """

    num_requests: int = 5
    request_limit_s: float = 60.0
    num_tries: int = 4
    wait_s: float = 1.0
    max_wait_s: float = 20.0


@dataclass(frozen=True, slots=True)
class StoreProblem:
    """A foreign error in our words; `kind` tells a program what a person reads."""

    kind: str
    what: str
    hint: str
    detail: str


def s3_settings(*, patience: Patience) -> dict[str, Any]:
    """Arguments of the client that the environment does not give by itself."""
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or os.environ.get("AWS_ENDPOINT") or ""
    limit = timedelta(seconds=patience.request_limit_s)
    return {
        "client_options": {"allow_http": endpoint.startswith("http://"), "timeout": limit},
        "retry_config": {"max_retries": patience.num_requests, "retry_timeout": limit},
    }


def patiently(
    attempt: Callable[[], Answer],
    *,
    patience: Patience,
    clock: Clock,
    foreign: tuple[type[Exception], ...],
    named: Callable[[Exception], SurefootError],
) -> Answer:
    """The answer of `attempt`, tried again with waits while it raises something `foreign` that may pass.

    What `named` makes of the last failure is raised; its value `kind` says whether waiting helps.
    """
    for number in range(1, patience.num_tries + 1):
        try:
            return attempt()
        except foreign as error:
            problem = named(error)
            if problem.values["kind"] in FINAL_KINDS or number == patience.num_tries:
                raise problem from error
            wait_s = min(patience.wait_s * 2 ** (number - 1), patience.max_wait_s)
            clock.sleep(wait_s * random.uniform(0.5, 1.0))
    raise AssertionError("num_tries is at least 1")


def problem_of(error: Exception, *, url: StoreUrl | str, doing: str, rights: str, setting: str, look: str) -> StoreProblem:
    """What `error` of the client means. `rights` are those that are needed, `setting` names the place, `look` shows what is there."""
    text = _without_secrets(str(error))
    detail = _short(text)
    scheme, bucket = (url.scheme, url.bucket) if isinstance(url, StoreUrl) else (url.partition(":")[0], url)
    if any(sign in text for sign in _BEYOND):
        return StoreProblem("damaged", f"the object is shorter than it was: {detail}", "take another copy", detail)
    if "NoSuchBucket" in text:
        return StoreProblem("bucket-missing", f"there is no bucket {bucket}", f"create it, or mend {setting}", detail)
    denied = isinstance(error, PermissionError) or type(error).__name__ in _DENIALS
    if denied or any(sign in text for sign in _REFUSALS):
        hint = f"give this user the right to {rights} there"
        if scheme == "s3":
            hint = f"set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY of a user who may {rights} there"
        return StoreProblem("credentials", f"not allowed: {doing}", hint, detail)
    if isinstance(error, FileNotFoundError):
        return StoreProblem("missing", f"nothing there: {doing}", look, detail)
    hint = "look at the store; AWS_ENDPOINT_URL says where it is"
    return StoreProblem("unreachable", f"no answer that helps: {doing}: {detail}", hint, detail)


def _short(text: str) -> str:
    one_line = " ".join(text.split("Debug source:")[0].split())
    return one_line if len(one_line) <= _MAX_DETAIL_CHARS else one_line[:_MAX_DETAIL_CHARS] + "..."


def _without_secrets(text: str) -> str:
    for name in _SECRETS:
        if value := os.environ.get(name):
            text = text.replace(value, f"<{name}>")
    return without_credentials(text)  # an endpoint may carry some
