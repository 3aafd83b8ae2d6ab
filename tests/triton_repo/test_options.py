"""Options are read once for requests that ask for the same, and never mixed up."""

from __future__ import annotations

import json
from typing import Any

import pytest

from plugins.support.errors import UsageError
from tests.triton_repo.test_pipeline import front_end
from triton_repo.frontend.options import (
    OPTION_FIELDS,
    PROMPT_VALUES,
    REMEMBERED,
    REMEMBERED_CHARACTERS,
    request_options,
)
from triton_repo.frontend.pipeline import prepare
from triton_repo.tensors import REQUEST

ROW = {"text_input": "a", "max_tokens": 4}


def test_every_field_of_preprocessing_is_part_of_the_prompt_or_an_option() -> None:
    known = {f.name for f in REQUEST if f.preprocessing is not None}
    assert known <= PROMPT_VALUES | OPTION_FIELDS
    assert not PROMPT_VALUES & OPTION_FIELDS
    assert {f.name for f in REQUEST} >= PROMPT_VALUES | OPTION_FIELDS


def test_requests_with_other_prompts_share_their_options() -> None:
    server = front_end()
    first = prepare(ROW | {"stop_words": ["x", "y"], "top_k": 3}, server)
    second = prepare(ROW | {"stop_words": ["x", "y"], "top_k": 3, "text_input": "bc"}, server)
    assert first.options is second.options
    assert (first.prompt.ids, second.prompt.ids) == ([97], [98, 99])
    # Fields of other models are no part of them.
    assert request_options(ROW | {"stream": True}, server) is request_options(ROW, server)


@pytest.mark.parametrize(
    "more",
    [
        {"max_tokens": 5},
        {"end_id": 7},
        {"pad_id": 7},
        {"cache_salt": "tenant"},
        {"stop_words": ["a"]},
        {"stop_words": ["ab"]},
        {"stop_words": ["a", "b"]},
        {"bad_words": ["a"]},
        {"seed": 1},
        {"random_seed": 1},
        {"temperature": 1.0},
        {"task": "embed"},
        {"chat_template_kwargs": "{}"},
        {"lowercase": True},
    ],
)
def test_other_options_are_other_options(more: dict[str, Any]) -> None:
    server = front_end()
    plain = request_options(ROW, server)
    assert request_options(ROW | more, server) is not plain
    assert request_options(ROW, server) is plain


def test_equal_numbers_of_other_types_differ() -> None:
    # 1 == True: a truncation of True keeps what fits, one of 1 is none.
    server = front_end()
    assert request_options(ROW | {"truncation": True}, server).tokenize.truncate == -1
    with pytest.raises(UsageError):
        request_options(ROW | {"truncation": 1}, server)


def test_mistakes_are_refused_again() -> None:
    server = front_end()
    for _ in range(2):
        with pytest.raises(UsageError) as caught:
            request_options(ROW | {"top_p": 2.0}, server)
        assert caught.value.where == "top_p"


def test_servers_do_not_share() -> None:
    ours, theirs = front_end(end_ids=(1,)), front_end(end_ids=(2,))
    assert request_options(ROW, ours).end_ids == (1,)
    assert request_options(ROW, theirs).end_ids == (2,)


def test_tools_are_for_messages_only() -> None:
    from triton_repo.frontend import tool_calls
    from triton_repo.frontend.chat import ChatTemplate

    template = ChatTemplate("{{ tools }}" + tool_calls.OPEN, {})
    server = front_end(chat_template=template)
    tools = json.dumps({"tools": [{"name": "f", "parameters": {}}]})
    row = {"max_tokens": 4, "chat_template_kwargs": tools}
    assert not request_options(row | {"text_input": "a"}, server).text.tools
    assert request_options(row | {"messages": "[]"}, server).text.tools


def test_what_is_remembered_is_bounded() -> None:
    server = front_end()
    for seed in range(3 * REMEMBERED):
        request_options(ROW | {"seed": seed}, server)
    assert server.remembered_options.cache_info().currsize == REMEMBERED
    before = server.remembered_options.cache_info()
    kwargs = json.dumps({"note": "x" * REMEMBERED_CHARACTERS})
    for long in ({"chat_template_kwargs": kwargs}, {"stop_words": ["x" * 1000] * 50}):
        first, second = (request_options(ROW | long, server) for _ in range(2))
        assert first is not second
        assert first.template_kwargs == second.template_kwargs
        assert first.text == second.text
    assert server.remembered_options.cache_info() == before


def test_thoughts_have_options_of_their_own() -> None:
    server = front_end()
    plain = request_options(ROW | {"stop_words": ["ab"]}, server)
    assert plain.with_reasoning("") is plain
    thinking = plain.with_reasoning("open")
    assert (thinking.text.reasoning, thinking.text.stop_words) == ("open", ("ab",))
    assert (plain.stop_ids, thinking.stop_ids) == ([[97, 98]], None)
    assert plain.with_reasoning("possible").text.reasoning == "possible"
    assert plain.with_reasoning("open") is thinking
    assert plain.text.reasoning == ""
