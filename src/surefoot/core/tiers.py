"""Where copies of a checkpoint are kept, as `checkpoint.tiers` and `train --resume-from` spell it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from urllib.parse import SplitResult, unquote, urlsplit

MEMORY = "memory"
DISK = "disk"
_FORMS = "s3://bucket/prefix or file:///folder"
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")


@dataclass(frozen=True, slots=True)
class StoreUrl:
    """A place outside of the run folder. `bucket` is empty for a folder; `prefix` has no slash at its ends (of a folder: its path)."""

    scheme: str
    bucket: str
    prefix: str

    def __str__(self) -> str:
        if self.scheme == "file":
            return f"file://{self.prefix}"
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")


class BadTier(ValueError):
    """`what` is wrong and a `hint` on what to do. Neither repeats a secret that somebody wrote into a URL."""

    def __init__(self, what: str, hint: str) -> None:
        super().__init__(what)
        self.what = what
        self.hint = hint


def store_urls(tiers: Iterable[str]) -> list[StoreUrl]:
    """The object stores among `tiers`, in their order. Raises BadTier."""
    return [parse_store_url(tier) for tier in tiers if tier not in (MEMORY, DISK)]


def parse_tier(tier: str) -> StoreUrl | str:
    """MEMORY, DISK or the URL of a store. Raises BadTier."""
    return tier if tier in (MEMORY, DISK) else parse_store_url(tier)


def parse_store_url(text: str) -> StoreUrl:
    """Raises BadTier for what is no URL of a store, lacks its bucket or path, or carries credentials."""
    if "://" not in text:
        close = get_close_matches(text, (MEMORY, DISK), n=1)
        raise BadTier(f'there is no tier "{text}"', f"did you mean {close[0]}?" if close else f"write {MEMORY}, {DISK}, {_FORMS}")
    try:
        url = urlsplit(text)
        has_more = any(sign in url.netloc for sign in "@:") or bool(url.query or url.fragment)
    except ValueError:
        raise BadTier("a tier is no URL that can be read", f"write {_FORMS}") from None
    if has_more:
        what = f"the URL of tier {url.scheme}://... holds more than a place: credentials never stand in a config"
        raise BadTier(
            what, "write s3://bucket/prefix; set AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_ENDPOINT_URL in the environment"
        )
    if url.scheme == "s3":
        return _bucket_url(url, text=text)
    if url.scheme == "file":
        return _folder_url(url, text=text)
    close = get_close_matches(url.scheme, ("s3", "file"), n=1, cutoff=0.5)
    hint = f"did you mean {close[0]}://?" if close else f"write {_FORMS}"
    raise BadTier(f'"{text}": no store is known by {url.scheme}://', hint)


def _bucket_url(url: SplitResult, *, text: str) -> StoreUrl:
    if not url.netloc:
        raise BadTier(f'"{text}" names no bucket', "write s3://bucket/prefix")
    if not _BUCKET.fullmatch(url.netloc):
        raise BadTier(f'"{url.netloc}" is no name of a bucket', "3 to 63 of a-z, 0-9, '.' and '-'; an endpoint is set by AWS_ENDPOINT_URL")
    prefix = url.path.strip("/")
    if any(part in ("", ".", "..") for part in prefix.split("/") if prefix):
        raise BadTier(f'"{text}" has an empty or dotted part in its prefix', "write s3://bucket/prefix")
    return StoreUrl(scheme="s3", bucket=url.netloc, prefix=prefix)


def _folder_url(url: SplitResult, *, text: str) -> StoreUrl:
    path = unquote(url.path).rstrip("/")
    if url.netloc or not path.startswith("/") or path.startswith("//"):
        raise BadTier(f'"{text}" is no absolute folder', "write file:///folder, with three slashes")
    if ".." in path.split("/"):
        raise BadTier(f'"{text}" leads through ..', "write the folder itself")
    return StoreUrl(scheme="file", bucket="", prefix=path)


def without_credentials(text: str) -> str:
    """`text` for a message: what stands before the @ of a URL in it, or in its query, is left out."""
    return re.sub(r"(://)[^/\s\"']*@|(\w://[^\s\"'?]*\?)[^\s\"']*", lambda match: f"{match[1]}...@" if match[1] else f"{match[2]}...", text)
