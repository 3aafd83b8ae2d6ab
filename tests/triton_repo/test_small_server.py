"""A server with a context of 8 tokens, special tokens and defaults of its own: what it makes of the
tables of right values, and what it tells before the first request.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests

from tests.triton_repo.clients import ok, refused, wait_for
from tests.triton_repo.tables import rows
from tests.triton_repo.test_pipeline import ID_TO_CHARACTER
from triton_repo.frontend.salt import block_keys, cache_salt_id
from triton_repo.generate import RepositoryOptions, write_repository
from triton_repo.generation.echo import BLOCK_SIZE
from triton_repo.generation.metrics import PREFIX
from triton_repo.server import Ports, TritonServer, probe, running

both = pytest.mark.parametrize("model", ["tensorrt_llm_bls", "ensemble"])
CONTEXT, PAD = 8, 0
MM_KWARGS = rows("merges")[0].values[0]


@pytest.fixture(scope="module")
def started(
    character_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[TritonServer, str]]:
    """The server, and its metrics before the first request."""
    repository = write_repository(
        None,
        tmp_path_factory.mktemp("small") / "repository",
        tokenizer=character_tokenizer,
        generation="echo",
        options=RepositoryOptions(
            max_context=CONTEXT,
            max_batch_size=4,
            request_defaults={"padding": "max_length"},
            mm_processor_kwargs=MM_KWARGS["server"],
            exclude_input_in_output=True,
        ),
    )
    with running(repository) as server:
        yield server, requests.get(server.metrics_url, timeout=20).text


@pytest.fixture
def server(started: tuple[TritonServer, str]) -> TritonServer:
    return started[0]


def test_metrics_are_zero_before_the_first_request(started: tuple[TritonServer, str]) -> None:
    found = {}
    for line in started[1].splitlines():
        if line.startswith(PREFIX):
            name, _, value = line.rpartition(" ")
            found[name.partition("{")[0].removeprefix(PREFIX)] = float(value)
    assert found == dict.fromkeys(
        [
            "requests", "requests_failed", "requests_cancelled", "requests_active",
            "requests_waiting", "prompt_tokens", "generated_tokens", "first_tokens",
            "time_to_first_token_us", "cache_reused_blocks",
        ],
        0.0,
    )  # fmt: skip


@both
@pytest.mark.parametrize(
    "row", [r for r in rows("truncations") if r.values[0]["context"] == CONTEXT]
)
def test_truncation(server: TritonServer, model: str, row: dict[str, Any]) -> None:
    body = {
        "text_input": row["text"],
        "add_special_tokens": row["special"],
        "return_token_offsets": True,
        "task": row["task"],
        # The server pads unless a request says no, and "false" says no.
        "padding": "false",
    }
    for name, key in (
        ("truncate_prompt_tokens", "truncate"),
        ("truncation_side", "side"),
        ("max_tokens", "max_tokens"),
    ):
        if row[key] is not None:
            body[name] = row[key]
    body.setdefault("max_tokens", 1)
    if row["kept"].startswith("error"):
        assert row["kept"].removeprefix("error: ") in refused(server, body, model)
        return
    answer = ok(server, body, model)
    ids = answer["ECHO_INPUT_IDS"]
    assert "".join(ID_TO_CHARACTER[i] for i in ids) == row["kept"]
    flat = answer["PROMPT_TOKEN_OFFSETS"]
    assert [list(pair) for pair in zip(flat[::2], flat[1::2], strict=True)] == row["offsets"]
    assert answer["ECHO_PROMPT_TOKEN_OFFSETS"] == flat


@both
@pytest.mark.parametrize(
    "row",
    [
        r
        for r in rows("paddings")
        if (r.values[0]["context"], r.values[0]["tokenizer_side"]) == (CONTEXT, "right")
    ],
)
def test_truncate_then_pad(server: TritonServer, model: str, row: dict[str, Any]) -> None:
    body: dict[str, Any] = {"input_ids": row["ids"], "max_tokens": row["output"] or 1}
    body["task"] = "generate" if row["output"] else "embed"
    if row["truncate"] is not None:
        body["truncate_prompt_tokens"] = row["truncate"]
    if row["side"] is not None:
        body["truncation_side"] = row["side"]
    if row["pad"] != -1:
        # Otherwise the server's default, which is the context.
        body["padding"] = str(row["pad"])
    kept = row["result"] if isinstance(row["result"], str) else [i for i in row["result"] if i < 99]
    if not kept:
        # An explicit request for nothing is refused, never a silent success.
        assert refused(server, body, model).startswith("text_input: the prompt has no tokens")
    elif isinstance(kept, str):
        assert kept.removeprefix("error: ") in refused(server, body, model)
    else:
        answer = ok(server, body | {"return_num_input_tokens": True}, model)
        assert answer["ECHO_INPUT_IDS"] == kept + [PAD] * (len(row["result"]) - len(kept))
        assert sum(answer["ECHO_ATTENTION_MASK"]) == len(kept) == answer["num_input_tokens"]
        if body["task"] == "embed":
            alone = {"input_ids": kept, "task": "embed", "padding": "do_not_pad"}
            assert answer["embedding"] == ok(server, alone, model)["embedding"]


@both
@pytest.mark.parametrize("row", [r for r in rows("padding_options") if r.values[0]["id"][0] == "P"])
def test_padding_fields(server: TritonServer, model: str, row: dict[str, Any]) -> None:
    # The table counts from 1, with the pad id of the byte tokenizer.
    body = {"input_ids": list(range(11, 21)), "task": "embed"} | row["fields"]
    want = [PAD if i == 257 else i + 10 for i in row["result"]]
    assert ok(server, body, model)["ECHO_INPUT_IDS"] == want


@both
def test_a5_21_the_request_says_whether_the_prompt_is_in_the_answer(
    server: TritonServer, model: str
) -> None:
    body = {"text_input": "ab", "add_special_tokens": False, "echo_output_ids": [12]}
    assert ok(server, body | {"max_tokens": 1}, model)["text_output"].strip() == "c"
    wanted = body | {"max_tokens": 1, "exclude_input_in_output": False}
    assert "".join(ok(server, wanted, model)["text_output"].split()) == "abc"


@both
def test_offsets_are_padded_too(server: TritonServer, model: str) -> None:
    body = {
        "text_input": "abcdef", "add_special_tokens": False, "return_token_offsets": True,
        "truncate_prompt_tokens": 2, "truncation_side": "left", "padding": "5", "task": "embed",
    }  # fmt: skip
    answer = ok(server, body, model)
    assert answer["ECHO_INPUT_IDS"] == [14, 15, PAD, PAD, PAD]
    for name in ("PROMPT_TOKEN_OFFSETS", "ECHO_PROMPT_TOKEN_OFFSETS"):
        assert answer[name] == [4, 5, 5, 6, 0, 0, 0, 0, 0, 0]


@both
def test_s12_a_long_text_is_embedded_in_chunks(server: TritonServer, model: str) -> None:
    body = {"input_ids": [10, 11, 12, 13, 14] * 4, "task": "embed", "cache_salt": "a"}
    assert refused(server, body, model).startswith("text_input: ")
    answer = ok(server, body | {"enable_chunked_processing": True}, model)
    parts = [body["input_ids"][start : start + CONTEXT] for start in (0, 8, 16)]
    # S12: every chunk is looked up under the salt of the request.
    salted = [key for part in parts for key in block_keys(part, BLOCK_SIZE, cache_salt_id("a"))]
    assert answer["ECHO_BLOCK_KEYS"] == salted
    assert not set(salted) & {k for part in parts for k in block_keys(part, BLOCK_SIZE, None)}
    alone = [
        ok(server, {"input_ids": p, "task": "embed", "padding": "false"}, model)["embedding"]
        for p in parts
    ]
    mean = np.average(alone, axis=0, weights=[8, 8, 4])
    assert answer["embedding"] == pytest.approx(mean / np.linalg.norm(mean), abs=1e-6)
    equal = np.average(alone, axis=0)
    assert answer["embedding"] != pytest.approx(equal / np.linalg.norm(equal), abs=1e-3)
    # Twice the same: nothing of it is new. Another salt: everything is.
    again = body | {"enable_chunked_processing": True}
    assert ok(server, again, model)["kv_cache_reused_blocks"] == len(salted)
    fresh = again | {"cache_salt": f"b {model}"}
    assert ok(server, fresh, model)["kv_cache_reused_blocks"] == 0


@both
def test_special_tokens_stay_where_no_side_is_named(server: TritonServer, model: str) -> None:
    body = {
        "text_input": "abcdef",
        "truncate_prompt_tokens": 4,
        "padding": "false",
        "max_tokens": 1,
    }
    for side, ids in (("", [1, 10, 11, 2]), ("right", [1, 10, 11, 12]), ("left", [13, 14, 15, 2])):
        named = {"truncation_side": side} if side else {}
        assert ok(server, body | named, model)["ECHO_INPUT_IDS"] == ids


@both
def test_m1_a5_26_a_request_is_laid_over_the_servers_processor_options(
    server: TritonServer, model: str
) -> None:
    body = {"input_ids": [10], "max_tokens": 1}
    body["mm_processor_kwargs"] = json.dumps(MM_KWARGS["request"])
    views = json.loads(ok(server, body, model)["ECHO_MM_VIEWS"])
    video = MM_KWARGS["merged"]["videos_kwargs"]
    assert {k: views["video"][k] for k in video} == video
    assert views["image"]["size"] == MM_KWARGS["merged"]["size"]
    assert "fps" not in views["image"]
    # Without a wish of the request the server's own options hold.
    del body["mm_processor_kwargs"]
    alone = json.loads(ok(server, body, model)["ECHO_MM_VIEWS"])
    assert alone["video"]["size"] == {"shortest_edge": 100, "longest_edge": 1200}
    assert alone["image"]["size"] == MM_KWARGS["server"]["size"]


def test_a_server_that_loads_is_not_ready(tmp_path: Path) -> None:
    repository = write_repository(None, tmp_path / "r", tokenizer="bytes", generation="echo")
    path = repository / "postprocessing" / "1" / "model.py"
    slow = "import time\n\n        time.sleep(2)\n        self._model ="
    source = path.read_text().replace("self._model =", slow, 1)
    path.write_text(source)
    server = TritonServer(repository, ports=Ports(0, 0, 0))
    seen: list[int] = []

    def status() -> int:
        try:
            seen.append(requests.get(f"{server.http_url}/v2/health/ready", timeout=1).status_code)
        except requests.RequestException:
            seen.append(0)
        return seen[-1]

    starting = threading.Thread(target=lambda: server.start(60, probe))
    starting.start()
    try:
        assert wait_for(lambda: server.ports.http != 0, 10)
        assert status() != 200
        assert wait_for(lambda: status() == 200, 60)
        # The first time it calls itself ready, it answers.
        assert ok(server, {"text_input": "hi"}, "ensemble")["finish_reason"] == "stop"
        assert len(seen) > 10
    finally:
        starting.join(60)
        server.stop()
