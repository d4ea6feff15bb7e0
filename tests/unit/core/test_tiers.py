from __future__ import annotations

import pytest

from surefoot.core.tiers import BadTier, StoreUrl, parse_store_url, parse_tier, store_urls, without_credentials


def test_stores_are_told_from_the_tiers_of_this_machine() -> None:
    tiers = ("memory", "disk", "s3://bucket/a/b/", "file:///mnt/with%20space/")
    assert [str(url) for url in store_urls(tiers)] == ["s3://bucket/a/b", "file:///mnt/with space"]
    assert parse_tier("memory") == "memory"
    assert parse_store_url("s3://bucket") == StoreUrl(scheme="s3", bucket="bucket", prefix="")


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("disc", "did you mean disk?"),
        ("memroy", "did you mean memory?"),
        ("nowhere", "write memory, disk, s3://bucket/prefix or file:///folder"),
        ("s3a://bucket/x", "did you mean s3://?"),
        ("files:///x", "did you mean file://?"),
        ("s3://Bucket/x", "3 to 63"),
        ("s3://bucket/a/../b", "write s3://bucket/prefix"),
        ("s3://bucket/a//b", "write s3://bucket/prefix"),
        ("file:///", "three slashes"),
        ("file:///a/../b", "write the folder itself"),
        ("s3://[x/y", "write s3://"),
    ],
)
def test_what_is_no_tier_is_refused_with_the_nearest(text: str, hint: str) -> None:
    with pytest.raises(BadTier) as caught:
        parse_tier(text)
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    "text",
    [
        "s3://AKIAKEY:hidden@bucket/prefix",
        "s3://AKIAKEY:hidden/bucket",
        "s3://hidden@bucket/prefix",
        "s3://bucket/prefix?X-Amz-Signature=hidden",
        "s3://bucket/prefix#hidden",
        "file://user:hidden@/folder",
        "gs://user:hidden@bucket/folder",
    ],
)
def test_credentials_in_a_url_are_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(BadTier, match="credentials never stand in a config") as caught:
        parse_store_url(text)
    assert "hidden" not in caught.value.what + caught.value.hint


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('tiers=["disk","s3://key:hidden@bucket/p"]', 'tiers=["disk","s3://...@bucket/p"]'),
        ("s3://bucket/p?X-Amz-Signature=hidden", "s3://bucket/p?..."),
        ("s3://bucket/p and a?b", "s3://bucket/p and a?b"),
        ("run.name=a@b", "run.name=a@b"),
    ],
)
def test_a_message_repeats_no_credentials(text: str, told: str) -> None:
    assert without_credentials(text) == told
