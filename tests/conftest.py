"""Fixtures that several areas share. Checkpoints are made once per test process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

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
