"""Processor options per modality: views, merges, routing, budgets, cache keys."""

from __future__ import annotations

import ast
import copy
import itertools
import math
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypedDict

import pytest

from tests.triton_repo.tables import rows
from triton_repo.frontend.geometry import VisionGeometry, smart_resize
from triton_repo.frontend.media import media_key
from triton_repo.frontend.mm_kwargs import injective, merge, own_options, route, view

ACCEPTED = {
    "images_kwargs": frozenset({"size", "do_resize", "max_pixels"}),
    "videos_kwargs": frozenset({"size", "fps", "num_frames", "do_sample_frames", "max_pixels"}),
    "text_kwargs": frozenset({"padding"}),
    "audio_kwargs": frozenset({"sampling_rate", "padding"}),
}


@pytest.mark.parametrize("row", rows("views"))
def test_view(row: dict[str, Any]) -> None:
    before = copy.deepcopy(row["kwargs"])
    seen = view(row["kwargs"], row["modality"])
    if row["same"]:
        assert seen == before
    for key, value in row["expect"].items():
        assert seen[key] == value
    for key in row["absent"]:
        assert key not in seen
    # O15: the input is as it was, and shares nothing with the view.
    for value in seen.values():
        if isinstance(value, dict):
            value["changed"] = True
    assert row["kwargs"] == before


@pytest.mark.parametrize("row", rows("merges"))
def test_merge_and_route(row: dict[str, Any]) -> None:
    server, request = copy.deepcopy(row["server"]), copy.deepcopy(row["request"])
    merged = merge(row["server"], row["request"])
    assert merged == row["merged"]
    assert (row["server"], row["request"]) == (server, request)
    if isinstance(row["routed"], str):
        with pytest.raises(TypeError, match=row["routed"].removeprefix("TypeError: ")):
            route(merged, ACCEPTED)
    else:
        assert route(merged, ACCEPTED) == row["routed"]


def test_route_without_schema_keeps_the_other_modality() -> None:
    kwargs = {"size": {"longest_edge": 5}, "videos_kwargs": {"size": {"longest_edge": 9}}, "x": 1}
    assert route(kwargs) == {
        "x": 1,
        "images_kwargs": {"size": {"longest_edge": 5}},
        "videos_kwargs": {"size": {"longest_edge": 9}},
    }


def test_route_without_schema_leaves_the_rest() -> None:
    kwargs = {"sampling_rate": 1, "size": 2, "audio_kwargs": {"sampling_rate": 3}}
    assert route(kwargs) == {"size": 2, "audio_kwargs": {"sampling_rate": 3}}
    # What no processor takes stays flat, with a schema too.
    assert route({"unknown": 1, "fps": 2}, ACCEPTED) == {"unknown": 1, "videos_kwargs": {"fps": 2}}


def test_routed_kwargs_never_name_a_key_twice() -> None:
    values: list[Any] = [None, 3, {"longest_edge": 5}]
    for flat, image, video in itertools.product(values, repeat=3):
        kwargs = {"size": flat, "images_kwargs": {"size": image}, "videos_kwargs": {"fps": video}}
        for accepted in (None, ACCEPTED):
            routed = route(kwargs, accepted)
            scoped = {k for s in ACCEPTED for k in (routed.get(s) or {})}
            assert not scoped & routed.keys()


def test_resolved_options_are_not_merged_again() -> None:
    server = {"size": {"longest_edge": 1}}
    routed = route(merge(server, {"videos_kwargs": {"size": {"longest_edge": 2}}}), ACCEPTED)
    # Merging the server's options a second time would bring the flat key back.
    assert "size" not in routed
    assert "size" in merge(server, routed)


@pytest.mark.parametrize("row", rows("budgets"))
def test_budgets(row: dict[str, Any]) -> None:
    geometry = VisionGeometry()
    assert geometry.max_tokens(row["kwargs"], "image") == row["image"]
    assert geometry.max_tokens(row["kwargs"], "video") == row["video"]


def test_counts_come_from_the_same_view_as_budgets() -> None:
    geometry = VisionGeometry()
    kwargs = {"videos_kwargs": {"size": {"longest_edge": 2048 * 8, "shortest_edge": 1024}}}
    assert geometry.max_tokens(kwargs, "video") == 8
    assert geometry.tokens(kwargs, "video", 4000, 4000, 2) <= 8
    assert geometry.tokens(kwargs, "image", 640, 480) == geometry.tokens({}, "image", 640, 480)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"size": {"shortest_edge": 4096, "longest_edge": 9000}},
        {"size": {"shortest_edge": 4096, "longest_edge": 9000}, "max_pixels": 8000},
        {"size": {"shortest_edge": 4096, "longest_edge": 9000}, "min_pixels": 5000},
        # A scope's own size and a flat alias reach a processor together.
        {"images_kwargs": {"size": {"shortest_edge": 1, "longest_edge": 9}}, "max_pixels": 8000},
    ],
)
def test_older_names_win_as_in_transformers(kwargs: dict[str, Any]) -> None:
    module = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    with pytest.warns(FutureWarning) if len(kwargs) > 1 else nullcontext():
        given = {k: v for k, v in view(kwargs, "image").items() if k in ACCEPTED["images_kwargs"]
                 or k == "min_pixels"}  # fmt: skip
        size = module.Qwen2VLImageProcessorPil()._standardize_kwargs(**given)["size"]
    found = VisionGeometry().pixel_limits(kwargs, "image")
    assert found == (size["shortest_edge"], size["longest_edge"])


def transformers_video_resize() -> Any:
    """Qwen3-VL's function; its module cannot be imported without torchvision."""
    import transformers

    path = Path(transformers.__file__).parent / "models/qwen3_vl/video_processing_qwen3_vl.py"
    (function,) = (
        node
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name == "smart_resize"
    )
    namespace: dict[str, Any] = {"math": math}
    exec(compile(ast.Module([function], []), str(path), "exec"), namespace)
    return namespace["smart_resize"]


@pytest.mark.parametrize("frames", [2, 3, 4, 5, 7, 64])
@pytest.mark.parametrize("size", [(480, 640), (1080, 1920), (31, 300), (20, 20), (3000, 64)])
@pytest.mark.parametrize("limits", [(4096, 25165824), (131072, 786432), (4096, 65536)])
def test_counts_of_videos_equal_transformers(
    frames: int, size: tuple[int, int], limits: tuple[int, int]
) -> None:
    h, w = transformers_video_resize()(frames, *size, 2, 32, *limits)
    kwargs = {"size": {"shortest_edge": limits[0], "longest_edge": limits[1]}}
    want = -(-frames // 2) * (h // 32) * (w // 32)
    assert VisionGeometry().tokens(kwargs, "video", *size, frames) == want


@pytest.mark.parametrize("size", [(480, 640), (1080, 1920), (31, 33), (3000, 20), (64, 64)])
@pytest.mark.parametrize("limits", [(65536, 16777216), (3136, 200704)])
def test_smart_resize_equals_transformers(size: tuple[int, int], limits: tuple[int, int]) -> None:
    module = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    want = module.smart_resize(*size, factor=32, min_pixels=limits[0], max_pixels=limits[1])
    assert smart_resize(*size, 32, *limits) == want


DIFFERENT = [
    {"ab": "c"}, {"a": "bc"}, {"size": {"shortest_edge": 224}}, {"size.shortest_edge": 224},
    [2, 4], {"0": 2, "1": 4}, None, "", {}, [], True, 1, 1.0, "1", {"a": None}, {"a": ""}, b"a",
    "a", ["a", "bs1:c"], ["as5:b", "c"], ["a", "bsc"], ["asb", "c"],
]  # fmt: skip


def test_encoding_is_injective() -> None:
    codes = [injective(value) for value in DIFFERENT]
    assert len(set(codes)) == len(DIFFERENT)
    # Negative control: the usual joined text is not.
    assert len({"".join(f"{k}{v}" for k, v in d.items()) for d in DIFFERENT[:2]}) == 1


def test_encoding_ignores_key_order() -> None:
    assert injective({"a": 1, "b": 2}) == injective({"b": 2, "a": 1})


def test_a5_25_media_key_depends_on_own_options_only() -> None:
    def key(modality: str, kwargs: dict[str, Any]) -> int:
        return media_key(modality, b"content", own_options(kwargs, modality))

    base = {"size": {"longest_edge": 1}}
    video = base | {"videos_kwargs": {"fps": 2}}
    image = base | {"images_kwargs": {"size": {"longest_edge": 9}}}
    assert key("image", base) == key("image", video)
    assert key("video", base) != key("video", video)
    assert key("image", base) != key("image", image)
    assert key("image", base) != key("video", base)
    assert media_key("image", b"x", {}) != media_key("image", b"y", {})


def transformers_kwargs(**kwargs: Any) -> dict[str, Any]:
    """What transformers makes of the options of a call, per modality; empty ones left out."""
    from transformers.processing_utils import ProcessingKwargs, ProcessorMixin

    class Accepted(TypedDict):
        max_pixels: int

    class Processor(ProcessorMixin):
        image_processor = video_processor = SimpleNamespace(valid_kwargs=Accepted)

    merged = object.__new__(Processor)._merge_kwargs(ProcessingKwargs, {}, **kwargs)
    return {scope: values for scope, values in merged.items() if values}


SIZE, OTHER = {"longest_edge": 1}, {"longest_edge": 2}


@pytest.mark.parametrize(
    ("kwargs", "result"),
    [
        ({"size": SIZE}, {"images_kwargs": {"size": SIZE}, "videos_kwargs": {"size": SIZE}}),
        ({"videos_kwargs": {"size": SIZE}}, {"videos_kwargs": {"size": SIZE}}),
        ({"size": SIZE, "videos_kwargs": {"size": OTHER}}, ValueError),
        ({"size": SIZE, "videos_kwargs": {"size": SIZE}}, ValueError),
        (
            {"fps": 2, "videos_kwargs": {"num_frames": 4}},
            {"videos_kwargs": {"fps": 2, "num_frames": 4}},
        ),
        ({"videos_kwargs": {}}, {}),
        ({"videos_kwargs": None}, AttributeError),
        ({"videos_kwargs": "x"}, AttributeError),
        ({"unknown_key": 3}, {}),
        ({"videos_kwargs": {"bogus": 1}}, TypeError),
        (
            {"return_tensors": "pt", "text_kwargs": {"padding": True}},
            {
                "text_kwargs": {"return_tensors": "pt", "padding": True},
                "images_kwargs": {"return_tensors": "pt"},
                "videos_kwargs": {"return_tensors": "pt"},
                "audio_kwargs": {"return_tensors": "pt"},
            },
        ),
    ],
)
def test_how_transformers_reads_options(kwargs: dict[str, Any], result: Any) -> None:
    """What `route` relies on."""
    if isinstance(result, dict):
        assert transformers_kwargs(**kwargs) == result
    else:
        with pytest.raises(result):
            transformers_kwargs(**kwargs)


@pytest.mark.parametrize("row", rows("merges"))
def test_transformers_takes_what_was_routed(row: dict[str, Any]) -> None:
    merged = row["merged"]
    if not isinstance(row["routed"], str):
        routed = route(merged, ACCEPTED)
        if all(isinstance(v, dict) for k, v in routed.items() if k in ACCEPTED):
            assert transformers_kwargs(**routed) == row["routed"]
        else:
            # A scope that is none is for the processor to refuse.
            with pytest.raises(AttributeError):
                transformers_kwargs(**routed)
    scopes = [v for k, v in merged.items() if k in ACCEPTED and isinstance(v, dict)]
    if any(key in scope for scope in scopes for key in merged):
        # Negative control: what was merged and not routed is refused.
        with pytest.raises(ValueError, match="two times"):
            transformers_kwargs(**merged)
