"""QSA as a chain of plugin layers, one per kernel; `plugins.qsa.layer` calls it.

Kernels, tiles and splits are fixed when a layer is built: they are those that `plugins.qsa.kernel`
would choose for the largest call of the engine.
"""

from __future__ import annotations

from typing import Any

import triton

from plugins.aot import layer
from plugins.qsa import kernel, plan
from plugins.qsa.plan import Tiles
from plugins.qsa.plugin import NAMESPACE, OPERATIONS, geometry_attributes
from plugins.qsa.site import Memory, Norms, Prepared, Projections, Site
from plugins.trt.capability import parse_target
from plugins.trt.types import Tensor

_BY_NAME = {operation.id.removeprefix(f"{NAMESPACE}::"): operation for operation in OPERATIONS}


def _add(site: Site, name: str, tensors: dict[str, Tensor], **attributes: Any) -> dict[str, Tensor]:
    """Add a plugin layer; `past` and `new` come along where it takes them."""
    calls = site.calls
    given = {"past": calls.past, "new": calls.new, **tensors}
    geometry = geometry_attributes(site.geometry)
    return layer.add(calls.net, _BY_NAME[name], given, geometry | attributes)


def _tiles(tiles: Tiles) -> dict[str, int]:
    return {"columns": tiles.columns, "warps": tiles.warps, "stages": tiles.stages}


def prepare(site: Site, projections: Projections, norms: Norms, memory: Memory) -> Prepared:
    """As `layer.prepare`, in one kernel."""
    calls = site.calls
    tensors = {
        "q_gate": projections.q_gate,
        "key": projections.key,
        "value": projections.value,
        "index_qk": projections.index_qk,
        "q_weight": norms.query,
        "k_weight": norms.key,
        "index_q_weight": norms.index_query,
        "index_k_weight": norms.index_key,
        "frequencies": calls.frequencies,
        "index_frequencies": calls.frequencies,
        # A position is a rank, so that neither is read; the kernel still needs an address.
        "positions": calls.past,
        "position_state": calls.past,
        "index_state": memory.state,
        "key_cache_before": memory.keys,
        "value_cache_before": memory.values,
        "index_keys_before": memory.block_keys,
    }
    sections = {"section_t": 0, "section_h": 0, "section_w": 0}
    rotary = {"rotary": calls.rotary_dim, "index_rotary": calls.rotary_dim, "axes": 1, **sections}
    made = _add(site, "prepare", tensors, eps=calls.eps, **rotary)
    updated = Memory(
        keys=made["key_cache"],
        values=made["value_cache"],
        block_keys=made["index_keys"],
        state=made["next_index_state"],
    )
    return Prepared(made["query"], made["index_query"], updated)


def select(site: Site, index_query: Tensor, block_keys: Tensor) -> Tensor:
    """As `layer.select`; `block_keys` [B, 1, NB, Di] are those that calls look at."""
    calls, g = site.calls, site.geometry
    # Rows behind the visible ones, to which padding is written, are never chosen from.
    most = calls.rows // g.ratio
    group = kernel.group_size(most)
    groups = {"group": group} if group else {}
    scored = _add(
        site,
        "score_groups" if group else "score",
        {"index_query": index_query, "index_keys": calls.net.squeeze(block_keys, [1])},
        query_rows=min(calls.steps, kernel.SCORE_ROWS),
        tiles=kernel.score_tiles(calls.slots, calls.steps, most),
        **_tiles(kernel.score_tile(group)),
        **groups,
    )
    width = triton.cdiv(most, group) if group else most
    name = "select_grouped" if group else "select"
    return _add(site, name, scored, width=width, warps=kernel.select_warps(width), **groups)["ids"]


def attend(
    site: Site, query: Tensor, keys: Tensor, values: Tensor, block_ids: Tensor, q_gate: Tensor
) -> Tensor:
    """As `layer.attend`."""
    calls = site.calls
    inputs = {"q": query, "k_cache": keys, "v_cache": values, "blocks": block_ids}
    gate = {"gate": q_gate}
    if calls.context:
        return _attend_tiles(site, inputs, gate)
    how = kernel.decode_plan(site.geometry, calls.slots * calls.steps)
    tiles = _tiles(how.tiles)
    if how.splits == 1:
        return _add(site, "attend", inputs | gate, interleaved_gate=1, **tiles)["out"]
    if how.once:
        del tiles["stages"]
    name = "attend_once" if how.once else "attend_split"
    parts = _add(site, name, inputs, splits=how.splits, **tiles)
    return _add(site, "merge", parts | gate, splits=how.splits, interleaved_gate=1)["out"]


def _attend_tiles(site: Site, inputs: dict[str, Tensor], gate: dict[str, Tensor]) -> Tensor:
    """Neighbouring queries read their blocks together where they share enough of them."""
    how = kernel.prefill_plan(site.geometry, parse_target(layer.target_of(site.calls.net)))
    common = {"tile_rows": how.rows, "interleaved_gate": 1}
    if how.hopper and plan.within_budget(site.geometry, site.calls.rows):
        # No lists are read; the kernel still needs addresses.
        unread = {"counts": site.calls.past, "entries": site.calls.past}
        return _add(site, "attend_hopper", inputs | gate | unread, **common, whole=1)["out"]
    words = site.calls.net.shape(inputs["k_cache"])[2] // site.geometry.ratio
    union = _add(site, "unite", {"blocks": inputs["blocks"]}, tile_rows=how.rows, words=words)
    given = inputs | gate | {"counts": union["counts"], "entries": union["entries"]}
    if how.hopper:
        return _add(site, "attend_hopper", given, **common, whole=0)["out"]
    done = _add(site, "attend_tile", given, **common, **_tiles(how.together))["out"]
    given["together"] = done
    done = _add(site, "attend_apart", given, **common, **_tiles(how.apart))["out"]
    given["together"] = done
    dense = {"lines": how.lines, "interleaved_gate": 1, **_tiles(how.dense)}
    return _add(site, "attend_dense", given, **dense)["out"]
