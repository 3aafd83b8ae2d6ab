"""One call of `prepare` in a network: the plugin layer and the native layers do the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from plugins.qsa import layer, reference
from plugins.qsa.geometry import Geometry
from plugins.qsa.site import Calls, Memory, Norms, Projections, Site
from plugins.support.errors import BuildError
from plugins.trt.backend import load_backend
from plugins.trt.network import Network
from runtime.interpreter.execute import Interpreter
from runtime.interpreter.trace import trace
from tests.plugins.full_trt import capability_for, full_backend

G = Geometry(
    heads=6, kv_heads=2, width=32, index_heads=4, index_width=16, ratio=4, blocks=8,
    dtype="float32", cache_dtype="float32",
)  # fmt: skip
ROWS, SCRAP, STEPS, ROTARY, THETA, EPS = 64, 8, 7, 16, 1e4, 1e-6
# Two running slots, one of them new, and a padding slot.
PAST, NEW = (0, 22, 9), (6, 7, 0)
OUTPUTS = ("query", "index_query")
CACHES = ("keys", "values", "block_keys")


def values() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    rows = ROWS + SCRAP
    return {
        "past": torch.tensor(PAST, dtype=torch.int32),
        "new": torch.tensor(NEW, dtype=torch.int32),
        "q_gate": normal(3, STEPS, 2 * 6 * 32),
        "key": normal(3, STEPS, 2 * 32),
        "value": normal(3, STEPS, 2 * 32),
        "index_qk": normal(3, STEPS, 5 * 16),
        "q_norm": normal(32), "k_norm": normal(32), "iq_norm": normal(16), "ik_norm": normal(16),
        "keys": normal(3, 2, rows, 32),
        "values": normal(3, 2, rows, 32),
        "block_keys": normal(3, 1, rows // 4, 16),
        "state": normal(3, 3, 16),
    }  # fmt: skip


def network(plugins: bool) -> tuple[Network, Any]:
    """The network before the call, and the arguments of the call."""
    net = Network(full_backend(), capability_for("9.0")) if plugins else Network(load_backend())
    t = {}
    for name, value in values().items():
        batch = () if name.endswith("norm") else (-1,)
        shape = [*batch, *value.shape[len(batch) :]]
        t[name] = net.input(name, str(value.dtype).removeprefix("torch."), shape)
    index = net.unsqueeze(net.iota(STEPS), [0])
    valid = net.less(index, net.unsqueeze(t["new"], [1]))
    positions = net.add(net.unsqueeze(t["past"], [1]), index)
    active = net.greater(t["new"], 0)
    calls = Calls(
        net=net, context=False, past=t["past"], new=t["new"], positions=positions,
        queries=net.select(valid, positions, -1), active=active,
        token_row=net.select(active, t["past"], ROWS), span=ROWS, rows=ROWS,
        cache_rows=ROWS + SCRAP, slots=3, steps=STEPS, ratio=4, rotary_dim=ROTARY, theta=THETA,
        eps=EPS, dtype="float32",
    )  # fmt: skip
    norms = Norms(t["q_norm"], t["k_norm"], t["iq_norm"], t["ik_norm"])
    projections = Projections(t["q_gate"], t["key"], t["value"], t["index_qk"])
    memory = Memory(t["keys"], t["values"], t["block_keys"], t["state"])
    return net, (Site(calls, G), projections, norms, memory)


def run(plugins: bool) -> dict[str, Tensor]:
    """What the call gives and what it leaves in the caches."""
    net, arguments = network(plugins)
    ready = layer.prepare(*arguments)
    assert bool(net.plugins) == plugins
    for name in OUTPUTS:
        net.output(getattr(ready, name), name)
    net.output(ready.memory.state, "next_state")
    given = values()
    out = Interpreter(trace(net), {}, strict=True).run(given)
    for name in CACHES:
        assert out[f"{name}.updated"].data_ptr() == given[name].data_ptr()
    return {**out, **{name: given[name] for name in CACHES}}


def near(found: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(found, right, atol=1e-5, rtol=0)


def test_both_ways_give_what_the_definition_says() -> None:
    given = values()
    past, new = given["past"], given["new"]
    positions = past[:, None] + torch.arange(STEPS)
    right = reference.prepare(
        given["q_gate"], given["key"], given["value"], given["index_qk"],
        q_norm=given["q_norm"], k_norm=given["k_norm"], index_q_norm=given["iq_norm"],
        positions=positions, rotary_dim=ROTARY, index_rotary_dim=ROTARY, theta=THETA, eps=EPS,
    )  # fmt: skip
    raw = torch.cat([given["state"], right.index_key], 1)
    for plugins in (True, False):
        made = run(plugins)
        for slot, (start, count) in enumerate(zip(past.tolist(), new.tolist(), strict=True)):
            for name in OUTPUTS:
                wanted = getattr(right, name)[slot, :, :count]
                near(made[name][slot, :, :count], wanted)
            assert torch.equal(made["next_state"][slot], raw[slot, count : count + 3])
            keys, values_ = given["keys"][slot].clone(), given["values"][slot].clone()
            keys[:, start : start + count] = right.key[slot, :, :count]
            values_[:, start : start + count] = right.value[slot, :, :count]
            # Native layers write padding too, which nothing reads.
            seen = slice(0, start + count)
            torch.testing.assert_close(
                made["keys"][slot, :, seen], keys[:, seen], atol=1e-5, rtol=0
            )
            assert torch.equal(made["values"][slot, :, seen], values_[:, seen])
            first, whole = start // 4, (start + count) // 4
            blocks = given["block_keys"][slot, 0, :whole].clone()
            if count:
                offset = 3 - start % 4
                pooled = reference.pool_index_keys(
                    raw[slot : slot + 1, offset:], given["ik_norm"], ratio=4, rotary_dim=ROTARY,
                    theta=THETA, eps=EPS, first_block=first,
                )  # fmt: skip
                blocks[first:] = pooled[0, : whole - first]
            torch.testing.assert_close(
                made["block_keys"][slot, 0, :whole], blocks, atol=1e-5, rtol=0
            )
            if plugins:
                untouched = made["keys"][slot, :, start + count :]
                assert torch.equal(untouched, given["keys"][slot, :, start + count :])
        # Negative control: keys one position on are other keys.
        off = (made["keys"][1, :, 23:29] - right.key[1, :, :6]).abs().max()
        assert off > 1e-1


@pytest.mark.parametrize("plugins", [True, False])
def test_a_cache_is_updated_once_and_not_read_before(plugins: bool) -> None:
    net, arguments = network(plugins)
    layer.prepare(*arguments)
    with pytest.raises(BuildError, match="updated twice"):
        layer.prepare(*arguments)
    net, arguments = network(plugins)
    memory = arguments[3]
    early = net.mul(memory.keys, 2.0)
    layer.prepare(*arguments)
    net.output(early, "early")
    with pytest.raises(BuildError, match=r"keys\.updated"):
        trace(net)
