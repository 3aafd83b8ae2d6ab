"""Fixtures of the runtime tests: a fake engine directory and what it must answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from plugins.ngram import row_ids
from runtime.contract import EngineConfig, read_config
from runtime.engine import Engine
from runtime.executors import EXECUTOR
from runtime.host_inputs import open_host_inputs
from tests.fixtures.handmade import made
from tests.runtime.engines import CONSTANTS, TABLE, write_engine
from tests.runtime.language import LanguageExecutor, logits_of

Embed = Callable[[Sequence[int]], np.ndarray]
Answer = Callable[[Sequence[int], int], list[int]]


@pytest.fixture(scope="session")
def engine_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runtime") / "engine"
    write_engine(path)
    return path


@pytest.fixture(scope="session")
def config(engine_dir: Path) -> EngineConfig:
    return read_config(engine_dir)


@pytest.fixture(scope="session")
def embed(engine_dir: Path) -> Embed:
    """N-gram embedding of a whole sequence, from the table in memory."""
    table = load_file(engine_dir / "rank0.safetensors")[TABLE]

    def look_up(tokens: Sequence[int]) -> np.ndarray:
        rows = row_ids(np.array(tokens), CONSTANTS, eos=2)
        return table[rows].reshape(len(tokens), -1)

    return look_up


@pytest.fixture(scope="session")
def answer(embed: Embed) -> Answer:
    """The right continuation of a prompt by `count` most likely tokens."""

    def go_on(prompt: Sequence[int], count: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(logits_of(tokens, embed)[-1].argmax()))
        return tokens[len(prompt) :]

    return go_on


@pytest.fixture
def engine(engine_dir: Path, config: EngineConfig) -> Engine:
    return Engine(
        config, made(EXECUTOR, LanguageExecutor, config), open_host_inputs(config, engine_dir)
    )
