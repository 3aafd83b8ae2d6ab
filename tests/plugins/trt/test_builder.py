"""Building: the plan on disk, the report, progress, cancelling, failures of the writer."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from plugins.support.errors import BuildError
from plugins.trt import builder
from plugins.trt.backend import load_backend
from plugins.trt.builder import build_serialized, fingerprint
from plugins.trt.messages import translate
from plugins.trt.network import Network
from plugins.trt.progress import BUILD_STEPS, make_monitor, run_cancellable
from plugins.trt.report import parse_report
from plugins.trt.weights import TensorSource, WeightPolicy
from runtime.interpreter.trace import trace


class _Steps:
    def __init__(self) -> None:
        self.total, self.notes = 0, []

    def advance(self, amount: int, note: str = "") -> None:
        assert amount >= 0
        self.total += amount
        self.notes.append(note)


def _network(mode: str = "embedded", seed: int = 0) -> Network:
    """A layer with attention over a cache and a top-k."""
    generator = torch.Generator().manual_seed(seed)
    weights = {"w": torch.randn(64, 64, generator=generator).bfloat16()}
    net = Network(
        load_backend("tensorrt_rtx"),
        source=TensorSource(weights),
        policy=WeightPolicy(mode),  # type: ignore[arg-type]
    )
    x = net.input("x", "bfloat16", (-1, 2, 64))
    cache = net.input("cache", "bfloat16", (-1, 4, 32, 16))
    write = net.input("write", "int32", (-1,))
    with net.scope("layers.0.attention"):
        w = net.unsqueeze(net.weight("w", "bfloat16", (64, 64)), (0,))
        y = net.matmul(x, w, transpose_b=True)
        q = net.transpose(net.reshape(y, (-1, 2, 4, 16)), (0, 2, 1, 3))
        k = net.kv_cache_update(cache, q, write)
        net.output(net.attention(q, k, k), "attended")
        net.output(net.topk(net.cast(y, "float32"), 3, 2)[1], "chosen")
    return net


_PROFILE = {
    "x": ((1, 2, 64), (2, 2, 64), (4, 2, 64)),
    "cache": ((1, 4, 32, 16), (2, 4, 32, 16), (4, 4, 32, 16)),
    "write": ((1,), (2,), (4,)),
}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    path = tmp_path_factory.mktemp("plan") / "rank0.generation.engine"
    steps = _Steps()
    net = _network()
    return path, build_serialized(net, _PROFILE, path, steps), steps


def test_the_plan_is_whole_on_disk(built) -> None:
    path, plan, _ = built
    assert path.stat().st_size == plan.nbytes and path.read_bytes()[:4] == b"vtrt"
    assert plan.targets == ("8.0", "8.6", "8.9", "12.0")


def test_progress_reaches_exactly_its_end(built) -> None:
    _, _, steps = built
    assert steps.total == BUILD_STEPS and "writing the plan" in steps.notes


def test_the_report_shows_the_expected_kernels(built) -> None:
    _, plan, _ = built
    report = plan.report
    assert len(report.attention_kernels()) == 1 and len(report.topk_kernels()) == 1
    assert report.cache_updates() == {"cache.updated": "cache"}
    assert report.weight_dequantisations(elements=1024) == []
    assert report.weights_bytes > 64 * 64 * 2 and report.activation_bytes > 0
    assert {t.name for t in report.inputs} == set(_PROFILE)
    assert any("layers.0.attention" in kernel.metadata for kernel in report.kernels)
    shapes = {t.name: t.shape for t in report.outputs}
    assert shapes["attended"] == (-1, 4, 2, 16)
    assert report.as_dict()["summary"] == report.summary()


def test_input_weights_leave_the_plan_small(built, tmp_path: Path) -> None:
    report = build_serialized(_network("inputs"), _PROFILE, tmp_path / "e").report
    assert report.weights_bytes < built[1].report.weights_bytes - 64 * 64


def test_a_weight_that_is_decoded_in_every_call_is_seen(tmp_path: Path) -> None:
    backend = load_backend("tensorrt_rtx")
    weights = {
        "w": torch.randn(256, 256).to(torch.float8_e4m3fn),
        "s": torch.rand(2, 2) + 0.5,
    }
    net = Network(
        backend,
        backend.capability(("8.9",), ("float8_e4m3fn",)),
        source=TensorSource(weights),
        policy=WeightPolicy("inputs"),
    )
    x = net.input("x", "bfloat16", (-1, 256))
    w = net.weight("w", "float8_e4m3fn", (256, 256))
    s = net.weight("s", "float32", (2, 2))
    decoded = net.dequantize(w, s, "bfloat16", block_shape=(128, 128))
    net.output(net.matmul(x, decoded, transpose_b=True), "y")
    plan = build_serialized(net, {"x": ((1, 256), (8, 256), (64, 256))}, tmp_path / "e")
    assert len(plan.report.weight_dequantisations()) == 1


@pytest.mark.parametrize("failing", ["raises", "short"])
def test_a_writer_that_fails_is_noticed(tmp_path: Path, monkeypatch, failing: str) -> None:
    original = builder._make_writer

    def broken(trt, file, monitor):
        class Full:
            def write(self, data) -> int:
                if failing == "raises":
                    raise OSError(28, "No space left on device")
                return file.write(bytes(data)[:10])

        return original(trt, Full(), monitor)

    monkeypatch.setattr(builder, "_make_writer", broken)
    with pytest.raises(BuildError) as caught:
        build_serialized(_network(), _PROFILE, tmp_path / "e")
    expected = "No space left" if failing == "raises" else "not the one that was built"
    assert expected in str(caught.value) and not list(tmp_path.iterdir())


def test_a_directory_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="cannot be written"):
        build_serialized(_network(), _PROFILE, tmp_path / "missing" / "e")


_INTERRUPTED = """
import os, signal, threading
from plugins.support.progress import Silent
from plugins.trt.backend import load_backend
from plugins.trt.progress import make_monitor, run_cancellable

# A process that was started in the background may have inherited an ignored signal.
signal.signal(signal.SIGINT, signal.default_int_handler)
monitor = make_monitor(load_backend("tensorrt_rtx").trt, Silent(), 0)
threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
try:
    run_cancellable(threading.Event().wait, monitor, interval_s=0.05)
except KeyboardInterrupt:
    print("interrupted, goes on:", monitor.step_complete("Building engine", 0))
"""


def test_an_interrupt_ends_the_wait_at_once() -> None:
    # In a process of its own: in a long test run the interrupt can fall into a callback of the
    # garbage collector, where exceptions are dropped, and the wait would have no end.
    done = subprocess.run(
        [sys.executable, "-c", _INTERRUPTED], capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "interrupted, goes on: False\n", done.stderr


def test_a_cancelled_build_leaves_nothing(tmp_path: Path, monkeypatch) -> None:
    def cancelled(trt, reporter, nbytes):
        monitor = make_monitor(trt, reporter, nbytes)
        monitor.cancelled = True
        return monitor

    monkeypatch.setattr(builder, "make_monitor", cancelled)
    with pytest.raises(BuildError, match="cancelled"):
        build_serialized(_network(), _PROFILE, tmp_path / "e")
    assert not list(tmp_path.iterdir())


def test_an_error_in_the_thread_reaches_the_caller() -> None:
    monitor = make_monitor(load_backend("tensorrt_rtx").trt, _Steps(), 0)

    def work() -> None:
        time.sleep(0.01)
        raise BuildError("from inside")

    with pytest.raises(BuildError, match="from inside"):
        run_cancellable(work, monitor, interval_s=0.01)


def test_the_fingerprint_depends_on_everything_that_goes_in() -> None:
    program = trace(_network())
    base = {
        "program": program,
        "weights_identity": "w1",
        "profile": _PROFILE,
        "targets": ("8.9",),
        "version": "1.7.1",
    }
    changed = {
        "program": trace(_changed()),
        "weights_identity": "w2",
        "profile": {**_PROFILE, "write": ((1,), (1,), (4,))},
        "targets": ("8.6",),
        "version": "1.7.2",
    }
    prints = {fingerprint(**base)} | {fingerprint(**{**base, k: v}) for k, v in changed.items()}
    assert len(prints) == 1 + len(changed)
    assert fingerprint(**{**base, "program": trace(_network())}) == fingerprint(**base)


def _changed() -> Network:
    net = _network()
    net.output(net.mul(net.outputs["attended"], 2.0), "more")
    return net


def test_literals_count_in_the_fingerprint() -> None:
    def program(value: float):
        net = Network(load_backend("tensorrt_rtx"))
        x = net.input("x", "float32", (2,))
        net.output(net.mul(x, net.literal(torch.tensor([1.0, value]), "table")), "y")
        return trace(net)

    rest = {"weights_identity": "w", "profile": {}, "targets": ("8.9",), "version": "1"}
    assert fingerprint(program(2.0), **rest) != fingerprint(program(3.0), **rest)
    assert fingerprint(program(2.0), **rest) == fingerprint(program(2.0), **rest)


def test_a_log_without_a_layer_list_is_an_error() -> None:
    with pytest.raises(BuildError, match="did not describe"):
        parse_report(["Total Weights Memory: 12 bytes"])
    with pytest.raises(BuildError, match="not understood"):
        parse_report(["Layers:\nsomething else\n\nI/O Tensors:\n"])


@pytest.mark.parametrize(
    ("line", "meaning"),
    [
        ("CHECK(composite_op->is_decomposable()) failed", "fused attention"),
        ("needs HW-specific datatypes: fp8_e4m3 not on SM80", "too old for FP8"),
        ("IBuilder: Error Code 7: BuildCanceled", "cancelled"),
        ("Error Code 3: something unheard of\n In f at /_src/a.cpp:3)", "something unheard of"),
    ],
)
def test_messages_are_translated(line: str, meaning: str) -> None:
    assert meaning in translate(["first, an unknown line", line][-1:])
