"""Processor options per modality: one reader for the processor, budgets, counts and cache keys.

Options come flat (`{"size": …}`) or scoped (`{"videos_kwargs": {"size": …}}`). A scope is present
when it is a non-empty mapping; missing, None or empty means absent; anything else is invalid.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, TypeGuard

SCOPES = {"image": "images_kwargs", "video": "videos_kwargs", "audio": "audio_kwargs"}
TEXT_SCOPE = "text_kwargs"
ALL_SCOPES = (*SCOPES.values(), TEXT_SCOPE)
VISION_SCOPES = ("images_kwargs", "videos_kwargs")

Kwargs = dict[str, Any]


def deep_merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> Kwargs:
    """A new dict: `over` laid over `base`, recursively for mappings; shares nothing with either."""
    merged = copy.deepcopy(dict(base))
    for key, value in over.items():
        old = merged.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            merged[key] = deep_merge(old, value)
        else:
            merged[key] = copy.deepcopy(value)
    return merged


def is_present(scope: Any) -> TypeGuard[Mapping[str, Any]]:
    """Whether a scope value is a non-empty mapping."""
    return isinstance(scope, Mapping) and bool(scope)


def is_absent(scope: Any) -> bool:
    """Whether a scope value means "nothing given"."""
    return scope is None or (isinstance(scope, Mapping) and not scope)


def view(kwargs: Mapping[str, Any], modality: str | None) -> Kwargs:
    """Options as one modality sees them: its scope laid over the flat keys.

    Scoped beats flat, also a scoped None. The scopes stay in the view; other modalities' scopes
    never influence it. An unknown modality, "text" and None give a plain copy.
    """
    flat = copy.deepcopy(dict(kwargs))
    scope = kwargs.get(SCOPES.get(modality or "", ""))
    return deep_merge(flat, scope) if is_present(scope) else flat


def own_options(kwargs: Mapping[str, Any], modality: str) -> Kwargs:
    """The view without any scope: what identifies a media item of this modality in a cache."""
    return {k: v for k, v in view(kwargs, modality).items() if k not in ALL_SCOPES}


def merge(server: Mapping[str, Any], request: Mapping[str, Any]) -> Kwargs:
    """Server options and request options as one.

    Per scope, for keys that a scope names on either side: server flat < server scoped < request
    flat < request scoped. Flat keys merge among themselves. An invalid request scope replaces the
    server's, so that the processor refuses it; an absent one leaves it in place.
    """
    flat_server = {k: v for k, v in server.items() if k not in ALL_SCOPES}
    flat_request = {k: v for k, v in request.items() if k not in ALL_SCOPES}
    merged = deep_merge(flat_server, flat_request)
    for scope in ALL_SCOPES:
        ours, theirs = server.get(scope), request.get(scope)
        if not is_absent(theirs) and not is_present(theirs):
            merged[scope] = copy.deepcopy(theirs)
            continue
        layers = (ours if is_present(ours) else {}, theirs if is_present(theirs) else {})
        keys = [k for layer in layers for k in layer]
        if not keys:
            if not is_absent(ours):
                merged[scope] = copy.deepcopy(ours)
            continue
        result: Kwargs = {}
        for layer in (flat_server, layers[0], flat_request, layers[1]):
            result = deep_merge(result, {k: v for k, v in layer.items() if k in keys})
        merged[scope] = result
    return merged


def route(
    kwargs: Mapping[str, Any], accepted: Mapping[str, frozenset[str]] | None = None
) -> Kwargs:
    """Options for a Hugging Face processor: no key both flat and in a scope.

    `accepted` names the keys each scope's processor takes. A flat key goes into every scope that
    takes it (scoped values win) and its flat copy is dropped; others stay flat. Without `accepted`
    only flat keys that some scope already names move, into that scope and, for vision scopes, into
    the other one too, so that no modality loses its value.

    Raises TypeError naming the scope when a key has to go into an invalid scope.
    """
    routed = copy.deepcopy(dict(kwargs))
    present = {s: routed[s] for s in ALL_SCOPES if is_present(routed.get(s))}
    for key in [k for k in kwargs if k not in ALL_SCOPES]:
        if accepted is not None:
            targets = [s for s in ALL_SCOPES if key in accepted.get(s, frozenset())]
        else:
            targets = [s for s, values in present.items() if key in values]
            if any(s in VISION_SCOPES for s in targets):
                targets = list(dict.fromkeys([*targets, *VISION_SCOPES]))
        if not targets:
            continue
        value = routed.pop(key)
        for scope in targets:
            current = routed.get(scope)
            if not is_absent(current) and not isinstance(current, Mapping):
                raise TypeError(f"{scope} must be a mapping, not {type(current).__name__}")
            routed[scope] = deep_merge({key: value}, current or {})
    return routed


def injective(value: Any) -> bytes:
    """Bytes that differ for different option values: every part carries its type and length.

    Unlike JSON text or joined strings, `{"ab": "c"}` and `{"a": "bc"}`, nested and dotted keys,
    lists and numbered mappings, None and "" all differ.
    """
    if isinstance(value, Mapping):
        items = sorted((injective(k), injective(v)) for k, v in value.items())
        body = b"".join(k + v for k, v in items)
        return b"m%d:" % len(items) + body
    if isinstance(value, (list, tuple)):
        return b"l%d:" % len(value) + b"".join(injective(v) for v in value)
    if isinstance(value, bytes):
        tag, body = b"b", value
    elif isinstance(value, str):
        tag, body = b"s", value.encode("utf-8", "surrogatepass")
    else:
        # bool before int: True and 1 are different options.
        tag = type(value).__name__.encode() + b"/"
        body = repr(value).encode()
    return tag + b"%d:" % len(body) + body
