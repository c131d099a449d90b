"""Who owns which cache block: a free list, reference counts, and a prefix cache of full blocks.

A block is free (nobody reads it), owned (reference count > 0), or cached (count 0, but its content is still known by
hash and can be taken up again). Cached blocks are given out last, least recently used first.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence


class BlockPool:
    """Blocks ``0 .. num_blocks - 1``."""

    def __init__(self, num_blocks: int, enable_prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self._caching = enable_prefix_caching
        self._free = list(range(num_blocks - 1, -1, -1))  # pop() hands out the lowest first
        self._references = [0] * num_blocks
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_available(self) -> int:
        """Blocks that can be handed out now: free ones and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_owned(self) -> int:
        return self.num_blocks - self.num_available

    def allocate(self, count: int) -> list[int] | None:
        """``count`` blocks of reference count 1, or None (and nothing changes) if there are not so many."""
        if count > self.num_available:
            return None
        blocks = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                block, _ = self._cached.popitem(last=False)
                self._forget(block)
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def match_prefix(self, hashes: Sequence[bytes]) -> list[int]:
        """Blocks of the longest known prefix, each with one more reference."""
        matched: list[int] = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            if self._references[block] == 0:
                del self._cached[block]
            self._references[block] += 1
            matched.append(block)
        return matched

    def remember(self, block: int, block_hash: bytes) -> None:
        """Make a full, owned block findable. The first block with a content stays the known one."""
        if self._caching and block_hash not in self._block_of and block not in self._hash_of:
            self._hash_of[block] = block_hash
            self._block_of[block_hash] = block

    def release(self, blocks: Sequence[int], forget: bool = False) -> list[int]:
        """Give back one reference of each; the last blocks of a sequence are reused before its first.

        Args:
            forget: what the blocks hold must not be found again (a failed request wrote them).

        Returns:
            The blocks that are free now.
        """
        freed: list[int] = []
        for block in reversed(blocks):
            assert self._references[block] > 0, f"block {block} released twice"
            self._references[block] -= 1
            if forget:
                self._forget(block)
            if self._references[block] == 0:
                if block in self._hash_of:
                    self._cached[block] = None
                else:
                    self._free.append(block)
                    freed.append(block)
        return freed

    def _forget(self, block: int) -> None:
        block_hash = self._hash_of.pop(block, None)
        if block_hash is not None:
            del self._block_of[block_hash]


def extend_hashes(hashes: list[bytes], tokens: Sequence[int], block_size: int, lookahead: int = 0) -> None:
    """Append the hashes of further full blocks of ``tokens``; each covers everything before it too.

    Args:
        lookahead: tokens after a block that belong to its content.
    """
    for index in range(len(hashes), (len(tokens) - lookahead) // block_size):
        previous = hashes[-1] if hashes else b""
        content = ",".join(map(str, tokens[index * block_size : (index + 1) * block_size + lookahead]))
        hashes.append(hashlib.blake2b(previous + content.encode(), digest_size=16).digest())
