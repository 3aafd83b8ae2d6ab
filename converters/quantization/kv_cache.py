"""FP8 key and value caches: whether a checkpoint has them, and the scales of each layer.

    cached code = e4m3(key / key scale), and the same for values

A layer's two scales become `<attention>.kv_cache_scaling_factor`, float32 [2]: key, value. (Where
TensorRT-LLM has one scale for both, a common one would not be the source's any more.) Engines of
full TensorRT have such caches where plugin layers write and read them, other engines get them by
`export-hf`: TensorRT's own layers update caches in float32, float16 and bfloat16 only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from converters.checkpoint.header import TensorEntry
from converters.checkpoint.match import Findings
from converters.checkpoint.recipe import Output, Recipe
from converters.quantization.declared import Claims
from converters.quantization.evidence import Names
from plugins.support.dtypes import BY_NAME, COMPUTE_DTYPES
from plugins.support.errors import CapabilityError, InputError, UsageError
from plugins.trt.weights import WeightInfo, WeightSource

ALGORITHM = "FP8"
TARGET_SUFFIX = "kv_cache_scaling_factor"
# As Model Optimizer names them, and as compressed-tensors does.
SPELLINGS = (("k_proj.k_scale", "v_proj.v_scale"), ("k_scale", "v_scale"))
_SCALES = (".k_scale", ".v_scale")


@dataclass(frozen=True)
class Cached:
    """A layer that caches keys and values.

    Attributes:
        target: attention module in the TensorRT-LLM checkpoint.
        source: canonical name of the attention module.
        optional: a layer that calibration leaves out (a draft layer).
    """

    target: str
    source: str
    optional: bool = False

    @property
    def name(self) -> str:
        """Target name of its scales."""
        return f"{self.target}.{TARGET_SUFFIX}"


@dataclass(frozen=True)
class CachePlan:
    """What becomes of the caches' type.

    Attributes:
        algorithm: for the checkpoint's configuration, None for caches in the computing type.
        recipes: of the scales.
        notes: what people should know.
    """

    algorithm: str | None
    recipes: tuple[Recipe, ...] = ()
    notes: tuple[str, ...] = ()


def refusal(why: str) -> CapabilityError:
    """The error for an engine that cannot have the FP8 caches which its checkpoint declares."""
    return CapabilityError(
        f"this engine cannot have FP8 caches: {why}",
        where="quantization.kv_cache_quant_algo",
        expected="null",
        found=ALGORITHM,
        fix="build qwen4_exp with full TensorRT (--flavor tensorrt), whose plugin layers write FP8 "
        "caches, or convert with --kv-cache none: caches are then in the computing type, "
        "which is more exact and twice as large",
    )


def stored_scales(source: WeightSource, attention: str) -> tuple[float, float]:
    """Scales of key and value of an attention module in a converted checkpoint.

    Raises InputError where they are missing or are no scales.
    """
    name = f"{attention}.{TARGET_SUFFIX}"
    info, expected = source.info(name), WeightInfo("float32", (2,))
    if info != expected:
        raise InputError(
            "the scales of an FP8 cache are not in the checkpoint as they must be",
            where=name,
            expected=f"{expected.dtype} {list(expected.shape)}: key, value",
            found=f"{info.dtype} {list(info.shape)}" if info else "no such tensor",
            fix="convert again",
        )
    key, value = source.tensor(name).tolist()
    if not all(0 < scale < math.inf for scale in (key, value)):
        raise InputError(
            "the scales of an FP8 cache must be positive and finite",
            where=name,
            found=f"{key}, {value}",
            fix="convert again",
        )
    return key, value


def plan_caches(
    layers: Sequence[Cached],
    request: str | None,
    claims: Sequence[Claims],
    sources: Sequence[Names],
    findings: Findings,
) -> CachePlan:
    """Decide on the caches' type and find their scales.

    Args:
        layers: that have a cache; none where the family's caches are not keys and values.
        request: "fp8", "none", or None to keep what the checkpoint has.
        claims: what the checkpoint declares.
        sources: where scales may lie, the checkpoint first.
        findings: gets what is missing or wrong.

    Raises UsageError for a request that the family cannot have, InputError for a declared type
    other than FP8.
    """
    own = sources[0]
    stray = [name for name in own.names if name.endswith(_SCALES)]
    declared = _declared(claims)
    if request == "fp8" and not layers:
        raise UsageError(
            "this family's caches cannot be FP8: no kernel of its attention reads them",
            where="--kv-cache fp8",
            expected="qwen4_exp, whose kernels read FP8 keys and values",
            fix="leave --kv-cache out: caches are then in the computing type",
        )
    if request == "none" or not layers:
        for name in stray:
            own.use_name(name)
        there = bool(stray) or declared is not None
        reason = "these are to be in the computing type"
        if request is None:
            reason = "this family's caches cannot be FP8"
        note = f"the scales and declarations of a quantised cache are left out, {reason}"
        return CachePlan(None, notes=(note,) if there else ())
    if request is None and declared is None and not stray:
        return CachePlan(None)
    if declared not in (None, ALGORITHM) and request is None:
        raise InputError(
            "unsupported type of the key and value cache",
            where=next(claim.where for claim in claims if claim.kv_cache == declared),
            expected=ALGORITHM,
            found=str(declared),
            fix="convert with --kv-cache none: the caches are then in the computing type",
        )
    return _with_scales(layers, sources, findings, undeclared=declared is None and bool(stray))


def _with_scales(
    layers: Sequence[Cached], sources: Sequence[Names], findings: Findings, *, undeclared: bool
) -> CachePlan:
    notes = ["scales of a cache that is declared nowhere: taken as FP8"] if undeclared else []
    found = {layer: _pair(layer, sources, findings) for layer in layers}
    scaled = any(pair is not None for pair in found.values())
    recipes = []
    for layer, pair in found.items():
        output = Output(layer.name, BY_NAME["float32"], (2,))
        if pair is None and scaled and not layer.optional:
            names = [f"{layer.source}.{suffix}" for suffix in SPELLINGS[0]]
            findings.missing += names
        elif pair is None:
            recipes.append(Recipe((output,), (), "ones"))
        elif len(pair) == 2:
            recipes.append(Recipe((output,), tuple(pair), positive=True))
    if not scaled:
        notes.append("no scales of the cache: keys and values are cast with scale 1")
    notes.append(
        "FP8 caches are for full TensorRT (`build --flavor tensorrt`) and for what `export-hf` "
        "serves; TensorRT for RTX needs --kv-cache none"
    )
    return CachePlan(ALGORITHM, tuple(recipes), tuple(notes))


def _pair(layer: Cached, sources: Sequence[Names], findings: Findings) -> list[TensorEntry] | None:
    """Scales of key and value; fewer where one is missing or wrong, None where none is there."""
    for names in sources:
        for spelling in SPELLINGS:
            both = [(f"{layer.source}.{s}", names.find(f"{layer.source}.{s}")) for s in spelling]
            if not any(entry for _, entry in both):
                continue
            pair = []
            for name, entry in both:
                if entry is None:
                    findings.missing.append(name)
                elif entry.dtype.name not in COMPUTE_DTYPES or math.prod(entry.shape) != 1:
                    names.use(entry)
                    kind = f"{entry.dtype.name} {list(entry.shape)}"
                    findings.wrong[entry.name] = ("one scale in a float type", kind)
                else:
                    pair.append(names.use(entry))
            return pair
    return None


def _declared(claims: Sequence[Claims]) -> str | None:
    kinds = {claim.kv_cache: claim.where for claim in claims if claim.kv_cache is not None}
    if len(kinds) > 1:
        raise InputError(
            "two declarations of the key and value cache contradict each other",
            where=" and ".join(kinds.values()),
            found=" and ".join(str(kind) for kind in kinds),
            fix="correct one of them",
        )
    return next(iter(kinds), None)
