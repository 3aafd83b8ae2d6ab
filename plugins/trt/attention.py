"""Attention, rotary embedding and cache update of the network facade."""

from __future__ import annotations

from typing import Literal

from plugins.trt.algebra import AlgebraLayers
from plugins.trt.types import FLOATS, Tensor

Causal = Literal["none", "upper_left", "lower_right"]


class AttentionLayers(AlgebraLayers):
    """Fused attention and what belongs to it. All raise BuildError or CapabilityError."""

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None = None,
        *,
        causal: Causal = "none",
        key_lengths: Tensor | None = None,
        fused: bool = True,
    ) -> Tensor:
        """softmax(q k^T [+ mask]) v, without any scale: multiply q before.

        Args:
            q: `[B, Hq, S, D]`.
            k, v: `[B, Hk, Skv, D]`, Hq a multiple of Hk.
            mask: rank 4, broadcast to `[B, Hq, S, Skv]`: bool (true = attend) or q's type,
                added to the scores. Not together with `causal`.
            causal: "upper_left": key j <= query i; "lower_right": j <= i + Skv - S.
            key_lengths: int32 `[B]`, keys from there on are ignored.
            fused: without, the result is that of products and a softmax over stored scores; for
                networks whose fused form the compiler cannot place. Only with a mask or nothing.

        Returns `[B, Hq, S, D]`.
        """
        op = "attention"
        self.capability.require("has_attention", "fused attention")
        self._check_heads(q, k, v)
        if mask is not None:
            if causal != "none":
                # TensorRT would log an error, drop the mask and build.
                raise self._fail("a mask and a causal kind exclude each other", op)
            self._check_mask(q, k, mask)
        if causal != "none" or key_lengths is not None:
            self.capability.require(
                "has_attention_causal", "causal kinds and key lengths of fused attention"
            )
        plain = causal == "none" and key_lengths is None
        if plain and (self.dtype(q) == "float32" or not fused):
            # No target has a fused float32 kernel, and letting the compiler decompose the fused
            # layer crashes tensorrt_rtx 1.7 when the network also has a loop.
            return self._written_out(q, k, v, mask)
        norm = self.trt.AttentionNormalizationOp.SOFTMAX
        if self.capability.has_attention_causal:
            kind = getattr(self.trt.CausalMaskKind, causal.upper())
            layer = self.raw.add_attention_v2(q, k, v, norm, kind)
        else:
            layer = self.raw.add_attention(q, k, v, norm, False)
        if layer is not None:
            if mask is not None:
                layer.mask = mask
            if key_lengths is not None:
                layer.key_value_lengths = key_lengths
            # In a deep network with loops the compiler calls a fusible layer unfusible unless it
            # may decompose it; then it fuses it after all. The layer report shows what it did.
            layer.decomposable = True
        return self._one(layer, op)

    def _written_out(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Attention as products and a softmax; rows with nothing to attend to average v."""
        batch, queries, keys = self.dim(q, 0), self.dim(q, 2), self.dim(k, 2)
        _, heads, _, width = self.shape(q)
        kv_heads = self.shape(k)[1]
        grouped = self.dim_mul(queries, heads // kv_heads)
        scores = self.matmul(self.reshape(q, [batch, kv_heads, grouped, width]), k, False, True)
        scores = self.reshape(scores, [batch, heads, queries, keys])
        if mask is not None and self.dtype(mask) == "bool":
            scores = self.select(mask, scores, -1e30)
        elif mask is not None:
            scores = self.add(scores, mask)
        weights = self.reshape(self.softmax(scores, 3), [batch, kv_heads, grouped, keys])
        return self.reshape(self.matmul(weights, v), [batch, heads, queries, width])

    def _check_heads(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        op = "attention"
        if {self.rank(q), self.rank(k), self.rank(v)} != {4}:
            raise self._fail("query, key and value have rank 4", op)
        if not self.dtype(q) == self.dtype(k) == self.dtype(v) or self.dtype(q) not in FLOATS:
            raise self._fail(
                "query, key and value share one floating-point type",
                op,
                found=f"{self.dtype(q)}, {self.dtype(k)}, {self.dtype(v)}",
            )
        _, heads_q, _, dim_q = self.shape(q)
        _, heads_k, _, dim_k = self.shape(k)
        _, heads_v, _, dim_v = self.shape(v)
        if not dim_q == dim_k == dim_v or dim_q < 0:
            raise self._fail(
                "query, key and value share one static head dimension",
                op,
                found=f"{dim_q}, {dim_k}, {dim_v}",
            )
        if heads_k < 1 or heads_k != heads_v or heads_q % heads_k:
            raise self._fail(
                "query heads must be a multiple of key heads",
                op,
                found=f"{heads_q} query, {heads_k} key and {heads_v} value heads",
            )

    def _check_mask(self, q: Tensor, k: Tensor, mask: Tensor) -> None:
        op = "attention"
        if self.dtype(mask) not in ("bool", self.dtype(q)):
            raise self._fail(
                "the mask must be bool or of the query's type",
                op,
                expected=f"bool or {self.dtype(q)}",
                found=self.dtype(mask),
            )
        batch, heads, rows, _ = self.shape(q)
        wanted = (batch, heads, rows, self.shape(k)[2])
        found = self.shape(mask)
        fits = len(found) == 4 and all(
            n in (1, -1, m) or m == -1 for n, m in zip(found, wanted, strict=True)
        )
        if not fits:
            raise self._fail(
                "the mask does not fit the scores",
                op,
                expected=f"{list(wanted)} or 1 in any place",
                found=str(list(found)),
            )

    def rotary_embedding(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor | None = None,
        *,
        rotary_dim: int,
        interleaved: bool = False,
    ) -> Tensor:
        """Rotate the first `rotary_dim` channels of x.

        Args:
            x: `[B, N, S, H]`.
            cos, sin: x's type; `[B, S, rotary_dim/2]`, or with positions
                `[max positions, rotary_dim/2]`.
            positions: int32 or int64 `[B, S]`.
            rotary_dim: rotated channels, even, at most H.
            interleaved: pairs are (2i, 2i+1) instead of (i, i + rotary_dim/2).
        """
        op = "rotary_embedding"
        self.capability.require("has_rotary", "a rotary embedding layer")
        if self.rank(x) != 4:
            raise self._fail("rotary embedding needs [B, N, S, H]", op, found=str(self.shape(x)))
        if not self.dtype(x) == self.dtype(cos) == self.dtype(sin):
            raise self._fail(
                "input, cosines and sines share one element type",
                op,
                expected=self.dtype(x),
                found=f"{self.dtype(cos)}, {self.dtype(sin)}",
            )
        if not 0 < rotary_dim <= self.shape(x)[3] or rotary_dim % 2:
            raise self._fail(
                "the rotated part must be even and not larger than the head",
                op,
                expected=f"2..{self.shape(x)[3]}",
                found=str(rotary_dim),
            )
        rank = 3 if positions is None else 2
        for table in (cos, sin):
            if self.rank(table) != rank or self.shape(table)[-1] != rotary_dim // 2:
                raise self._fail(
                    "the table does not fit",
                    op,
                    expected=f"rank {rank}, last dimension {rotary_dim // 2}",
                    found=f"{list(self.shape(table))} ({table.name})",
                )
        layer = self.raw.add_rotary_embedding(x, cos, sin, interleaved, rotary_dim)
        if layer is not None and positions is not None:
            layer.set_input(3, positions)
        return self._one(layer, op)

    def kv_cache_update(self, cache: Tensor, update: Tensor, write_indices: Tensor) -> Tensor:
        """Write `update` into a cache in place and return the updated cache.

        out[b, :, w[b] + s, :] = update[b, :, s, :]. The result becomes the network output
        `X.updated` of the input `X`, and must be bound to the same memory; w + S <= C is the
        caller's duty.

        Args:
            cache: network input `[B, H, C, D]`, C static, float32, float16 or bfloat16.
            update: `[B, H, S, D]`, the cache's type.
            write_indices: int32 `[B]`.
        """
        op = "kv_cache_update"
        self.capability.require("has_kv_cache", "an in-place cache update")
        if cache.name not in self._inputs:
            raise self._fail("the cache must be a network input", op, found=cache.name)
        if cache.name in self.aliases.values():
            raise self._fail("the cache is updated twice", op, found=cache.name)
        if self.rank(cache) != 4 or self.shape(cache)[2] < 0:
            raise self._fail(
                "the cache must be [B, H, C, D] with a static length C",
                op,
                found=str(list(self.shape(cache))),
            )
        if self.dtype(cache) not in FLOATS or self.dtype(update) != self.dtype(cache):
            raise self._fail(
                "cache and update share one floating-point type",
                op,
                expected=f"one of {', '.join(FLOATS)}",
                found=f"cache {self.dtype(cache)}, update {self.dtype(update)}",
            )
        if self.dtype(write_indices) != "int32" or self.rank(write_indices) != 1:
            raise self._fail(
                "write indices must be int32 [B]",
                op,
                found=f"{self.dtype(write_indices)} {list(self.shape(write_indices))}",
            )
        _, heads, length, dim = self.shape(cache)
        fits = self.rank(update) == 4 and (
            self.shape(update)[1] == heads
            and self.shape(update)[3] == dim
            and self.shape(update)[2] <= length
        )
        if not fits:
            raise self._fail(
                "the update does not fit the cache",
                op,
                expected=f"[B, {heads}, up to {length}, {dim}]",
                found=str(list(self.shape(update))),
            )
        layer = self.raw.add_kv_cache_update(
            cache, update, write_indices, self.trt.KVCacheMode.LINEAR
        )
        return self._updated(cache, self._one(layer, op))
