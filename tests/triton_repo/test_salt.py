"""Cache salts: validation, the 64-bit id, block keys."""

from __future__ import annotations

from typing import Any

import pytest

from plugins.support.errors import UsageError
from tests.triton_repo.tables import rows
from triton_repo.frontend.problems import one_line
from triton_repo.frontend.salt import block_keys, cache_salt_id


@pytest.mark.parametrize("row", rows("salts"))
def test_salt_ids(row: dict[str, Any]) -> None:
    assert cache_salt_id(row["salt"]) == row["salt_id"]


def test_absent_is_absent() -> None:
    assert cache_salt_id(None) is None


@pytest.mark.parametrize("salt", ["", "x" * 129, "a/b", "a@b", "a\\b", "a\0b", 5, "\ud800"])
def test_refused_salts_are_named_but_not_shown(salt: Any) -> None:
    with pytest.raises(UsageError) as caught:
        cache_salt_id(salt)
    message = one_line(caught.value)
    assert message.startswith("cache_salt: ")
    assert str(salt) not in message or salt in ("", 5)


@pytest.mark.parametrize("salt", [" ", "é", "a:b", "x" * 128])
def test_accepted_salts(salt: str) -> None:
    assert cache_salt_id(salt) is not None


@pytest.mark.parametrize("row", rows("block_keys"))
def test_block_keys(row: dict[str, Any]) -> None:
    assert block_keys(range(12), 4, cache_salt_id(row["salt"])) == row["keys"]


def test_block_key_relations() -> None:
    ids = list(range(12))
    a, b = cache_salt_id("a"), cache_salt_id("b")
    assert block_keys(ids, 4, a) == block_keys(ids, 4, a)
    for other in (b, None):
        assert not set(block_keys(ids, 4, a)) & set(block_keys(ids, 4, other))
    assert block_keys(ids[:11], 4, a) == block_keys(ids, 4, a)[:2]
    assert block_keys(ids[:3], 4, a) == []
    # A media key counts beside the salt.
    assert block_keys(ids, 4, a, [7]) != block_keys(ids, 4, a, [8])
