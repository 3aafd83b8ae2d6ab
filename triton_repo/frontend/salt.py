"""The cache salt of a request, and block keys that carry it.

The 64-bit id and the block key are TensorRT-LLM's: the id is the first eight bytes of
BLAKE3(UTF-8 salt), little-endian; the key is the chained hash of its KV cache manager's blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

from blake3 import blake3

from triton_repo.frontend.problems import problem

MAX_SALT_CHARACTERS = 128
# External caches put the salt into keys and paths.
FORBIDDEN_CHARACTERS = "@/\\\0"
_MASK64 = (1 << 64) - 1
_MASK32 = (1 << 32) - 1


def cache_salt_id(salt: str | None) -> int | None:
    """The 64-bit salt id; None for no salt. Raises UsageError for a salt that is not allowed.

    The salt itself is never part of the message.
    """
    if salt is None:
        return None
    if not isinstance(salt, str):
        raise problem("cache_salt", "must be a string", found=type(salt).__name__)
    if not salt:
        raise problem("cache_salt", "must not be empty", expected="a non-empty string or no field")
    if len(salt) > MAX_SALT_CHARACTERS:
        raise problem(
            "cache_salt",
            "is too long",
            expected=f"at most {MAX_SALT_CHARACTERS} characters",
            found=f"{len(salt)} characters",
        )
    if any(c in FORBIDDEN_CHARACTERS for c in salt):
        raise problem(
            "cache_salt", "contains a character that is not allowed", expected="no @ / \\ NUL"
        )
    try:
        encoded = salt.encode("utf-8")
    except UnicodeEncodeError:
        raise problem("cache_salt", "is not valid Unicode") from None
    return int.from_bytes(blake3(encoded).digest()[:8], "little")


def block_keys(
    ids: Sequence[int],
    block_size: int,
    salt_id: int | None = None,
    extra: Sequence[int] = (),
) -> list[int]:
    """Keys of the full blocks of `ids`, each 64 bits; an incomplete last block has none.

    The salt enters the first block only; later blocks inherit it through their parent. `extra`
    (64-bit media or LoRA keys) enters every block.
    """
    keys: list[int] = []
    parent = 0
    for start in range(0, len(ids) - block_size + 1, block_size):
        seed = block_size ^ (parent * 0xBF58476D1CE4E5B9 & _MASK64)
        if parent == 0 and salt_id is not None:
            seed = _mix64(seed, salt_id)
        for token in ids[start : start + block_size]:
            seed = _mix32(seed, token)
        for value in extra:
            seed = _mix64(seed, value)
        keys.append(seed)
        parent = seed
    return keys


def _mix32(seed: int, value: int) -> int:
    v = value & _MASK32
    for _ in range(2):
        v = ((v >> 16) ^ v) * 0x45D9F3B & _MASK32
    v = (v >> 16) ^ v
    v = (v + 0x9E3779B9) & _MASK32
    return seed ^ ((v + (seed << 6) + (seed >> 2)) & _MASK64)


def _mix64(seed: int, value: int) -> int:
    v = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK64
    v = (v ^ (v >> 27)) * 0x94D049BB133111EB & _MASK64
    v ^= v >> 31
    return seed ^ ((v + 0x9E3779B9 + (seed << 6) + (seed >> 2)) & _MASK64)
