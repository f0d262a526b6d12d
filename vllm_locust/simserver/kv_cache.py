"""The KV cache as vLLM keeps it: reference-counted blocks, a free list in LRU order, and a map of full blocks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class BlockPool:
    """``num_gpu_blocks`` blocks, one of which is vLLM's null block and never holds tokens.

    A freed block keeps its key, and can be found again, until it is handed out for something else.
    """

    def __init__(self, num_gpu_blocks: int) -> None:
        self.capacity = num_gpu_blocks - 1
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(self.capacity))
        self._references = [0] * self.capacity
        self._key_of: dict[int, int] = {}
        self._block_of: dict[int, int] = {}

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def usage(self) -> float:
        return 1 - len(self._free) / self.capacity

    def match(self, keys: Sequence[int], limit: int) -> list[int]:
        """The longest cached prefix of ``keys``, at most ``limit`` blocks."""
        found: list[int] = []
        for index in range(min(limit, len(keys))):
            block = self._block_of.get(keys[index])
            if block is None:
                break
            found.append(block)
        return found

    def unused(self, blocks: Sequence[int]) -> int:
        """How many of these nobody uses at present: taking them costs free blocks."""
        return sum(1 for block in blocks if self._references[block] == 0)

    def take(self, blocks: Sequence[int]) -> None:
        """Use blocks that ``match`` found."""
        for block in blocks:
            if self._references[block] == 0:
                del self._free[block]
            self._references[block] += 1

    def allocate(self, count: int) -> list[int]:
        """The ``count`` least recently used free blocks; what was cached in them is forgotten."""
        blocks: list[int] = []
        for _ in range(count):
            block, _none = self._free.popitem(last=False)
            key = self._key_of.pop(block, None)
            if key is not None:
                del self._block_of[key]
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def remember(self, block: int, key: int) -> None:
        """Make a full block findable. The first block with a key keeps it."""
        if key not in self._block_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def release(self, blocks: Sequence[int]) -> None:
        """Give blocks back, the last one first, so that the end of a prefix is evicted before its beginning."""
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free[block] = None

    def forget_all(self) -> bool:
        """Empty the prefix cache; refused, as by vLLM, while any block is in use."""
        if len(self._free) != self.capacity:
            return False
        self._key_of.clear()
        self._block_of.clear()
        return True
