"""Fixtures that several areas share. Checkpoints are made once per test process."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock

# The machine may be shared; one thread per process keeps parallel test runs from fighting.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def deterministic_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Qwen3.8 checkpoint with recomputable fp32 weights (no tokenizer files)."""
    from tests.fixtures.qwen38_deterministic import write_deterministic

    return write_deterministic(tmp_path_factory.mktemp("hf") / "qwen38-deterministic")


@pytest.fixture(scope="session")
def trained_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny bf16 Qwen3.8 checkpoint that knows its corpus by heart, with tokenizer files."""
    from tests.fixtures.qwen38_checkpoint import materialise

    return materialise(tmp_path_factory.mktemp("hf") / "qwen38-trained")


def _made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """A directory that the first test process to ask for it makes for all of them."""
    shared = factory.getbasetemp()
    if os.environ.get("PYTEST_XDIST_WORKER"):
        shared = shared.parent
    path = shared / name
    with FileLock(f"{path}.lock"):
        if not path.exists():
            make(path)
    return path


def _build(hf_dir: Path, path: Path) -> None:
    """Convert and build, for one target and with small limits: both cost the same for large ones,
    and this is done in seconds.
    """
    from build_scripts.engines import Request, build
    from converters.checkpoint.convert import convert

    convert(hf_dir, path.with_name(f"{path.name}-checkpoint"))
    limits = Request(8, 256, None, 0, 64, 8192, "tensorrt_rtx", ("8.9",), "auto", "mean")
    build(path.with_name(f"{path.name}-checkpoint"), path, limits)


@pytest.fixture(scope="session")
def deterministic_engine(
    deterministic_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Engine directory of the deterministic checkpoint: 8 slots, 256 tokens, chunks of 64, mean
    pooling.
    """
    return _made_once(
        tmp_path_factory, "deterministic-engine", lambda p: _build(deterministic_checkpoint, p)
    )


@pytest.fixture(scope="session")
def trained_engine(trained_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Engine directory of the trained checkpoint: 8 slots, 256 tokens, chunks of 64, mean
    pooling.
    """
    return _made_once(tmp_path_factory, "trained-engine", lambda p: _build(trained_checkpoint, p))


@pytest.fixture(scope="session")
def drafting_engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Engine directory of a random Dots3 NOTE: 4 slots, 128 tokens, chunks of 64, 3 drafts, last
    pooling.
    """

    def make(path: Path) -> None:
        from build_scripts.engines import Request, build
        from converters.checkpoint.convert import convert
        from tests.fixtures.dots3_random import write

        hf_dir = write(path.with_name(f"{path.name}-hf"))
        convert(hf_dir, path.with_name(f"{path.name}-checkpoint"))
        limits = Request(4, 128, None, 3, 64, 8192, "tensorrt_rtx", ("8.9",), "auto", "last")
        build(path.with_name(f"{path.name}-checkpoint"), path, limits)

    return _made_once(tmp_path_factory, "drafting-engine", make)


def _hearing(hf_dir: Path, path: Path, max_seq_len: int) -> None:
    from build_scripts.engines import Request, build
    from converters.checkpoint.convert import convert

    convert(hf_dir, path.with_name(f"{path.name}-checkpoint"))
    limits = Request(8, max_seq_len, None, 0, 448, 8192, "tensorrt_rtx", ("8.9",), "auto")
    build(path.with_name(f"{path.name}-checkpoint"), path, limits)


@pytest.fixture(scope="session")
def voxtral_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny bf16 Voxtral that knows five recordings, with its tokenizer."""
    from tests.fixtures.voxtral_checkpoint import materialise

    return _made_once(tmp_path_factory, "voxtral-trained", materialise)


@pytest.fixture(scope="session")
def voxtral_engine(voxtral_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Engine directory of the trained Voxtral: 8 slots, 1024 tokens."""
    return _made_once(
        tmp_path_factory, "voxtral-engine", lambda p: _hearing(voxtral_checkpoint, p, 1024)
    )


@pytest.fixture(scope="session")
def realtime_engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Engine directory of the recomputable realtime Voxtral: 8 slots, 512 tokens."""

    def make(path: Path) -> None:
        from tests.fixtures.tekken import write_tekken
        from tests.fixtures.voxtral_deterministic import write_huggingface

        source = path.with_name("voxtral-realtime")
        write_huggingface(source, realtime=True)
        write_tekken(source, realtime=True)
        _hearing(source, path, 512)

    return _made_once(tmp_path_factory, "realtime-engine", make)
