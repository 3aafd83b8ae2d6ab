"""The way of a request row to an engine input."""

from __future__ import annotations

import base64
import io
import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import models, pre_tokenizers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from plugins.support.errors import UsageError
from tests.triton_repo.conftest import CHARACTER_IDS
from tests.triton_repo.tables import rows
from triton_repo.frontend.chat import ChatTemplate
from triton_repo.frontend.options import FrontEnd, RequestOptions
from triton_repo.frontend.pipeline import Prepared, prepare
from triton_repo.frontend.tokenizer import (
    ByteTokenizer,
    SlowTokenizer,
    Tokenizer,
    open_with_transformers,
)

PLACEHOLDERS = {"image": "<image>", "video": "<video>", "audio": "<audio>"}
ID_TO_CHARACTER = {i: c for c, i in CHARACTER_IDS.items()} | {1: "[", 2: "]"}


def front_end(
    context: int | None = 100, tokenizer: Tokenizer | None = None, **more: Any
) -> FrontEnd:
    tokenizer = tokenizer or ByteTokenizer()
    assert tokenizer.chat_template is None or isinstance(tokenizer.chat_template, str)
    template = tokenizer.chat_template and ChatTemplate(
        tokenizer.chat_template, tokenizer.special_tokens
    )
    settings: dict[str, Any] = {
        "vocab_size": tokenizer.vocab_size,
        "end_ids": tokenizer.eos_ids,
        "chat_template": template or None,
        "placeholders": PLACEHOLDERS,
    }
    return FrontEnd(tokenizer=tokenizer, context=context, **(settings | more))


def run(row: dict[str, Any], server: FrontEnd | None = None) -> Prepared:
    return prepare({"max_tokens": 4} | row, server or front_end())


def refused(row: dict[str, Any], server: FrontEnd | None = None) -> UsageError:
    with pytest.raises(UsageError) as caught:
        run(row, server)
    return caught.value


def png(width: int, height: int, color: int = 0) -> str:
    from PIL import Image

    buffer = io.BytesIO()
    Image.new("RGB", (width, height), (color, color, color)).save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


@pytest.mark.parametrize("row", rows("truncations"))
def test_offsets_follow_the_ids(row: dict[str, Any], character_tokenizer: Path) -> None:
    server = front_end(row["context"], open_with_transformers(character_tokenizer))
    assert server.tokenizer.max_chars_per_token == 1
    request = {
        "text_input": row["text"],
        "truncate_prompt_tokens": row["truncate"],
        "truncation_side": row["side"],
        "add_special_tokens": row["special"],
        "return_token_offsets": True,
        "task": row["task"],
        "max_tokens": row["max_tokens"],
    }
    if row["kept"].startswith("error"):
        assert row["kept"].removeprefix("error: ") in str(refused(request, server))
    elif not row["kept"]:
        # The library cuts to nothing; a request for nothing is refused, never a silent success.
        assert refused(request, server).what == "the prompt has no tokens"
    else:
        prompt = run(request, server).prompt
        assert "".join(ID_TO_CHARACTER[i] for i in prompt.ids) == row["kept"]
        assert [list(o) for o in prompt.arrays["offsets"]] == row["offsets"]


@pytest.mark.parametrize("row", rows("paddings"))
def test_truncate_then_pad(row: dict[str, Any]) -> None:
    tokenizer = ByteTokenizer()
    tokenizer.truncation_side = row["tokenizer_side"]
    request = {
        "input_ids": row["ids"], "padding": str(row["pad"]), "max_tokens": row["output"] or 1,
        "truncate_prompt_tokens": row["truncate"], "truncation_side": row["side"],
        "task": "generate" if row["output"] else "embed",
    }  # fmt: skip
    server = front_end(row["context"], tokenizer)
    kept = row["result"] if isinstance(row["result"], str) else [i for i in row["result"] if i < 99]
    if isinstance(kept, str):
        assert kept.removeprefix("error: ") in str(refused(request, server))
    elif not kept:
        # The library pads nothing; a request for nothing is refused, never a silent success.
        assert refused(request, server).what == "the prompt has no tokens"
    else:
        prepared = run(request, server)
        assert prepared.prompt.ids == [tokenizer.pad_id if i == 99 else i for i in row["result"]]
        assert prepared.real_ids == kept


@pytest.mark.parametrize("row", rows("padding_options"))
def test_padding_fields(row: dict[str, Any]) -> None:
    server = front_end(row.get("context", 8), defaults=row.get("defaults", {}))
    request = {"input_ids": list(range(1, 11)), "task": "embed"} | row["fields"]
    if isinstance(row["result"], str):
        assert row["result"].removeprefix("error: ") in str(refused(request, server))
    else:
        assert run(request, server).prompt.ids == row["result"]


SALT = {"cache_salt": "tenant-a"}
SALT_ID = 15947361407820284973
MESSAGES = json.dumps([{"role": "user", "content": "hi"}])
PATHS: dict[str, dict[str, Any]] = {
    "S1-text": {"text_input": "hi"},
    "S2-ids": {"input_ids": [104, 105]},
    "S3-messages": {"messages": MESSAGES},
    "S3-parts": {"content_parts": json.dumps(["hi", {"type": "token_ids", "token_ids": [1]}])},
    "S4-image": {
        "content_parts": json.dumps(["hi", {"type": "image_url", "image_url": png(32, 32)}])
    },
    "S5-features": {
        "input_ids": [1, 258, 258, 2],
        "mm_features": json.dumps([{"modality": "image", "offset": 1, "length": 2, "key": 7}]),
    },
    "embed": {"text_input": "hi", "task": "embed"},
}


@pytest.mark.parametrize("path", PATHS)
def test_the_salt_is_on_every_path(path: str) -> None:
    row = PATHS[path]
    assert run(row | SALT).options.cache_salt_id == SALT_ID
    assert run(row).options.cache_salt_id is None
    for bad in ("", "a/b", "x" * 129):
        assert refused(row | {"cache_salt": bad}).where == "cache_salt"
    # It changes nothing else.
    assert run(row | SALT).prompt == run(row).prompt
    assert run(row | SALT).media == run(row).media


def test_media_keys_stand_beside_the_salt() -> None:
    def parts(color: int) -> dict[str, Any]:
        part = {"type": "image_url", "image_url": {"url": png(32, 32, color)}}
        return {"content_parts": json.dumps(["hi", part])}

    one, other = run(parts(0) | SALT), run(parts(9) | SALT)
    assert one.prompt.ids == other.prompt.ids
    assert one.media[0].key != other.media[0].key


def test_t13_media_expand_and_drop_offsets() -> None:
    row = PATHS["S4-image"] | {"return_token_offsets": True}
    prepared = run(row, front_end(1000))
    span = prepared.media[0]
    assert prepared.prompt.ids == [104, 105, *[258] * span.length]
    assert (span.offset, span.length) == (2, 64)
    assert "offsets" not in prepared.prompt.arrays


def test_text_cannot_pose_as_a_placeholder() -> None:
    messages = [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<image>\x000\x00"},
                {"type": "image_url", "image_url": {"url": png(32, 32)}},
            ],
        }
    ]
    prepared = run({"messages": json.dumps(messages)}, front_end(1000))
    assert prepared.prompt.ids.count(258) == prepared.media[0].length
    assert bytes(prepared.prompt.ids[:13]) == b"user: <image>"


def test_a_limit_does_not_cut_media() -> None:
    row = PATHS["S4-image"]
    server = front_end(1000)
    assert run(row | {"truncate_prompt_tokens": 64, "truncation_side": "left"}, server).media
    error = refused(row | {"truncate_prompt_tokens": 64, "truncation_side": "right"}, server)
    assert error.where == "truncate_prompt_tokens"


def test_a5_14_begin_token_once(character_tokenizer: Path) -> None:
    tokenizer = open_with_transformers(character_tokenizer)
    tokenizer.chat_template = "{{ cls_token }}{{ messages[0]['content'] }}"
    server = front_end(100, tokenizer)
    assert run({"text_input": "ab"}, server).prompt.ids == [1, 10, 11, 2]
    assert run({"text_input": "ab", "add_special_tokens": False}, server).prompt.ids == [10, 11]
    chat = {"messages": json.dumps([{"role": "user", "content": "ab"}])}
    # The template writes the token, as text that the tokenizer knows.
    assert run(chat, server).prompt.ids == [1, 10, 11]
    # With a second one, as for a raw text, it would be there twice.
    again = run(chat | {"add_special_tokens": True}, server).prompt.ids
    assert again == [1, 1, 10, 11, 2]


def test_a5_17_template_kwargs_are_merged_once() -> None:
    tokenizer = ByteTokenizer()
    tokenizer.chat_template = "{{ thinking }}{{ style }}"
    server = front_end(100, tokenizer, chat_template_kwargs={"thinking": "on", "style": "x"})
    assert bytes(run({"messages": MESSAGES}, server).prompt.ids) == b"onx"
    row = {"messages": MESSAGES, "chat_template_kwargs": '{"thinking": "off"}'}
    assert bytes(run(row, server).prompt.ids) == b"offx"
    reserved = row | {"chat_template_kwargs": '{"messages": []}'}
    assert refused(reserved, server).where == "chat_template_kwargs"


@pytest.mark.parametrize(
    ("row", "where"),
    [
        ({}, "text_input"),
        ({"text_input": "a", "input_ids": [1]}, "text_input"),
        ({"text_input": ""}, "text_input"),
        ({"input_ids": []}, "text_input"),
        ({"input_ids": [-1]}, "input_ids"),
        ({"input_ids": [261]}, "input_ids"),
        ({"text_input": "a", "max_tokens": 0}, "max_tokens"),
        ({"text_input": "a", "max_tokens": 101}, "max_tokens"),
        ({"text_input": "a", "min_tokens": 9}, "min_tokens"),
        ({"text_input": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"text_input": "a", "truncate_prompt_tokens": 101}, "truncate_prompt_tokens"),
        ({"text_input": "a", "truncation_side": "middle"}, "truncation_side"),
        ({"text_input": "a", "end_id": 261}, "end_id"),
        ({"text_input": "a", "end_id": -2}, "end_id"),
        ({"text_input": "a", "pad_id": -1}, "pad_id"),
        ({"text_input": "a", "task": "sing"}, "task"),
        ({"text_input": "a", "bad_words": [" "]}, "bad_words"),
        ({"text_input": "a", "max_length": 0}, "max_length"),
        ({"text_input": "a", "mm_processor_kwargs": "[]"}, "mm_processor_kwargs"),
        ({"text_input": "a", "mm_processor_kwargs": "{"}, "mm_processor_kwargs"),
        ({"text_input": "a", "mm_features": "[]"}, "mm_features"),
        ({"messages": "[]"}, "messages"),
        ({"messages": '[{"role": "user"}]'}, "messages[0].content"),
        ({"messages": '[{"role": "root", "content": "a"}]'}, "messages[0].role"),
        ({"content_parts": '[{"type": "smell"}]'}, "content_parts[0].type"),
        ({"content_parts": '[{"type": "token_ids", "token_ids": [999]}]'},
         "content_parts[0].token_ids"),
        ({"input_ids": [1, 2], "mm_features":
          '[{"modality": "image", "offset": 1, "length": 2, "key": 1}]'}, "mm_features[0]"),
    ],
)  # fmt: skip
def test_refusals_name_the_field(row: dict[str, Any], where: str) -> None:
    assert refused(row).where == where


def test_max_tokens_fits_the_context() -> None:
    assert run({"text_input": "x" * 98, "max_tokens": 50}).max_tokens == 2
    assert refused({"text_input": "x" * 100, "max_tokens": 50}).where == "text_input"


def test_lower_casing_and_offsets() -> None:
    row = {"text_input": "İx", "lowercase": True}
    assert bytes(run(row).prompt.ids).decode() == "İx".lower()
    assert refused(row | {"return_token_offsets": True}).where == "lowercase"
    plain = run({"text_input": "ÀB", "lowercase": True, "return_token_offsets": True})
    assert plain.prompt.arrays["offsets"] == [(0, 1), (0, 1), (1, 2)]


def test_no_offsets_unless_asked_for() -> None:
    assert "offsets" not in run({"text_input": "a"}).prompt.arrays
    assert "offsets" not in run({"input_ids": [1], "return_token_offsets": True}).prompt.arrays


def test_a5_24_end_ids() -> None:
    server = front_end(100, end_ids=(256, 10))
    assert run({"text_input": "a"}, server).options.end_ids == (256, 10)
    assert run({"text_input": "a", "end_id": 7}, server).options.end_ids == (7,)
    assert run({"text_input": "a", "end_id": -1}, server).options.end_ids == ()


def test_pad_ids(pieces_tokenizer: Path) -> None:
    # C3: the request's, else the tokenizer's, else the id that ends.
    server = front_end()
    assert run({"text_input": "a"}, server).options.pad_id == ByteTokenizer.PAD
    assert run({"text_input": "a", "pad_id": 7}, server).options.pad_id == 7
    tokenizer = open_with_transformers(pieces_tokenizer)
    tokenizer.pad_id = None
    assert run({"text_input": "Hello"}, front_end(100, tokenizer)).options.pad_id == 3
    # To pad a prompt an end id will not do: it is no sign of padding.
    padded = {"text_input": "Hello", "padding": "9", "task": "embed"}
    assert refused(padded, front_end(100, tokenizer)).where == "padding"


def test_no_text_is_tokenised_that_cannot_fit() -> None:
    class Counting(ByteTokenizer):
        longest = 0

        def encode(self, text: str, add_special_tokens: bool, want_offsets: bool) -> Any:
            self.longest = max(self.longest, len(text))
            return super().encode(text, add_special_tokens, want_offsets)

    tokenizer = Counting()
    server = front_end(100, tokenizer)
    image = {"type": "image_url", "image_url": png(32, 32)}
    for row in (
        {"text_input": "x" * 101},
        {"text_input": "x" * 101, "image_bytes_input": [png_bytes()]},
        {"content_parts": json.dumps(["x" * 60, "x" * 60])},
        {"content_parts": json.dumps(["x" * 101, image])},
        {"messages": json.dumps([{"role": "user", "content": "x" * 101}])},
        {"messages": json.dumps([{"role": "user", "content": ["x" * 101, image]}])},
    ):
        error = refused(row, server)
        assert (error.where, error.what) == ("text_input", "is longer than the context can hold")
        assert tokenizer.longest == 0


def test_generation_pads_after_its_length_is_known() -> None:
    server = front_end(8)
    row = {
        "input_ids": list(range(1, 13)), "max_tokens": 4, "truncate_prompt_tokens": -1,
        "truncation_side": "left", "padding": "max_length",
    }  # fmt: skip
    prepared = run(row, server)
    assert prepared.prompt.ids == [*range(6, 13), 257]
    assert prepared.real_ids == list(range(6, 13))
    assert prepared.max_tokens == 1


def test_request_options_need_trust() -> None:
    from triton_repo.frontend.media import MediaPolicy

    server = front_end(100, media=MediaPolicy(trust_request_kwargs=False))
    row = {"text_input": "a", "mm_processor_kwargs": '{"fps": 1}'}
    assert refused(row, server).where == "mm_processor_kwargs"
    assert run(row).options.mm_views["video"]["fps"] == 1


@pytest.mark.parametrize("parts", [True, False])
def test_a5_14_begin_token_once_in_a_chat_with_media(
    character_tokenizer: Path, parts: bool
) -> None:
    tokenizer = open_with_transformers(character_tokenizer)
    said = "{{ messages[0]['content'] }}"
    if parts:
        said = (
            "{% for part in messages[0]['content'] %}"
            "{{ '?' if part['type'] == 'image' else part['text'] }}{% endfor %}"
        )
    tokenizer.chat_template = "{{ cls_token }}" + said
    server = front_end(100, tokenizer, placeholders={"image": "?"})
    content = [
        {"type": "text", "text": "ab"},
        {"type": "image_url", "image_url": png(32, 32)},
        {"type": "text", "text": "c"},
    ]
    prepared = run({"messages": json.dumps([{"role": "user", "content": content}])}, server)
    assert prepared.prompt.ids == [1, 10, 11] + [3] * prepared.media[0].length + [12]
    raw = run({"text_input": "ab", "image_bytes_input": [png_bytes()]}, server)
    assert raw.prompt.ids.count(1) == 1


def png_bytes() -> bytes:
    return base64.b64decode(png(32, 32).partition(",")[2])


def test_a5_15_empty_prompts(character_tokenizer: Path, tmp_path: Path) -> None:
    server = front_end(100, open_with_transformers(character_tokenizer))
    # No text, but tokens: a prompt.
    assert run({"text_input": ""}, server).prompt.ids == [1, 2]
    bare = {"text_input": "", "add_special_tokens": False}
    assert refused(bare, server).what == "the prompt has no tokens"
    # Text, but no tokens: none.
    blanks = RawTokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    blanks.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=blanks).save_pretrained(str(tmp_path))
    spaces = front_end(100, open_with_transformers(tmp_path))
    assert refused({"text_input": "  "}, spaces).what == "the prompt has no tokens"
    assert run({"text_input": " a "}, spaces).prompt.ids == [0]


@pytest.mark.parametrize("path", PATHS)
def test_a5_20_one_kind_of_truncation_on_every_path(path: str) -> None:
    row, server = PATHS[path], front_end(1000)
    whole = run(row, server).prompt.ids
    assert run(row | {"truncate_prompt_tokens": -1}, server).prompt.ids == whole
    for wrong in (-2, 1001):
        error = refused(row | {"truncate_prompt_tokens": wrong}, server)
        assert error.where == "truncate_prompt_tokens"
    assert refused(row | {"truncation_side": "middle"}, server).where == "truncation_side"


def test_t14_a_slow_tokenizer_has_no_offsets(tmp_path: Path) -> None:
    ByT5Tokenizer().save_pretrained(str(tmp_path))
    tokenizer = open_with_transformers(tmp_path)
    assert isinstance(tokenizer, SlowTokenizer)
    server = front_end(100, tokenizer)
    row = {"text_input": "abcdef", "add_special_tokens": False, "return_token_offsets": True}
    cut = {"truncate_prompt_tokens": 3, "truncation_side": "left"}
    prompt = run(row | cut, server).prompt
    assert (tokenizer.decode(prompt.ids, True), prompt.arrays) == ("def", {})
    assert "offsets" not in run(row, server).prompt.arrays


def outcome(row: dict[str, Any], server: FrontEnd) -> Any:
    """What a row becomes, or the mistake in it."""
    try:
        prepared = prepare(row, server)
    except UsageError as error:
        return (error.where, error.what, error.expected, error.found)
    return (prepared.prompt, prepared.max_tokens, prepared.media, prepared.window)


def differing(monkeypatch: pytest.MonkeyPatch, untouched: Any) -> list[tuple[str, int]]:
    """Rows, by their options and length, that become something else when prompts up to `untouched`
    ids pass by the steps that cut, fill and check.
    """
    wishes: dict[str, dict[str, Any]] = {
        "none": {},
        "one token": {"max_tokens": 1},
        "as many as fit": {"max_tokens": 10},
        "cut": {"truncate_prompt_tokens": 3},
        "cut to what fits": {"truncate_prompt_tokens": -1, "truncation_side": "left"},
        "filled": {"padding": "5"},
        "filled to the context": {"padding": "max_length"},
        "offsets": {"return_token_offsets": True},
        "embedding": {"task": "embed", "max_tokens": None},
        "embedding in chunks": {
            "task": "embed", "max_tokens": None, "enable_chunked_processing": True,
        },
    }  # fmt: skip
    found = []
    for context, max_prompt in ((10, None), (10, 6), (None, 6), (None, None)):
        server = front_end(context, max_prompt=max_prompt)
        for (name, wish), length in product(wishes.items(), range(13)):
            row = {"max_tokens": 4, "text_input": "abcdefghijklm"[:length]} | wish
            right = outcome(row, server)
            with monkeypatch.context() as patched:
                patched.setattr(RequestOptions, "untouched_length", untouched)
                if outcome(row, front_end(context, max_prompt=max_prompt)) != right:
                    found.append((name, length))
    return found


def test_prompts_that_pass_by_the_steps_are_as_after_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert differing(monkeypatch, 0) == []
    # The comparison sees prompts that pass by although there was something to do.
    seen = {name for name, _ in differing(monkeypatch, 99)}
    assert seen == {
        "none", "one token", "as many as fit", "cut", "cut to what fits", "filled",
        "filled to the context", "offsets", "embedding", "embedding in chunks",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("context", "max_prompt", "most"), [(10, None, 6), (10, 3, 3), (None, 5, 5), (None, None, 12)]
)
def test_prompts_with_room_for_the_answer_pass_by(
    context: int | None, max_prompt: int | None, most: int
) -> None:
    server = front_end(context, max_prompt=max_prompt)
    passed = []
    for length in range(1, 13):
        try:
            passed.append(run({"text_input": "x" * length}, server).is_plain)
        except UsageError:
            passed.append(False)
    assert passed == [length <= most for length in range(1, 13)]
    media = {"content_parts": json.dumps(["a", {"type": "image_url", "image_url": png(32, 32)}])}
    assert not run(media, front_end(None)).is_plain
