"""Tool calls through a real tritonserver: out of the answer, into a tensor of their own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.fixtures.dots3_checkpoint import DATA
from tests.fixtures.dots3_tokenizer import write_tokenizer
from tests.triton_repo.clients import generate_stream, ok, refused
from triton_repo.generate import RepositoryOptions, write_repository
from triton_repo.server import TritonServer, running

TOKENIZER = Tokenizer.from_file(str(DATA / "tokenizer.json"))
TOOLS = [{"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}}]
CALL = (
    '<dots_function_call><invoke name="add"><parameter name="a">2</parameter></invoke>'
    "</dots_function_call>"
)
CALLS = [{"name": "add", "arguments": {"a": 2}}]
both = pytest.mark.parametrize("model", ["tensorrt_llm_bls", "ensemble"])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """An echo with Dots3's tokenizer and chat template."""
    directory = tmp_path_factory.mktemp("tool-calls")
    (directory / "tokenizer").mkdir()
    write_tokenizer(TOKENIZER, directory / "tokenizer")
    repository = write_repository(
        None,
        directory / "repository",
        tokenizer=str(directory / "tokenizer"),
        generation="echo",
        options=RepositoryOptions(max_context=4096),
    )
    with running(repository) as started:
        yield started


def _body(answer: str, tools: Any = TOOLS) -> dict[str, Any]:
    return {
        "messages": json.dumps([{"role": "user", "content": "2 + 2?"}]),
        "chat_template_kwargs": json.dumps({"tools": tools} if tools else {}),
        "echo_output_ids": TOKENIZER.encode(answer).ids,
        "max_tokens": 200,
        "exclude_input_in_output": True,
    }


@both
def test_calls_leave_the_text(server: TritonServer, model: str) -> None:
    answer = ok(server, _body("I add." + CALL), model)
    assert answer["text_output"] == "I add."
    assert json.loads(answer["tool_calls"]) == CALLS
    nothing = ok(server, _body("Four < five"), model)
    assert (nothing["text_output"], nothing["tool_calls"]) == ("Four < five", "[]")


@both
def test_streams_carry_them_at_the_end(server: TritonServer, model: str) -> None:
    events = list(generate_stream(server, _body("I add." + CALL), model))
    assert "".join(event["text_output"] for event in events) == "I add."
    assert json.loads(events[-1]["tool_calls"]) == CALLS
    assert not any("tool_calls" in event for event in events[:-1])


@both
def test_without_tools_calls_are_text(server: TritonServer, model: str) -> None:
    answer = ok(server, _body("I add." + CALL, tools=None), model)
    assert answer["text_output"] == "I add." + CALL
    assert "tool_calls" not in answer
    unknown = ok(server, _body("I add." + CALL, tools=[{"name": "other"}]), model)
    assert (unknown["text_output"], unknown["tool_calls"]) == ("I add." + CALL, "[]")


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ({"name": "add"}, "tools must be a list"),
        (["add"], "tools[0] is no function with a name"),
        ([{"function": {}}], "tools[0] is no function with a name"),
        ([{"name": "add", "parameters": 5}], "tools[0]: parameters must be a JSON schema"),
    ],
)
def test_bad_tools_are_refused(server: TritonServer, tools: Any, message: str) -> None:
    error = refused(server, _body("x", tools=tools))
    assert error.startswith("chat_template_kwargs: ") and message in error
