"""What the text engines of all families share: inputs, slots, caches and states.

The names, shapes and rules are the text engine contract of docs/architecture.md: a call covers B
slots with S tokens each, of which `new_lengths` are real; a slot without any is padding and leaves
no trace.
"""

from __future__ import annotations

from collections.abc import Callable

from converters.checkpoint.config import CheckpointConfig
from converters.definition import TOKEN_BLOCK, Definition, Dims, EngineLimits, InputKind, Phase
from converters.layers.inputs import Inputs
from converters.quantization import kv_cache
from plugins.support.errors import InputError
from plugins.trt.network import Dim, Network
from plugins.trt.rows import last_rows
from plugins.trt.types import Tensor


class TextEngine:
    """The inputs of one text engine under construction.

    Args:
        net: network without inputs.
        config: of the checkpoint.
        phase: "context" and "draft" take any number of tokens per slot, "generation" a fixed few.
        limits: sizes.
        least_span: fewest cache rows that the context engine's attention can look at.

    Attributes:
        ids: int32 [B, S].
        past, new: int32 [B], cached and real tokens per slot.
        wanted: int32 [B, L], tokens whose logits are wanted.
        span: cache rows that attention looks at.
        tokens: S where it is static, else -1.
        batch, count: B and S.
        valid: bool [B, S], false for padding tokens.
        positions: int32 [B, S], past + index, padding included.
        queries: int32 [B, S], position of real tokens, -1 for padding.
        active: bool [B], false for padding slots.
        largest_call: most slots, and most tokens per slot, of one call.
        rejected: int32 [B], draft tokens of the call before that were not accepted; None where
            the engines verify no drafts.
        token_row: int32 [B], first cache row to write; behind all visible ones for padding slots.

    Raises InputError for a sequence length that the model was not trained for.
    """

    def __init__(
        self,
        net: Network,
        config: CheckpointConfig,
        phase: Phase,
        limits: EngineLimits,
        *,
        least_span: int = TOKEN_BLOCK,
    ) -> None:
        if limits.max_seq_len > config.max_position_embeddings:
            raise InputError(
                "the sequence length exceeds what the model was trained for",
                where="max_seq_len",
                expected=f"at most {config.max_position_embeddings}",
                found=str(limits.max_seq_len),
            )
        self.net, self.limits, self.dtype = net, limits, config.dtype
        self.context = phase != "generation"
        self._is_prompt = phase == "context"
        slots = limits.context_slots if phase == "context" else limits.max_batch_size
        self._inputs = Inputs(net, slots, 1 if self.context else slots)

        step = limits.step_tokens
        self.tokens = -1 if self.context else step
        # A draft step adds a single token to every slot.
        fewest = 1 if phase == "draft" else TOKEN_BLOCK
        chunks = ((fewest,), (limits.chunk_size,), (limits.chunk_size,))
        self._fewest = fewest
        ids_range = chunks if self.context else ((step,),) * 3
        logits_range = ((1,), (1,), (limits.max_logits_tokens,)) if self.context else ids_range
        self.largest_call = slots, ids_range[-1][0]
        self.ids = self.input("input_ids", "token", "int32", (self.tokens,), ids_range)
        self.past = self.input("past_lengths", "token", "int32")
        self.new = self.input("new_lengths", "token", "int32")
        self.wanted = self.input("logits_positions", "token", "int32", (self.tokens,), logits_range)
        self.span: Dim = limits.cache_rows
        if self._is_prompt:
            self.span = self._attention_span(least_span)
        self._rejected: Tensor | None = None
        self._fp8_caches = config.quantization.kv_cache_quant_algo is not None

        self.batch, self.count = net.dim(self.ids, 0), net.dim(self.ids, 1)
        index = net.unsqueeze(net.iota(self.count), [0])
        self.valid = net.less(index, net.unsqueeze(self.new, [1]))
        self.positions = net.add(net.unsqueeze(self.past, [1]), index)
        # To the attention a padding token is a query at position -1.
        self.queries = net.select(self.valid, self.positions, -1)
        self.active = net.greater(self.new, 0)
        self.token_row = net.select(self.active, self.past, limits.visible_rows)

    def definition(self) -> Definition:
        """What the caller of `define` gets."""
        return self._inputs.definition()

    def input(
        self,
        name: str,
        kind: InputKind,
        dtype: str,
        dims: Dims = (),
        ranges: tuple[Dims, ...] | None = None,
    ) -> Tensor:
        """A network input [B, *dims]; `ranges` are the smallest, best and largest dims."""
        return self._inputs.add(name, kind, dtype, dims, ranges)

    def _attention_span(self, least: int) -> Dim:
        """Cache rows that attention looks at."""
        most = self.limits.visible_rows
        return self.net.dim(self._inputs.add_length("attention_span", min(least, most), most), 0)

    def per_token(self, name: str, width: int) -> Tensor:
        """A host input [B, S, width] in the checkpoint's type."""
        if not self.context:
            return self.input(name, "host", self.dtype, (self.tokens, width))
        most = self.limits.chunk_size
        ranges = ((self._fewest, width), (most, width), (most, width))
        return self.input(name, "host", self.dtype, (-1, width), ranges)

    def state(self, name: str, dtype: str, dims: Dims) -> Tensor:
        """A state input; its successor is given to `next_state`."""
        return self.input(name, "state", dtype, dims)

    def next_state(self, name: str, value: Tensor) -> None:
        """The output that becomes the state of the next call."""
        self.net.output(value, f"{name}.next")

    def cache(self, name: str, update: Tensor, row: Tensor) -> Tensor:
        """Write [B, heads, S, D] into the cache of that name and return the whole cache.

        Raises CapabilityError where the checkpoint declares FP8 caches.
        """
        if self._fp8_caches:
            raise kv_cache.refusal("TensorRT's own layer updates them, and takes no FP8")
        _, heads, _, width = self.net.shape(update)
        cache = self.cache_input(name, heads, width)
        return self.net.kv_cache_update(cache, update, row)

    def cache_input(
        self, name: str, heads: int, width: int, rows: int | None = None, dtype: str | None = None
    ) -> Tensor:
        """A cache [B, heads, rows, width] that an operation of the network will update.

        `rows` is its length, by default one row per token; `dtype` is the checkpoint's type by
        default.
        """
        length = self.limits.cache_rows if rows is None else rows
        return self.input(name, "cache", dtype or self.dtype, (heads, length, width))

    def window(self, name: str, rows: Tensor, window: int) -> Tensor:
        """The rows that this call's queries see in a sliding window, [B, W - 1 + S, D].

        The W - 1 rows before the call are carried as the state of that name. Where drafts are
        verified it holds max_draft_len rows more: the newest `rejected` of them belong to tokens
        that were not accepted, in one call or several, and are passed over.

        Args:
            rows: [B, S, D] of this call.
            window: W, tokens a query sees, itself included.

        Row j is the token at position past - (W - 1) + j; before position 0 its value is
        arbitrary and must be masked.
        """
        net, extra = self.net, self.limits.max_draft_len
        width, past = net.shape(rows)[2], window - 1
        state = self.state(name, self.dtype, (past + extra, width))
        whole = net.concat([state, rows], 1)
        if not extra:
            self.next_state(name, last_rows(net, whole, self.new, past))
            return whole
        rejected = net.unsqueeze(self._rejected_lengths(), [1])

        def pick(first: Tensor, count: Dim) -> Tensor:
            """Rows of state and call together, from the `first` on, as if those that were rejected
            were not there. Rows that have left the state are arbitrary ones.
            """
            index = net.maximum(net.add(net.unsqueeze(net.iota(count), [0]), first), 0)
            kept = net.less(index, net.sub(past + extra, rejected))
            index = net.select(kept, index, net.add(index, rejected))
            return net.gather(whole, index, axis=1, elementwise_dims=1)

        newest = pick(net.sub(net.unsqueeze(self.new, [1]), rejected), past + extra)
        active = net.unsqueeze(self.active, [1, 2])
        self.next_state(name, net.select(active, newest, state))
        return pick(net.sub(extra, rejected), net.dim_add(self.count, past))

    def _rejected_lengths(self) -> Tensor:
        """int32 [B], drafts of the call before that were not accepted; only where it matters."""
        if self._rejected is None:
            self._rejected = self.input("rejected_lengths", "token", "int32")
        return self._rejected

    def visible(self, cache: Tensor) -> Tensor:
        """The cache rows that attention looks at, [B, heads, span, D]."""
        return self.net.narrow(cache, 2, 0, self.span) if self.context else cache

    def causal_mask(self, window: int | None = None) -> Tensor:
        """Which cache rows each query sees, bool [B, 1, S, span].

        Args:
            window: rows a query sees at most, its own included; None = all before it.

        A padding query sees the first row, so that its result stays finite.
        """
        net = self.net
        row = net.unsqueeze(net.iota(self.span), [0, 1])
        query = net.unsqueeze(net.maximum(self.queries, 0), [2])
        seen = net.less_equal(row, query)
        if window is not None and window < self.limits.visible_rows:
            seen = net.logical_and(seen, net.greater(row, net.sub(query, window)))
        return net.unsqueeze(seen, [1])

    def wanted_rows(self, x: Tensor) -> Tensor:
        """[B, L, ...] of [B, S, ...]: the tokens whose logits are wanted."""
        return self.net.gather(x, self.wanted, axis=1, elementwise_dims=1)

    def head_rows(self, x: Tensor, norm: Callable[[Tensor], Tensor]) -> Tensor:
        """[B, L, H] of [B, S, ...]: the wanted tokens behind the last `norm`.

        Where drafts start from the hidden states of all tokens, or a pooling reads them, those are
        the output `hidden_states`, [B, S, H]; elsewhere only the wanted tokens are normalised.
        """
        read = self.limits.max_draft_len > 0 or (self.limits.hidden_states and self._is_prompt)
        if not read:
            return norm(self.wanted_rows(x))
        hidden = norm(x)
        self.net.output(hidden, "hidden_states")
        return self.wanted_rows(hidden)
