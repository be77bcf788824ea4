"""Data URLs as clients really write them, and as they get broken."""

from __future__ import annotations

import base64
import binascii
import contextlib
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preprocess.config import MediaLimits
from preprocess.data_url import decode_data_url
from preprocess.errors import ClientError
from preprocess.image import encoded_bytes
from preprocess.wire import ImagePart

DATA = bytes(range(256)) + b"\xfb\xff\xfe"  # every byte, and + / in base64
B64 = base64.b64encode(DATA).decode()


@pytest.mark.parametrize(
    "url",
    [
        f"data:image/png;base64,{B64}",
        f"DATA:image/png;BASE64,{B64}",
        f"data:;base64,{B64}",
        f"data:application/octet-stream;base64,{B64}",
        f"data:text/html;base64,{B64}",
        f"data:image/jpeg;charset=utf-8;name=a.jpg;base64,{B64}",
        f"  data:image/png;base64,{B64}\n",
        f"data:image/png;base64, {B64[:40]}\r\n\t{B64[40:]}",
        f"data:image/png;base64,{quote(B64, safe='')}",
        f"data:image/png;base64,{B64.rstrip('=')}",
        f"data:image/png;base64,{base64.urlsafe_b64encode(DATA).decode()}",
        f"data:image/png;base64,{base64.urlsafe_b64encode(DATA).decode().rstrip('=')}",
        f"data:image/png,{quote(DATA)}",
    ],
)
def test_every_usual_spelling_is_understood(url: str) -> None:
    assert decode_data_url(url, 1000) == DATA


@given(data=st.binary(max_size=100))
def test_any_bytes_come_back(data: bytes) -> None:
    assert decode_data_url(f"data:image/png;base64,{base64.b64encode(data).decode()}", 100) == data


@given(text=st.text('AB/+-_=%2 \n"\\', max_size=12))
def test_what_is_read_fast_is_what_the_standard_library_reads(text: str) -> None:
    with contextlib.suppress(binascii.Error):
        expected = binascii.a2b_base64(text, strict_mode=True)
        assert decode_data_url(f"data:;base64,{text}", 100) == expected


@pytest.mark.parametrize(
    ("url", "code", "words"),
    [
        ("", "invalid_data_url", "not a data: URL"),
        ("cat.jpg", "invalid_data_url", "not a data: URL"),
        ("file:///etc/passwd", "invalid_data_url", "not a data: URL"),
        (B64, "invalid_data_url", "not a data: URL"),
        ("https://example.com/cat.jpg", "remote_image_refused", "https addresses of pictures are not fetched"),
        ("HTTP://example.com/cat.jpg", "remote_image_refused", "http addresses of pictures are not fetched"),
        ("data:image/png;base64" + B64, "invalid_data_url", "no comma"),
        ("data:image/png;base64,@@@@", "invalid_data_url", "damaged"),
        ("data:image/png;base64,abcde", "invalid_data_url", "damaged"),
        ("data:image/png;base64,ab=cd", "invalid_data_url", "damaged"),
        *(
            (f"data:image/png;base64,{text}", "invalid_data_url", "neither base64 nor percent-encoded")
            for text in ("жук", "é", "\ud800", "AAAA\udfff")
        ),
        ("data:image/png,\ud800", "invalid_data_url", "neither base64 nor percent-encoded"),
        ("data:image/png;base64," + "A" * 2000, "image_too_large", "1,500 bytes; at most 1,000"),
        ("data:image/png;base64," + "A" * 9000, "image_too_large", "at most 1,000"),
        ("data:image/png," + "A" * 1001, "image_too_large", "1,001 bytes; at most 1,000"),
    ],
)
def test_broken_ones_are_refused_by_what_is_wrong(url: str, code: str, words: str) -> None:
    with pytest.raises(ClientError) as caught:
        decode_data_url(url, 1000)
    assert caught.value.code == code
    assert words in caught.value.message


@given(url=st.text(max_size=60) | st.text(max_size=60).map("data:image/png;base64,".__add__))
def test_garbage_never_crashes(url: str) -> None:
    with contextlib.suppress(ClientError):
        assert len(decode_data_url(url, 1000)) <= 1000


def test_a_part_is_either_bytes_or_a_url() -> None:
    limits = MediaLimits()
    assert encoded_bytes(ImagePart(data=b"raw"), limits) == b"raw"
    assert encoded_bytes(ImagePart(data_url="data:image/png;base64,cmF3"), limits) == b"raw"
