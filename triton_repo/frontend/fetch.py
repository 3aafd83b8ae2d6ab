"""Fetching media that a client names: http(s) and data URIs, within limits.

Addresses are checked at the connection itself: the name is resolved once, refused when any of its
addresses is not public, and the very address that was checked is connected to. Redirects are
followed by hand, each one checked again.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import ipaddress
import socket
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes, urljoin, urlsplit

import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection

from plugins.support.errors import UsageError
from triton_repo.frontend.problems import problem

_CHUNK = 64 * 1024
# IPv6 networks whose last 32 bits are an IPv4 address that a gateway, or the machine, goes on to:
# compatible (RFC 4291), translated (RFC 2765) and NAT64 (RFC 6052).
_IPV4_INSIDE = tuple(
    ipaddress.IPv6Network(network) for network in ("::/96", "::ffff:0:0:0/96", "64:ff9b::/96")
)
# What the standard library takes for public: NAT64 of one site (RFC 8215), addresses of one site
# (RFC 3879), segment routing (RFC 9602), relays of 6to4 (RFC 7526).
_NOT_PUBLIC = tuple(
    ipaddress.ip_network(network)
    for network in ("64:ff9b:1::/48", "fec0::/10", "5f00::/16", "192.88.99.0/24")
)


@dataclass(frozen=True)
class FetchLimits:
    """What a fetch may cost.

    Attributes:
        max_bytes: size of one item.
        connect_s, read_s, total_s: time-outs for the connection, between bytes, and for all.
        request_s: for all fetches of one request together.
        redirects: how many redirects are followed.
        allow_private: allow loopback and private addresses (tests, in-house stores).
        allowed_hosts: if not empty, only these host names.
        local_root: directory below which `file://` URLs are read; None refuses them.
    """

    max_bytes: int = 32 << 20
    connect_s: float = 3.0
    read_s: float = 5.0
    total_s: float = 20.0
    request_s: float = 60.0
    redirects: int = 3
    allow_private: bool = False
    allowed_hosts: frozenset[str] = frozenset()
    local_root: Path | None = None


def fetch(url: str, limits: FetchLimits, parameter: str = "image_url") -> bytes:
    """The bytes behind `url`. Raises UsageError, whose message never holds the body or a path."""
    scheme = url[:16].partition(":")[0].lower()
    if scheme == "data":
        return _decode_data_uri(url, limits, parameter)
    if scheme == "file":
        return _read_local(url, limits, parameter)
    if scheme not in ("http", "https"):
        raise problem(parameter, "has a scheme that is not allowed", expected="http, https or data")
    deadline = time.monotonic() + limits.total_s
    for _ in range(limits.redirects + 1):
        with _Cutoff(deadline) as cutoff:
            try:
                body, location = _get(url, limits, cutoff, parameter)
            except UsageError:
                # What comes of a connection that was cut is not the reason.
                if not cutoff.passed:
                    raise
        if cutoff.passed:
            raise problem(parameter, "took too long", expected=f"<= {limits.total_s:g} s")
        if location is None:
            return body
        url = urljoin(url, location)
        if urlsplit(url).scheme not in ("http", "https"):
            raise problem(parameter, "is redirected to a scheme that is not allowed")
    raise problem(parameter, "is redirected too often", expected=f"<= {limits.redirects} redirects")


class RequestFetches:
    """The fetches of one request: many slow items must not hold a thread for many time-outs."""

    def __init__(self, limits: FetchLimits) -> None:
        self._limits = limits
        self._end = time.monotonic() + limits.request_s

    def fetch(self, url: str, parameter: str) -> bytes:
        """As the function of that name, in the time that is left."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise problem(
                parameter, "the media of this request took too long",
                expected=f"<= {self._limits.request_s:g} s",
            )  # fmt: skip
        limits = replace(self._limits, total_s=min(self._limits.total_s, left))
        return fetch(url, limits, parameter)


def _get(
    url: str, limits: FetchLimits, cutoff: _Cutoff, parameter: str
) -> tuple[bytes, str | None]:
    """Body, or the target of a redirect."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise problem(parameter, "is not a valid URL") from None
    if not host:
        raise problem(parameter, "has no host")
    if limits.allowed_hosts and host.lower() not in limits.allowed_hosts:
        raise problem(parameter, "names a host that is not allowed", found=host)
    address = _resolve(host, port or (443 if parts.scheme == "https" else 80), limits, parameter)
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    timeout = urllib3.Timeout(connect=limits.connect_s, read=limits.read_s)
    secure = parts.scheme == "https"
    pool_class = urllib3.HTTPSConnectionPool if secure else urllib3.HTTPConnectionPool
    pool = pool_class(host, port, timeout=timeout, retries=False, maxsize=1)
    pool.ConnectionCls = _pinned(HTTPSConnection if secure else HTTPConnection, address, cutoff)
    try:
        response = pool.request(
            "GET",
            target,
            preload_content=False,
            redirect=False,
            headers={"User-Agent": "trtllm-toolchain", "Accept-Encoding": "identity"},
        )
        if response.status in (301, 302, 303, 307, 308):
            return b"", response.headers.get("Location", "")
        if response.status != 200:
            raise problem(
                parameter, "could not be fetched", expected="status 200", found=response.status
            )
        declared = response.headers.get("Content-Length", "")
        if declared.isdecimal() and int(declared) > limits.max_bytes:
            raise _too_large(parameter, limits)
        body = bytearray()
        for chunk in response.stream(_CHUNK, decode_content=False):
            body += chunk
            if len(body) > limits.max_bytes:
                raise _too_large(parameter, limits)
        return bytes(body), None
    except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
        raise problem(parameter, "could not be fetched", found=type(error).__name__) from None
    finally:
        pool.close()


def _resolve(host: str, port: int, limits: FetchLimits, parameter: str) -> tuple[Any, ...]:
    """The first socket address of `host`, after all of them are seen to be public."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise problem(parameter, "names a host that cannot be resolved") from None
    if not limits.allow_private:
        for entry in found:
            if not _is_public(ipaddress.ip_address(str(entry[4][0]).partition("%")[0])):
                raise problem(parameter, "names an address that is not public")
    return found[0]


def _is_public(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """Whether an address, and the IPv4 address that it may hold, belong to the open internet."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if any(address in network for network in _IPV4_INSIDE):
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return _is_public(inner)
    return (
        address.is_global
        and not address.is_multicast
        and not any(address in network for network in _NOT_PUBLIC)
    )


class _Cutoff:
    """Cuts a connection at a point in time, whatever it is doing then.

    A socket's own time-out starts anew with every byte: a server that sends one byte a second,
    be it of the header, would hold a thread for ever.

    Attributes:
        passed: whether that time has come.
    """

    def __init__(self, deadline: float) -> None:
        self.passed = False
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._timer = threading.Timer(max(deadline - time.monotonic(), 0.0), self._cut)
        self._timer.daemon = True

    def watch(self, connection: socket.socket) -> None:
        """Cut this connection too; a copy, because encryption takes the socket for itself."""
        with self._lock:
            self._socket = connection.dup()
            if self.passed:
                self._shut()

    def _cut(self) -> None:
        with self._lock:
            self.passed = True
            self._shut()

    def _shut(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> _Cutoff:
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        with self._lock:
            if self._socket is not None:
                self._socket.close()
                self._socket = None


def _pinned(base: Any, entry: tuple[Any, ...], cutoff: _Cutoff) -> Any:
    """A connection class that connects to the checked address, whatever the name says by then."""
    family, kind, protocol, _, address = entry

    class Pinned(base):
        def _new_conn(self) -> socket.socket:
            connection = socket.socket(family, kind, protocol)
            try:
                connection.settimeout(self.timeout)
                connection.connect(address)
                cutoff.watch(connection)
            except OSError as error:
                connection.close()
                raise urllib3.exceptions.NewConnectionError(self, str(error)) from error
            return connection

    return Pinned


def _decode_data_uri(url: str, limits: FetchLimits, parameter: str) -> bytes:
    header, comma, payload = url.partition(",")
    if not comma:
        raise problem(parameter, "is not a valid data URI", expected="data:TYPE;base64,DATA")
    # Four characters carry three bytes; checked before anything is decoded.
    if len(payload) * 3 // 4 > limits.max_bytes + 3:
        raise _too_large(parameter, limits)
    if not header.lower().endswith(";base64"):
        return unquote_to_bytes(payload)
    try:
        return base64.b64decode("".join(payload.split()), validate=True)
    except (binascii.Error, ValueError):
        raise problem(parameter, "is not valid base64") from None


def _read_local(url: str, limits: FetchLimits, parameter: str) -> bytes:
    if limits.local_root is None:
        raise problem(parameter, "names a local file, which is not allowed")
    root = limits.local_root.resolve()
    path = Path(unquote_to_bytes(urlsplit(url).path).decode("utf-8", "replace")).resolve()
    if not path.is_relative_to(root) or not path.is_file():
        raise problem(parameter, "names a local file that is not allowed")
    if path.stat().st_size > limits.max_bytes:
        raise _too_large(parameter, limits)
    return path.read_bytes()


def _too_large(parameter: str, limits: FetchLimits) -> Exception:
    return problem(parameter, "is too large", expected=f"<= {limits.max_bytes} bytes")
