"""Media: what is fetched, what is refused, and what never reaches a decoder."""

from __future__ import annotations

import base64
import contextlib
import io
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from plugins.support.errors import UsageError
from triton_repo.frontend.chat import MediaReference
from triton_repo.frontend.fetch import FetchLimits, _resolve, fetch
from triton_repo.frontend.geometry import VisionGeometry
from triton_repo.frontend.media import IMAGE_FORMATS, MediaPolicy, load_media

LOOPBACK = FetchLimits(max_bytes=1000, connect_s=1, read_s=0.4, total_s=0.8, allow_private=True)


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        path = self.path
        if path == "/ok":
            self._answer(200, b"content")
        elif path == "/large":
            self._answer(200, b"x" * 2000)
        elif path == "/unannounced":
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"x" * 2000)
        elif path == "/lies":
            self.send_response(200)
            self.send_header("Content-Length", "10000000000")
            self.end_headers()
        elif path == "/slow":
            self.send_response(200)
            self.end_headers()
            for _ in range(8):
                self.wfile.write(b"x")
                self.wfile.flush()
                time.sleep(0.2)
        elif path == "/slow-image":
            time.sleep(0.4)
            self._answer(200, image("PNG", (32, 32)))
        elif path in ("/dripping", "/dripping-headers"):
            # Never silent for as long as a read may take, and never done.
            self.send_response(200)
            if path == "/dripping":
                self.end_headers()
                piece = b"x"
            else:
                self.flush_headers()
                piece = b"X-A: b\r\n"
            with contextlib.suppress(OSError):
                for _ in range(40):
                    self.wfile.write(piece)
                    self.wfile.flush()
                    time.sleep(0.25)
        elif path == "/silent":
            time.sleep(1)
        elif path.startswith("/redirect?"):
            self.send_response(302)
            self.send_header("Location", path.removeprefix("/redirect?"))
            self.send_header("Content-Length", "0")
            self.end_headers()
        else:
            self._answer(404, b"secret error page")

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def web() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def refused(url: str, limits: FetchLimits = LOOPBACK) -> str:
    with pytest.raises(UsageError) as caught:
        fetch(url, limits)
    assert caught.value.where == "image_url"
    return str(caught.value)


def test_fetch(web: str) -> None:
    assert fetch(f"{web}/ok", LOOPBACK) == b"content"
    assert fetch(f"{web}/redirect?/ok", LOOPBACK) == b"content"


@pytest.mark.parametrize("path", ["large", "unannounced", "lies"])
def test_size_limit(web: str, path: str) -> None:
    assert "too large" in refused(f"{web}/{path}")


@pytest.mark.parametrize("path", ["slow", "silent", "dripping", "dripping-headers"])
def test_time_limits(web: str, path: str) -> None:
    started = time.monotonic()
    message = refused(f"{web}/{path}")
    # Without a limit on the whole, the drip would go on for ten seconds.
    assert time.monotonic() - started < 6
    assert path == "silent" or "took too long" in message


def test_status(web: str) -> None:
    message = refused(f"{web}/missing")
    assert "404" in message and "secret" not in message


@pytest.mark.parametrize("target", ["ftp://HOST/ok", "file:///etc/passwd", "gopher://HOST/ok"])
def test_redirects_are_checked(web: str, target: str) -> None:
    # The very server that would answer if it were asked.
    target = target.replace("HOST", web.removeprefix("http://"))
    assert "scheme that is not allowed" in refused(f"{web}/redirect?{target}")


def test_redirects_are_counted(web: str) -> None:
    three = "/redirect?" * 3 + "/ok"
    assert fetch(web + three, LOOPBACK) == b"content"
    assert "redirected too often" in refused(f"{web}/redirect?{three}")


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1/x", "http://localhost:1/x", "http://[::1]/x", "http://10.0.0.1/x",
        "http://169.254.169.254/latest/meta-data", "http://192.168.1.1/", "http://0.0.0.0/",
        "http://[::ffff:127.0.0.1]/", "http://2130706433/", "http://0x7f.1/", "http://100.64.0.1/",
        "http://[fe80::1]/", "http://224.0.0.1/",
        # IPv4 addresses inside of IPv6 ones: mapped, compatible, translated, 6to4, NAT64.
        "http://[::ffff:10.0.0.1]/", "http://[::10.0.0.1]/", "http://[::ffff:0:10.0.0.1]/",
        "http://[2002:7f00:1::]/", "http://[64:ff9b::10.0.0.1]/", "http://[64:ff9b:1::a00:1]/",
        # Of one site, of a relay, and for documents.
        "http://[fec0::1]/", "http://[fd00::1]/", "http://192.88.99.1/", "http://[2001:db8::1]/",
    ],
)  # fmt: skip
def test_private_addresses(url: str) -> None:
    message = refused(url, FetchLimits(connect_s=0.5, read_s=0.5))
    assert "not public" in message or "cannot be resolved" in message


@pytest.mark.parametrize(
    "address", ["93.184.216.34", "2606:4700::1111", "64:ff9b::93.184.216.34", "2002:5db8:d822::1"]
)
def test_public_addresses(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    entry = (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 80))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_args, **_kwargs: [entry])
    assert _resolve("x", 80, FetchLimits(), "image_url") == entry


@pytest.mark.parametrize("private", ["10.0.0.1", "::1"])
def test_one_private_address_among_public_ones(
    private: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import socket

    entries = [(socket.AF_INET, 1, 6, "", (a, 80)) for a in ("93.184.216.34", private)]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_args, **_kwargs: entries)
    assert "not public" in refused("http://mixed.example/x", FetchLimits())


def test_the_limits_that_the_documentation_names() -> None:
    text = " ".join((Path(__file__).parents[2] / "docs" / "serving.md").read_text().split())
    limits = FetchLimits()
    assert (limits.total_s, limits.request_s) == (20, 60)
    assert "an item may take 20 seconds, all items of a request a minute" in text
    assert IMAGE_FORMATS == ("PNG", "JPEG", "WEBP", "GIF", "BMP")
    assert "Images are PNG, JPEG, WebP, GIF or BMP." in text


def test_all_items_together_have_a_time_limit(web: str) -> None:
    limits = FetchLimits(read_s=1, total_s=0.6, request_s=1.0, allow_private=True)
    urls = [f"data:image/png;base64,{base64.b64encode(image('PNG', (32, 32))).decode()}"] * 3
    references = [MediaReference("image", u) for u in [*urls, *[f"{web}/slow-image"] * 9]]
    started = time.monotonic()
    with pytest.raises(UsageError, match="took too long"):
        load_media(references, {}, VisionGeometry(), MediaPolicy(fetch=limits))
    # One by one they would take 3.6 seconds, none of them too long for itself.
    assert time.monotonic() - started < 2.5


def test_a_redirect_to_a_private_address(web: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    real = socket.getaddrinfo
    port = int(web.rpartition(":")[2])
    calls: list[str] = []

    def resolve(host: str, *args: Any, **kwargs: Any) -> Any:
        calls.append(host)
        if host == "public.example":
            # The check sees a public address, the connection is made to the test server.
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", _Public(("127.0.0.1", port)))]
        return real(host, *args, **kwargs)

    class _Public(tuple):  # type: ignore[type-arg]
        def __getitem__(self, index: Any) -> Any:
            return "93.184.216.34" if index == 0 else super().__getitem__(index)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    limits = FetchLimits(connect_s=1, read_s=1)
    assert "not public" in refused(f"http://public.example/redirect?{web}/ok", limits)
    # The name is resolved once per fetch: what was checked is what is connected to.
    assert calls == ["public.example", "127.0.0.1"]


@pytest.mark.parametrize(
    "url",
    ["file:///etc/passwd", "/etc/passwd", "", "ftp://x", "javascript:1", "http://", "http:///x",
     "http://x:99999/", "data:", "data:image/png;base64,!!!", "data:image/png;base64,AAA",
     "HTTP://user:pw@[::1/"],
)  # fmt: skip
def test_urls_that_are_refused(url: str) -> None:
    refused(url)


def test_data_uris() -> None:
    assert fetch("data:image/png;base64," + base64.b64encode(b"abc").decode(), LOOPBACK) == b"abc"
    assert fetch("data:,a%20b", LOOPBACK) == b"a b"
    assert "too large" in refused("data:x;base64," + "A" * 4000)


def test_local_files(tmp_path: Path) -> None:
    allowed = tmp_path / "media"
    allowed.mkdir()
    (allowed / "a").write_bytes(b"a")
    (tmp_path / "b").write_bytes(b"b")
    (allowed / "link").symlink_to(tmp_path / "b")
    limits = FetchLimits(local_root=allowed)
    assert fetch(f"file://{allowed}/a", limits) == b"a"
    for bad in ("../b", "link", "missing"):
        assert str(tmp_path) not in refused(f"file://{allowed}/{bad}", limits)


def test_allowed_hosts(web: str) -> None:
    limits = FetchLimits(allow_private=True, allowed_hosts=frozenset({"example.org"}))
    assert "not allowed" in refused(f"{web}/ok", limits)


def image(form: str, size: tuple[int, int], frames: int = 1) -> bytes:
    buffer = io.BytesIO()
    first = Image.new("RGB", size)
    rest = [Image.new("RGB", size, (i, 0, 0)) for i in range(1, frames)]
    first.save(buffer, form, **({"save_all": True, "append_images": rest} if rest else {}))
    return buffer.getvalue()


def load(modality: str, content: bytes, **kwargs: Any) -> Any:
    return load_media(
        [MediaReference(modality, data=content)], kwargs, VisionGeometry(), MediaPolicy()
    )[0]


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_image_formats(form: str) -> None:
    assert load("image", image(form, (512, 512))).tokens == 256


@pytest.mark.parametrize("form", ["TIFF", "EPS", "PDF", "ICO", "PPM"])
def test_other_formats_never_reach_their_decoder(form: str) -> None:
    # One of them would start a program.
    with pytest.raises(UsageError, match="is not a readable image"):
        load("image", image(form, (64, 64)))


def test_a5_19_an_animated_image_is_one_image() -> None:
    # A5.19: frames are a matter of videos.
    animated, still = image("GIF", (256, 256), frames=4), image("GIF", (256, 256))
    assert load("image", animated).tokens == load("image", still).tokens == 64


@pytest.mark.parametrize("modality", ["image", "video"])
def test_options_of_an_item_are_heard_by_its_count_and_its_key(modality: str) -> None:
    content = image("GIF", (512, 512), frames=4)

    def one(options: dict[str, Any], kwargs: dict[str, Any]) -> Any:
        reference = MediaReference(modality, data=content, options=options)
        return load_media([reference], kwargs, VisionGeometry(), MediaPolicy())[0]

    small = {"size": {"shortest_edge": 1024, "longest_edge": 16384}}
    by_item, by_request = one(small, {}), one({}, {f"{modality}s_kwargs": small})
    assert by_item == by_request
    assert by_item.tokens <= 16 < one({}, {}).tokens
    with pytest.raises(UsageError) as caught:
        one({"max_pixels": "x"}, {})
    assert caught.value.where == f"{modality}_url: mm_processor_kwargs max_pixels"
    # It is the innermost scope, for its own item only.
    both = load_media(
        [MediaReference(modality, data=content, options=o) for o in (small, {})],
        {"size": {"longest_edge": 65536}},
        VisionGeometry(),
        MediaPolicy(max_items={}),
    )
    assert both[0].tokens == by_item.tokens < both[1].tokens < one({}, {}).tokens


def test_keys_depend_on_the_options_of_their_own_modality() -> None:
    content = image("GIF", (64, 64))

    def keys(**kwargs: Any) -> list[int]:
        references = [MediaReference(m, data=content) for m in ("image", "video")]
        return [i.key for i in load_media(references, kwargs, VisionGeometry(), MediaPolicy())]

    plain, video = keys(fps=2), keys(fps=2, videos_kwargs={"fps": 4})
    assert video[0] == plain[0] and video[1] != plain[1]
    assert len({*plain, *keys(fps=3), *keys()}) == 6


def test_options_of_an_item_need_trust_too() -> None:
    policy = MediaPolicy(trust_request_kwargs=False)

    def one(**options: Any) -> Any:
        reference = MediaReference("image", data=image("PNG", (64, 64)), options=options)
        return load_media([reference], {}, VisionGeometry(), policy)[0]

    with pytest.raises(UsageError, match="not allowed per request"):
        one(max_pixels=1 << 40)
    # How much of it a client wants to be looked at is no option of a processor.
    assert one(detail="low").tokens == one().tokens


def test_video_frames() -> None:
    video = image("GIF", (256, 256), frames=4)
    assert load("video", video).tokens == 2 * 64
    flat = load("video", video, images_kwargs={"size": {"longest_edge": 1024}})
    assert flat.tokens == 2 * 64


def test_audio() -> None:
    import numpy as np
    import soundfile

    buffer = io.BytesIO()
    soundfile.write(buffer, np.zeros(16000, dtype=np.float32), 16000, format="WAV")
    assert load("audio", buffer.getvalue()).tokens == 13


@pytest.mark.parametrize(
    "content",
    [b"", b"x", b"<html>", image("PNG", (64, 64))[:60], b"\x89PNG\r\n\x1a\n" + b"\0" * 40],
)
def test_broken_images(content: bytes) -> None:
    with pytest.raises(UsageError) as caught:
        load("image", content or b"\0")
    assert caught.value.where == "image_url"


# More than the decoder itself would take, and more than this server takes.
@pytest.mark.parametrize("size", [(20000, 20000), (8500, 8500)])
def test_decompression_bomb(size: tuple[int, int]) -> None:
    small_file = io.BytesIO()
    Image.new("1", size).save(small_file, "PNG")
    assert len(small_file.getvalue()) < 100_000
    with pytest.raises(UsageError, match="too many pixels"):
        load("image", small_file.getvalue())


def test_too_many_items_are_refused_before_any_is_fetched() -> None:
    references = [MediaReference("image", "http://127.0.0.1:1/x")] * 65
    with pytest.raises(UsageError, match="too many items"):
        load_media(references, {}, VisionGeometry(), MediaPolicy())


def test_a_request_cannot_blow_up_an_item() -> None:
    policy = MediaPolicy(max_item_tokens=100)
    with pytest.raises(UsageError, match="too many tokens"):
        load_media(
            [MediaReference("image", data=image("PNG", (512, 512)))],
            {"size": {"shortest_edge": 1 << 30, "longest_edge": 1 << 30}},
            VisionGeometry(),
            policy,
        )
