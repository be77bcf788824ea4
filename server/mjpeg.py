"""MJPEG over HTTP: an address → its JPEG pictures, each as soon as its last byte has come.

What cameras send is called multipart, but boundaries, types and lengths of its parts are often wrong or missing. A
picture itself says where it begins and ends, so nothing else is believed:

    … --frame CRLF … CRLF CRLF │ FF D8   segments, each with its length   FF DA … scan … FF D9 │ CRLF --frame …
                                └──────────────────────── a picture ──────────────────────────┘

An address that gives one picture at a time (`image/jpeg`) is a source of one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from preprocess.errors import BeholderError, ClientError

if TYPE_CHECKING:
    import httpx

MAX_PICTURE_BYTES: Final = 32 << 20
"""Of one picture, and of what comes between two."""
_START: Final = b"\xff\xd8\xff"
_MARKER: Final = re.compile(rb"\xff[\xc0-\xcf\xd8-\xfe]")
"""What ends a scan; in its data FF is followed by 00 or by a restart."""
_RESTARTS: Final = range(0xD0, 0xD8)
_BEGIN, _END, _SCAN, _FILL, _ALONE = 0xD8, 0xD9, 0xDA, 0xFF, 0x01
_TYPES: Final = ("multipart/", "image/", "video/x-motion-jpeg", "video/x-jpeg", "video/mjpeg", "application/octet-")
_MAX_REQUESTS: Final = 7
"""Five redirects and a password."""
_CHALLENGE: Final = re.compile(r"(?:^|,)\s*(?=(?:basic|digest)(?:\s|$))", re.IGNORECASE)
"""Where one begins; some cameras put several into one line."""
_BAD_ADDRESS: Final = "it is not a valid address; in a user or a password, write @ as %40, / as %2F, : as %3A, ? as %3F"


class Pictures:
    """Cuts a stream of bytes into the JPEG pictures in it. What is damaged or too large is passed over."""

    def __init__(self, max_bytes: int = MAX_PICTURE_BYTES) -> None:
        self.num_skipped = 0
        """Bytes since the last picture that belong to none."""
        self._max_bytes = max_bytes
        self._data = bytearray()
        """From the beginning of a picture on, once one was found."""
        self._is_inside = False
        self._at = 0
        """Up to there the picture has been read."""
        self._in_scan = False

    def feed(self, more: bytes) -> Iterator[bytes]:
        """The pictures that are whole now."""
        self._data += more
        while self._is_inside or self._find_start():
            try:
                end = self._find_end()
            except ValueError:  # the next one is there already, or one is to be looked for behind this beginning
                self._skip(self._at if self._data.startswith(_START[:2], self._at) else 2)
                continue
            if end is None:
                if len(self._data) <= self._max_bytes:
                    return
                self._skip(2)
                continue
            picture = bytes(self._data[:end])
            self._skip(end)
            self.num_skipped = 0
            yield picture

    def _find_start(self) -> bool:
        place = self._data.find(_START)
        self._skip(place if place >= 0 else max(len(self._data) - len(_START) + 1, 0))
        self._is_inside = place >= 0
        self._at, self._in_scan = 2, False
        return self._is_inside

    def _find_end(self) -> int | None:
        """Where the picture ends, None when that has not come yet. Raises ValueError when it is damaged."""
        data = self._data
        while self._at < len(data):
            if self._in_scan:
                found = _MARKER.search(data, self._at)
                if found is None:
                    self._at = len(data) - 1  # it may be the first half of a marker
                    return None
                self._at = found.start()
            if self._at + 1 >= len(data):
                return None
            if data[self._at] != 0xFF:
                raise ValueError
            marker = data[self._at + 1]
            if marker == _END:
                return self._at + 2
            if marker == _BEGIN:
                raise ValueError  # the next one, before this one was whole
            self._in_scan = False
            if marker == _FILL:
                self._at += 1
            elif marker == _ALONE or marker in _RESTARTS:
                self._at += 2
            elif self._at + 3 >= len(data):
                return None
            else:
                self._at += 2 + int.from_bytes(data[self._at + 2 : self._at + 4])
                self._in_scan = marker == _SCAN
        return None

    def _skip(self, num_bytes: int) -> None:
        del self._data[:num_bytes]
        self.num_skipped += num_bytes
        self._is_inside = False


def pictures_of(address: str, name: str, timeout_s: float, is_stopped: Callable[[], bool]) -> Iterator[bytes]:
    """The pictures of an address until it ends, or until nobody wants more of them.

    Args:
        address: http or https, perhaps with a user and a password, which are for this address alone.
        name: What the address is called in errors.
        timeout_s: How long it may take to answer, and to send more.
        is_stopped: Asked whenever something has come, be it a picture or not.

    Raises:
        ClientError: It cannot be reached, refuses, sends something else, or ends. Nothing that says what is wrong
            with the address itself is passed on, since that would quote the password.
    """
    import httpx

    try:
        # Cameras have certificates that nobody has signed, and no proxy of the environment is meant for them.
        with httpx.Client(verify=False, timeout=timeout_s, trust_env=False) as client:
            yield from _received(client, address, name, is_stopped)
    except (BeholderError, MemoryError):
        raise
    except httpx.TimeoutException:
        raise _unread(name, f"nothing came for {timeout_s:g} s") from None
    except (httpx.InvalidURL, UnicodeError):  # of the parser, of a name with a label that is too long
        raise _unread(name, _BAD_ADDRESS) from None
    except httpx.LocalProtocolError:  # quotes the header that it will not send
        raise _unread(name, "it cannot be asked for in HTTP") from None
    except httpx.HTTPError as error:
        raise _unread(name, str(error) or type(error).__name__) from None
    except Exception as error:  # whatever a camera can make the client stumble over
        raise _unread(name, type(error).__name__) from None
    if not is_stopped():
        raise _unread(name, "the connection has ended")


def _received(client: httpx.Client, address: str, name: str, is_stopped: Callable[[], bool]) -> Iterator[bytes]:
    pictures = Pictures()
    response = _opened(client, address, name)
    try:
        if response.status_code != 200:
            raise _unread(name, f"it answers {response.status_code} {response.reason_phrase}")
        kind = response.headers.get("content-type", "").strip().lower()
        if kind and not kind.startswith(_TYPES):
            raise _unread(name, f"it sends {kind[:80]}, expected MJPEG (multipart/x-mixed-replace)")
        found = False
        for chunk in response.iter_raw():
            for picture in pictures.feed(chunk):
                found = True
                yield picture
            if is_stopped():
                return
            if pictures.num_skipped > MAX_PICTURE_BYTES:
                break
        if not found or pictures.num_skipped > MAX_PICTURE_BYTES:
            raise _unread(name, "there are no JPEG pictures in what it sends")
    finally:
        response.close()


def _opened(client: httpx.Client, address: str, name: str) -> httpx.Response:
    """What the address answers in the end, whose body has yet to be read; the body of a redirect never is."""
    import httpx

    url = httpx.URL(address)
    user, password = url.username, url.password
    request = _request(client, url)
    to_answer = bool(user or password)
    for _ in range(_MAX_REQUESTS):
        response = client.send(request, stream=True)
        following = response.next_request
        try:
            if response.status_code == 401 and to_answer and _is_at_home(response.url, url):
                to_answer = False
                following = _with_password(_request(client, response.url), response, user, password, name)
        except BaseException:
            response.close()
            raise
        if following is None:
            return response
        response.close()
        request = following
    raise _unread(name, "it redirects too often")


def _request(client: httpx.Client, url: httpx.URL) -> httpx.Request:
    url = url.copy_with(username=None, password=None)  # httpx would send them unasked, and errors might name them
    return client.build_request("GET", url, headers={"accept-encoding": "identity"})


def _is_at_home(url: httpx.URL, first: httpx.URL) -> bool:
    """Whether it is the machine that the password is for, reached no less safely than was asked for."""
    return url.host == first.host and (url.scheme == "https" or (url.scheme, url.port) == (first.scheme, first.port))


def _with_password(
    request: httpx.Request, refusal: httpx.Response, user: str, password: str, name: str
) -> httpx.Request | None:
    """The request as the refusal wants it: by Digest (RFC 7616), which does not show the password, if that is offered.
    None where the password is not what it asks for.
    """
    import httpx

    lines = refusal.headers.get_list("www-authenticate")
    challenges = [challenge for line in lines for challenge in _CHALLENGE.split(line)]
    digests = [challenge for challenge in challenges if challenge.lower().startswith("digest")]
    for challenge in digests:
        asked = httpx.Response(401, headers=[(b"www-authenticate", challenge.encode())], request=request)
        flow = httpx.DigestAuth(user, password).auth_flow(request)
        next(flow)
        with suppress(httpx.ProtocolError, LookupError, ValueError, NotImplementedError, StopIteration):
            return flow.send(asked)
    if digests:
        raise _unread(
            name, "it asks for the password in a way that is not known; expected Digest (MD5 or SHA, qop auth) or Basic"
        )
    if lines and not any(challenge.lower().startswith("basic") for challenge in challenges):
        return None
    return next(httpx.BasicAuth(user, password).auth_flow(request))


def _unread(name: str, why: str) -> ClientError:
    return ClientError(f"{name} cannot be read: {why}", code="bad_source")
