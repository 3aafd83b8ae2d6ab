"""DSA as a chain of plugin layers, one per kernel; `plugins.dsa.layer` calls it.

Kernels, tiles and splits are fixed when a layer is built: they are those that `plugins.dsa.kernel`
would choose for the largest call of the engine.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from plugins.aot import layer
from plugins.aot.compile import SHARED_BYTES
from plugins.dsa import kernel, plan
from plugins.dsa.plugin import NAMESPACE, OPERATIONS, geometry_attributes
from plugins.dsa.site import Site
from plugins.trt.capability import parse_target
from plugins.trt.types import Tensor

_BY_NAME = {operation.id.removeprefix(f"{NAMESPACE}::"): operation for operation in OPERATIONS}


def _add(site: Site, name: str, tensors: dict[str, Tensor], **attributes: Any) -> dict[str, Tensor]:
    """Add a plugin layer; `past` and `new` come along where it takes them."""
    given = {"past": site.past, "new": site.new, **tensors}
    geometry = geometry_attributes(site.geometry)
    return layer.add(site.net, _BY_NAME[name], given, geometry | attributes)


def _hopper(site: Site) -> bool:
    """Whether the kernels for compute capability 9.0 do this geometry on the target."""
    return plan.fits_hopper(site.geometry, parse_target(layer.target_of(site.net)))


def _kernels(site: Site) -> dict[str, int]:
    """The attributes that choose between kernels."""
    shared = SHARED_BYTES.get(layer.target_of(site.net), 0) * 1024
    return {"hopper": int(_hopper(site)), "small": int(shared <= plan.SMALL_SHARED_BYTES)}


def select(site: Site, index_query: Tensor, index_keys: Tensor, head_weights: Tensor) -> Tensor:
    """As `layer.select`; `index_keys` [B, 1, N, Di] are those that calls look at."""
    net, g = site.net, site.geometry
    # Rows behind the visible ones, to which padding is written, are never chosen from.
    most = site.rows
    tiles = kernel.score_tiles(site.steps)
    scores = _add(
        site,
        "score",
        {"index_query": index_query, "index_keys": index_keys, "head_weights": head_weights},
        queries=tiles.queries,
        tokens=tiles.tokens,
        warps=tiles.warps,
        stages=tiles.stages,
        run=kernel.score_run(tiles, site.slots, site.steps, most),
    )["scores"]
    (chunk, parts), *levels = kernel.select_levels(g, site.slots * site.steps, most)
    first = _add(site, "select_chunk", {"scores": scores}, chunk=chunk, chunks=parts)
    chosen = first["chosen"]
    for chunk, after in levels:
        inputs = {"scores": scores, "candidates": chosen}
        chosen = _add(site, "select_among", inputs, chunk=chunk, width=parts * g.kept)["chosen"]
        parts = after
    return net.reshape(chosen, [net.dim(index_query, 0), net.dim(index_query, 1), g.kept])


def attend(
    site: Site, q_latent: Tensor, q_rope: Tensor, cache: Tensor, token_ids: Tensor, gate: Tensor
) -> Tensor:
    """Gated absorbed attention over every query's tokens.

    Args:
        site: where.
        q_latent: [B, S, H, L]; q_rope: [B, S, H, R].
        cache: [B, 1, C, L + R].
        token_ids: int32 [B, S, K] as `select` gives them.
        gate: [B, S, H].

    Returns:
        [B, S, H, L].
    """
    inputs = {"q_latent": q_latent, "q_rope": q_rope, "cache": cache, "tokens": token_ids}
    # The device only decides about the kernel, which is the target's here.
    how = kernel.attend_plan(site.geometry, site.slots * site.steps, torch.device("cpu"))
    how = replace(how, hopper=_hopper(site))
    if how.pair:
        return _add(site, "attend_pair", {**inputs, "gate": gate})["out"]
    if how.splits == 1:
        return _add(site, "attend", {**inputs, "gate": gate}, **_kernels(site))["out"]
    parts = _add(site, "attend_split", inputs, splits=how.splits, **_kernels(site))
    return _add(site, "merge", {**parts, "gate": gate}, splits=how.splits)["out"]


def attend_window(
    site: Site, q_latent: Tensor, q_rope: Tensor, rows: Tensor, gate: Tensor
) -> Tensor:
    """Gated absorbed attention over the window.

    Args:
        site, rows, gate: as in `layer.attend_window`.
        q_latent: [B, S, H, L]; q_rope: [B, S, H, R].

    Returns:
        [B, S, H, L].
    """
    # Row j holds position past - (W - 1) + j.
    base = site.net.sub(site.past, site.geometry.window - 1)
    call = {"cache": rows, "base": base}
    inputs = {"q_latent": q_latent, "q_rope": q_rope, **call}
    if _hopper(site):
        splits = kernel.window_splits(site.geometry, site.slots * site.steps)
        if splits == 1:
            return _add(site, "window", {**inputs, "gate": gate})["out"]
        parts = _add(site, "window_split", inputs, splits=splits)
        return _add(site, "merge", {**parts, "gate": gate}, splits=splits)["out"]
    queries = kernel.window_tiles(site.steps).queries
    weights = _add(site, "window_scores", inputs, queries=queries)
    return _add(site, "window_values", {**weights, **call, "gate": gate}, queries=queries)["out"]


def attend_dense(
    site: Site, q_nope: Tensor, q_rope: Tensor, rows: Tensor, up: Tensor, gate: Tensor
) -> Tensor:
    """As `layer.attend_window`, over expanded rows."""
    net, g = site.net, site.geometry
    batch, tokens = net.dim(rows, 0), net.dim(rows, 2)
    both = g.nope + g.value
    latent = net.narrow(net.squeeze(rows, [1]), 2, 0, g.latent)
    joined = net.reshape(up, [1, g.heads * both, g.latent])
    expanded = net.matmul(latent, joined, transpose_b=True)
    expanded = net.reshape(expanded, [batch, tokens, g.heads, both])
    inputs = {"q_nope": q_nope, "q_rope": q_rope, "expanded": expanded, "cache": rows}
    return _add(site, "dense", {**inputs, "gate": gate}, **_kernels(site))["out"]
