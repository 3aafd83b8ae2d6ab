"""Chat templates render as transformers renders them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from plugins.support.errors import UsageError
from triton_repo.frontend.chat import ChatTemplate, MediaReference, parse_messages, parse_part
from triton_repo.frontend.problems import one_line

CHATML = """\
{%- for message in messages %}
    {%- if loop.first and message.role != 'system' %}
        {{- '<|im_start|>system\\nBe brief.<|im_end|>\\n' }}
    {% endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- if loop.index > 5 %}{% break %}{% endif %}
{%- endfor %}
{%- if tools %}{{ tools | tojson(indent=2) }}{% endif %}
{% generation %}kept{% endgeneration %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
{{ bos_token }}"""
MESSAGES = [{"role": "user", "content": "5 < 6 & 'é'"}, {"role": "assistant", "content": "yes"}]


@pytest.mark.parametrize(
    "kwargs", [{}, {"add_generation_prompt": False}, {"tools": [{"a": "<é>"}]}]
)
def test_equal_to_transformers(kwargs: dict[str, Any]) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    values = {"add_generation_prompt": True, "bos_token": "<s>", "tools": None} | kwargs
    tools = values.pop("tools")
    want, _ = render_jinja_template(
        conversations=[MESSAGES], chat_template=CHATML, tools=tools, **values
    )
    template = ChatTemplate(CHATML, {"bos_token": "<s>"})
    assert template.render([dict(m) for m in MESSAGES], kwargs) == want[0]


def test_a_template_may_refuse() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(UsageError, match="roles must alternate"):
        template.render([], {})


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ 1 / 0 }}",
        "{{ messages[9].content }}",
    ],
)
def test_templates_stay_in_the_sandbox(source: str) -> None:
    with pytest.raises(UsageError) as caught:
        ChatTemplate(source, {}).render([{"role": "user", "content": "x"}], {})
    assert "Traceback" not in str(caught.value)


def test_parts() -> None:
    content = [
        {"type": "text", "text": "a"},
        {"type": "image_url", "image_url": {"url": "http://x/1", "detail": "low"}},
        {"type": "video_url", "video_url": "http://x/2"},
        {"type": "video", "video": "http://x/3", "fps": 2, "max_pixels": 9, "uuid": "u"},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
    ]
    conversation = parse_messages(json.dumps([{"role": "user", "content": content}]))
    assert [m.modality for m in conversation.media] == ["image", "video", "video", "audio"]
    options = [m.options for m in conversation.media]
    assert options == [{"detail": "low"}, {}, {"fps": 2, "max_pixels": 9}, {}]
    assert conversation.media[3].url == "data:audio/*;base64,AAAA"
    assert [p["type"] for p in conversation.messages[0]["content"]] == [
        "text", "image", "video", "video", "audio",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "part",
    [3, {"type": "text"}, {"type": "image_url"}, {"type": "image_url", "image_url": ""},
     {"type": "token_ids", "token_ids": [1.5]}, {"type": "token_ids", "token_ids": [True]},
     {"type": "input_audio", "input_audio": "x"}],
)  # fmt: skip
def test_parts_that_are_refused(part: Any) -> None:
    with pytest.raises(UsageError) as caught:
        parse_part("messages[0].content[1]", part)
    assert (caught.value.where or "").startswith("messages[0].content[1]")


def test_part_of_plain_text() -> None:
    assert parse_part("x", "plain") == "plain"
    assert isinstance(parse_part("x", {"type": "audio_url", "audio_url": "u"}), MediaReference)


def test_deep_json_is_an_error_not_a_crash() -> None:
    with pytest.raises(UsageError):
        parse_messages("[" * 100_000)


@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("arguments", [{"a": 2}, '{"a": 2}'])
def test_arguments_of_earlier_calls_become_objects(wrapped: bool, arguments: object) -> None:
    """Clients send them as JSON text, chat templates take them apart."""
    call = {"name": "add", "arguments": arguments}
    sent = {"id": "1", "type": "function", "function": call} if wrapped else call
    message = {"role": "assistant", "content": None, "tool_calls": [sent]}
    (found,) = parse_messages(json.dumps([message])).messages
    whole = {"name": "add", "arguments": {"a": 2}}
    assert found["tool_calls"] == [{**sent, "function": whole} if wrapped else whole]


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        ({"name": "add"}, "messages[0].tool_calls: must be a list"),
        (["add"], "messages[0].tool_calls[0]: is no call of a function"),
        ([{"function": {}}], "messages[0].tool_calls[0]: is no call of a function"),
        ([{"name": "f", "arguments": "{"}], "tool_calls[0].arguments: is not valid JSON"),
        ([{"name": "f", "arguments": "[1]"}], "tool_calls[0].arguments: must be a JSON object"),
        ([{"name": "f", "arguments": [1]}], "tool_calls[0].arguments: must be a JSON object"),
    ],
)
def test_calls_that_are_none(calls: object, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_messages(json.dumps([{"role": "assistant", "tool_calls": calls}]))
    assert message in one_line(caught.value)


@pytest.mark.parametrize(
    "text", ['[{"role": "user", "content": "a\\ud800b"}]', "[NaN", "[" * 5000 + "]" * 5000, ""]
)
def test_json_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_messages(text)
    assert one_line(caught.value).startswith("messages: is not valid JSON; found ")


def test_a_whole_surrogate_pair_is_a_character() -> None:
    text = '[{"role": "user", "content": "\\ud83d\\ude00"}]'
    assert parse_messages(text).messages[0]["content"] == "😀"
