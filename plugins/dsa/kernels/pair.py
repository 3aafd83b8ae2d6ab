"""Two programs of a cluster that exchange tiles of scores through their shared memories.

Triton's own clusters are one program on two multiprocessors. Here they are two ordinary programs
side by side, which the compiler knows nothing of: the exchange is written in PTX. Its memory is a
static array, in front of what the compiler lays out, with two barriers behind it: `arrived` (the
other program's tile is here) and `taken` (the other program has read this one's).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# Bytes of a tile of 64 x 64 float32. The array ends at a multiple of 1024, as swizzled tiles need.
_OPEN = gl.constexpr("""
.shared .align 1024 .b8 exchange[17408];
mov.u32 $0, exchange;
{
.reg .pred first;
.reg .u32 thread;
mov.u32 thread, %tid.x;
setp.eq.u32 first, thread, 0;
@first mbarrier.init.shared::cta.b64 [exchange + 16384], 1;
@first mbarrier.init.shared::cta.b64 [exchange + 16392], 1;
fence.mbarrier_init.release.cluster;
}
""")
_COME = gl.constexpr("""
barrier.cluster.arrive.relaxed.aligned;
mov.u32 $0, 0;
""")
_PUBLISH = gl.constexpr("""
barrier.cluster.arrive.release.aligned;
mov.u32 $0, 0;
""")
_MEET = gl.constexpr("""
barrier.cluster.wait.acquire.aligned;
mov.u32 $0, 0;
""")
_PEER = gl.constexpr("""
{
.reg .u32 other;
mov.u32 other, %cluster_ctarank;
xor.b32 other, other, 1;
mapa.shared::cluster.u32 $0, $1, other;
}
""")
_SEND = gl.constexpr("""
st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [$8], {$4, $5, $6, $7}, [$12];
mov.u32 $0, 0;
mov.u32 $1, 0;
mov.u32 $2, 0;
mov.u32 $3, 0;
""")
_RECEIVE = gl.constexpr("ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];")
_EXPECT = gl.constexpr("""
{
.reg .pred first;
.reg .u32 thread;
mov.u32 thread, %tid.x;
setp.eq.u32 first, thread, 0;
@first mbarrier.arrive.expect_tx.shared::cta.b64 _, [$1], 16384;
mov.u32 $0, 0;
}
""")
_WAIT = gl.constexpr("""
{
.reg .pred done;
again:
mbarrier.try_wait.parity.shared::cta.b64 done, [$1], $2;
@!done bra.uni again;
mov.u32 $0, 0;
}
""")
_ACKNOWLEDGE = gl.constexpr("""
{
.reg .pred first;
.reg .u32 thread;
mov.u32 thread, %tid.x;
setp.eq.u32 first, thread, 0;
@first mbarrier.arrive.shared::cluster.b64 _, [$1];
mov.u32 $0, 0;
}
""")
_ARRIVED = gl.constexpr(16384)
_TAKEN = gl.constexpr(16392)
_DONE = gl.constexpr("=r,r,~{memory}")


@gluon.jit
def open_exchange(row):
    """Address of the exchange, its barriers initialised. To be called once, by four warps."""
    return gl.inline_asm_elementwise(_OPEN, _DONE, [row], gl.int32, False, 1)


@gluon.jit
def come(exchange):
    """Every warp of both programs calls this once, early, and `meet` once, later."""
    gl.inline_asm_elementwise(_COME, _DONE, [exchange], gl.int32, False, 1)


@gluon.jit
def publish(any_integer):
    """`come`, and what this program has written to global memory is there for the other one that
    has met."""
    gl.inline_asm_elementwise(_PUBLISH, _DONE, [any_integer], gl.int32, False, 1)


@gluon.jit
def meet(exchange):
    """Waits for all warps of both programs: afterwards they may write to each other."""
    gl.inline_asm_elementwise(_MEET, _DONE, [exchange], gl.int32, False, 1)


@gluon.jit
def peer_of(exchange):
    """The exchange's address in the other program's memory."""
    return gl.inline_asm_elementwise(_PEER, "=r,r", [exchange], gl.int32, True, 1)


@gluon.jit
def places(LAYOUT: gl.constexpr):
    """Byte offset of each score of 64 x 64: four registers of a thread lie together.

    A bijection on the groups of four that a thread holds (two neighbouring columns, of two rows
    eight apart); consecutive threads are 16 bytes apart.
    """
    line = gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, LAYOUT))
    thread = (line // 16 * 32 + line % 8 * 4)[:, None] + (column % 8 // 2)[None, :]
    return thread * 16 + (column // 8 * 2048)[None, :]


@gluon.jit
def send(score, peer, at):
    """Starts to copy float32 [64, 64] to the other program."""
    barrier = gl.full([64, 64], 0, gl.int32, layout=at.type.layout) + (peer + _ARRIVED)
    gl.inline_asm_elementwise(
        _SEND,
        "=r,=r,=r,=r,f,f,f,f,r,r,r,r,r,r,r,r,~{memory}",
        [score, at + peer, barrier],
        gl.int32,
        False,
        4,
    )


@gluon.jit
def receive(exchange, at, turn):
    """The tile that the other program has sent in its turn-th turn, float32 [64, 64]."""
    gl.inline_asm_elementwise(_EXPECT, _DONE, [exchange + _ARRIVED], gl.int32, False, 1)
    wait(exchange + _ARRIVED, turn & 1)
    return gl.inline_asm_elementwise(
        _RECEIVE, "=f,=f,=f,=f,r,r,r,r,~{memory}", [at + exchange], gl.float32, False, 4
    )


@gluon.jit
def wait(barrier, phase):
    gl.inline_asm_elementwise(_WAIT, "=r,r,r,~{memory}", [barrier, phase], gl.int32, False, 1)


@gluon.jit
def acknowledge(peer):
    """Tells the other program that its tile was read, by all threads in front of a barrier."""
    gl.inline_asm_elementwise(_ACKNOWLEDGE, _DONE, [peer + _TAKEN], gl.int32, False, 1)


@gluon.jit
def wait_taken(exchange, turn):
    """Waits until the other program has read the tile of the turn-th turn."""
    wait(exchange + _TAKEN, turn & 1)
