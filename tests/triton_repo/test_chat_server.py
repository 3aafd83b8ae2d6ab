"""Chats through a real tritonserver: calls and thoughts get tensors of their own."""

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


def _body(answer: str, tools: Any = TOOLS, **template: Any) -> dict[str, Any]:
    return {
        "messages": json.dumps([{"role": "user", "content": "2 + 2?"}]),
        "chat_template_kwargs": json.dumps(template | ({"tools": tools} if tools else {})),
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


THOUGHT = "Add? " + CALL + " No: STOP."


@both
def test_thoughts_leave_the_text(server: TritonServer, model: str) -> None:
    answer = ok(server, _body(f"<think>\n{THOUGHT}\n</think>\n\nFour."), model)
    assert (answer["text_output"], answer["reasoning_content"]) == ("Four.", THOUGHT)
    assert json.loads(answer["tool_calls"]) == []
    both_ways = ok(server, _body(f"<think>{THOUGHT}</think>So:{CALL}"), model)
    assert (both_ways["text_output"], both_ways["reasoning_content"]) == ("So:", THOUGHT)
    assert json.loads(both_ways["tool_calls"]) == CALLS
    assert "reasoning_content" not in ok(server, _body("Four."), model)


@both
def test_thoughts_come_before_the_text_in_a_stream(server: TritonServer, model: str) -> None:
    body = _body(f"<think>\n{THOUGHT}\n</think>\n\nFour.", tools=None)
    events = list(generate_stream(server, body, model))
    assert "".join(event["text_output"] for event in events) == "Four."
    thoughts = [event.get("reasoning_content", "") for event in events]
    assert "".join(thoughts) == THOUGHT
    assert len([t for t in thoughts if t]) > 5
    said = [i for i, event in enumerate(events) if event["text_output"]]
    assert said[0] > max(i for i, thought in enumerate(thoughts) if thought)


@both
def test_a5_8_stop_words_end_the_answer_and_no_thought(server: TritonServer, model: str) -> None:
    body = _body(f"<think>{THOUGHT}</think>Four. STOP. More", tools=None) | {"stop_words": ["STOP"]}
    for more in ({}, {"stream": True}):
        events = list(generate_stream(server, body | more, model))
        assert "".join(event["text_output"] for event in events) == "Four. "
        assert "".join(event.get("reasoning_content", "") for event in events) == THOUGHT
        assert (events[-1]["finish_reason"], events[-1]["stop_reason"]) == ("stop", "STOP")


@both
def test_a_chat_without_thinking_has_only_text(server: TritonServer, model: str) -> None:
    answer = ok(server, _body("<think>4</think>", tools=None, enable_thinking=False), model)
    assert answer["text_output"] == "<think>4</think>"
    assert "reasoning_content" not in answer


@both
def test_a_thought_that_was_cut_off(server: TritonServer, model: str) -> None:
    text = "<think>\nHow many are two and two"
    answer = ok(server, _body(text, tools=None), model)
    assert (answer["text_output"], answer["reasoning_content"]) == ("", "How many are two and two")


@both
def test_thoughts_of_several_answers(server: TritonServer, model: str) -> None:
    body = _body("<think>a</think>b", tools=None) | {"num_return_sequences": 2}
    answer = ok(server, body, model)
    assert (answer["text_output"], answer["reasoning_content"]) == (["b", "b"], ["a", "a"])
