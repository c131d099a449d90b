"""Variable-length attention over the paged cache.

Requests of one step have different query lengths (prefill chunks, a last token plus its admitted drafts) and different
contexts. They are split into groups of similar shape; a group is padded and attended to by one SDPA call. Query heads
that share a key/value head are folded into the query axis, so keys are never repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from trimtab.models.kv_cache import LayerCache

# Padding is cheaper than another call up to here: 16 calls of one request take 1.5 x the time of one call of 16.
MAX_BATCHED_QUERY = 32
MAX_CONTEXT_RATIO = 2


@dataclass(frozen=True, slots=True)
class AttentionBackend:
    """What an attention implementation can do; the engine refuses what it can not, at start."""

    name: str
    supports_variable_length: bool
    description: str


BACKENDS: dict[str, AttentionBackend] = {
    "paged": AttentionBackend("paged", True, "our paged attention: any query length per request"),
    "uniform": AttentionBackend("uniform", False, "one query length for the whole batch; no adaptive verification"),
}


@dataclass(slots=True)
class RequestGroup:
    """R requests that are attended to together, padded to Q queries and B blocks.

    Attributes:
        rows: ``[R, Q]`` rows of the flat batch (short requests repeat their last row), or None if the group's rows
            are one contiguous run of R x Q rows beginning at `first_row`.
        valid: ``[n]`` indices into the flattened ``R x Q`` queries that are real; None: all of them.
        flat_rows: ``[n]`` their rows of the flat batch.
        blocks: ``[R, B]`` block ids (short tables repeat the request's own first block).
        block_run: (first, count) if R = 1 and the blocks are consecutive: a view replaces the gather.
        mask: ``[R, 1, Q, L]`` additive mask, L = B x block_size (or the exact length if R = 1); None: all visible.
    """

    num_requests: int
    num_queries: int
    length: int
    first_row: int
    rows: Tensor | None
    valid: Tensor | None
    flat_rows: Tensor | None
    blocks: Tensor
    block_run: tuple[int, int] | None
    mask: Tensor | None
    _folded: dict[int, Tensor | None] = field(default_factory=dict)

    def folded_mask(self, heads_per_group: int) -> Tensor | None:
        """The mask with query heads folded in: ``[R, 1, heads_per_group * Q, L]``, computed once per step."""
        if self.mask is None:
            return None
        if heads_per_group not in self._folded:
            self._folded[heads_per_group] = self.mask.repeat(1, 1, heads_per_group, 1)
        return self._folded[heads_per_group]


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Where the T tokens of one step lie in the cache and which requests are attended to together.

    Attributes:
        positions: ``[T]`` int64 position of each token in its request.
        slots: ``[T]`` int64 cache address of each token (block x block_size + offset).
    """

    positions: Tensor
    slots: Tensor
    groups: list[RequestGroup]

    @staticmethod
    def build(
        query_lens: Sequence[int],
        context_lens: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        block_size: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> AttentionMetadata:
        """Lay out one step.

        Args:
            query_lens: ``[R]`` new tokens per request, at least 1 each.
            context_lens: ``[R]`` tokens already cached per request.
            block_tables: ``[R]`` block ids of each request, covering context and query.

        Raises:
            ValueError: if a block table is too short for its request.
        """
        positions: list[int] = []
        slots: list[int] = []
        first_rows: list[int] = []
        for query_len, context_len, table in zip(query_lens, context_lens, block_tables, strict=True):
            if (context_len + query_len) > len(table) * block_size:
                raise ValueError(
                    f"{len(table)} blocks of {block_size} can not hold {context_len} cached + {query_len} new tokens"
                )
            first_rows.append(len(positions))
            span = range(context_len, context_len + query_len)
            positions.extend(span)
            slots.extend(table[p // block_size] * block_size + p % block_size for p in span)
        groups = [
            _build_group(members, query_lens, context_lens, block_tables, first_rows, block_size, device, dtype)
            for members in group_requests(query_lens, context_lens)
        ]
        return AttentionMetadata(
            positions=torch.tensor(positions, dtype=torch.int64, device=device),
            slots=torch.tensor(slots, dtype=torch.int64, device=device),
            groups=groups,
        )


def group_requests(query_lens: Sequence[int], context_lens: Sequence[int]) -> list[list[int]]:
    """Split requests into groups of similar shape: long queries alone, the rest by context length.

    Returns:
        Lists of request indices, each ascending; every request in exactly one.
    """
    alone = [[r] for r, query_len in enumerate(query_lens) if query_len > MAX_BATCHED_QUERY]
    batched = [r for r, query_len in enumerate(query_lens) if query_len <= MAX_BATCHED_QUERY]
    batched.sort(key=lambda r: context_lens[r] + query_lens[r])
    groups: list[list[int]] = []
    shortest = 0
    for r in batched:
        length = context_lens[r] + query_lens[r]
        if not groups or length > MAX_CONTEXT_RATIO * max(shortest, 128):
            groups.append([])
            shortest = length
        groups[-1].append(r)
    return [sorted(group) for group in groups] + alone


def _build_group(
    members: Sequence[int],
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    first_rows: Sequence[int],
    block_size: int,
    device: torch.device | str,
    dtype: torch.dtype,
) -> RequestGroup:
    lens = torch.tensor([query_lens[r] for r in members])
    contexts = torch.tensor([context_lens[r] for r in members])
    starts = torch.tensor([first_rows[r] for r in members])
    num_queries = int(lens.max())
    totals = [query_lens[r] + context_lens[r] for r in members]
    num_blocks = -(-max(totals) // block_size)
    tables = [list(block_tables[r][: -(-total // block_size)]) for r, total in zip(members, totals, strict=True)]
    # Padding repeats a block of the request itself: another request's block could hold NaN, and 0 * NaN is NaN.
    padded = torch.tensor([table + [table[0]] * (num_blocks - len(table)) for table in tables], dtype=torch.int64)
    alone = len(members) == 1
    run = (
        (tables[0][0], num_blocks)
        if alone and tables[0] == list(range(tables[0][0], tables[0][0] + num_blocks))
        else None
    )

    columns = torch.arange(num_queries)
    query_index = torch.minimum(columns[None, :], lens[:, None] - 1)  # [R, Q]
    rows = starts[:, None] + query_index
    uniform = bool((lens == num_queries).all())
    contiguous = uniform and all(
        b - a == num_queries for a, b in zip(starts.tolist(), starts.tolist()[1:], strict=False)
    )
    valid = None if uniform else (columns[None, :] < lens[:, None]).flatten().nonzero().squeeze(1)

    length = totals[0] if alone else num_blocks * block_size
    mask = None
    if not (alone and num_queries == 1):
        visible = torch.arange(length)[None, None, :] <= (contexts[:, None] + query_index)[:, :, None]
        mask = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, float("-inf")).unsqueeze(1).to(device)
    return RequestGroup(
        num_requests=len(members),
        num_queries=num_queries,
        length=length,
        first_row=int(starts[0]),
        rows=None if contiguous else rows.to(device),
        valid=None if valid is None else valid.to(device),
        flat_rows=None if contiguous else (rows.flatten() if valid is None else rows.flatten()[valid]).to(device),
        blocks=padded.to(device),
        block_run=run,
        mask=mask,
    )


def paged_attention(
    query: Tensor, key: Tensor, value: Tensor, cache: LayerCache, metadata: AttentionMetadata, scale: float
) -> Tensor:
    """Write the new keys and values, then attend causally over each request's whole context.

    Args:
        query: ``[T, num_heads, head_dim]``.
        key, value: ``[T, num_kv_heads, head_dim]``.
        cache: storage of this layer.
        scale: factor on the attention scores.

    Returns:
        ``[T, num_heads, head_dim]``.
    """
    cache.write(key, value, metadata.slots)
    if len(metadata.groups) == 1 and metadata.groups[0].rows is None:
        return _attend(query, cache, metadata.groups[0], scale)
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    for group in metadata.groups:
        count = group.num_requests * group.num_queries
        if group.rows is None:
            rows = slice(group.first_row, group.first_row + count)
            output[rows] = _attend(query[rows], cache, group, scale)
        else:
            attended = _attend(query[group.rows.flatten()], cache, group, scale)
            assert group.flat_rows is not None
            output[group.flat_rows] = attended if group.valid is None else attended[group.valid]
    return output


def _attend(query: Tensor, cache: LayerCache, group: RequestGroup, scale: float) -> Tensor:
    """``[R * Q, num_heads, head_dim]`` queries of one group to as many outputs."""
    num_requests, num_queries = group.num_requests, group.num_queries
    num_heads, head_dim = query.shape[1], query.shape[2]
    num_kv_heads = cache.num_kv_heads
    folded = num_heads // num_kv_heads
    keys = _gather(cache.keys, group)
    values = _gather(cache.values, group)
    queries = query.view(num_requests, num_queries, num_kv_heads, folded, head_dim)
    queries = queries.permute(0, 2, 3, 1, 4).reshape(num_requests, num_kv_heads, folded * num_queries, head_dim)
    output = scaled_dot_product_attention(queries, keys, values, attn_mask=group.folded_mask(folded), scale=scale)
    output = output.view(num_requests, num_kv_heads, folded, num_queries, head_dim).permute(0, 3, 1, 2, 4)
    return output.reshape(num_requests * num_queries, num_heads, head_dim)


def _gather(pool: Tensor, group: RequestGroup) -> Tensor:
    """One pool's ``[R, num_kv_heads, L, head_dim]`` for a group; a view where the blocks are one run."""
    if group.block_run is not None:
        first, count = group.block_run
        tokens = pool[first : first + count]
    else:
        tokens = pool.index_select(0, group.blocks.flatten())
    return tokens.view(group.num_requests, -1, *pool.shape[2:])[:, : group.length].transpose(1, 2)
