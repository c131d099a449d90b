"""Blocks never leak and every request makes progress, whatever is admitted, preempted, aborted or failed."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tiny import tiny_tokenizer
from trimtab.engine.block_pool import BlockPool, extend_hashes
from trimtab.engine.detokenizer import Detokenizer
from trimtab.engine.request import DrawCounter, Request, RequestState
from trimtab.engine.sampling_params import SamplingParams
from trimtab.engine.scheduler import Scheduler

TOKENIZER = tiny_tokenizer()


def make_request(
    name: str, prompt: list[int], max_tokens: int = 20, limit: int = 64, seed: int | None = None
) -> Request:
    return Request(
        request_id=name,
        index=0,
        prompt_len=len(prompt),
        params=SamplingParams(max_tokens=max_tokens, seed=seed),
        tokens=list(prompt),
        draws=DrawCounter(0),
        max_len=min(limit, len(prompt) + max_tokens),
        key=0,
        stop_ids=(),
        detokenizer=Detokenizer(TOKENIZER, prompt),
    )


def check_pool(scheduler: Scheduler) -> None:
    """Every block is free, cached, or owned exactly as often as tables name it."""
    pool = scheduler.pool
    tables = [r.block_table for r in scheduler.running]
    named = [block for table in tables for block in table]
    for block in range(pool.num_blocks):
        assert pool._references[block] == named.count(block)
    unowned = {block for block in range(pool.num_blocks) if block not in named}
    assert len(pool._free) == len(set(pool._free))
    assert set(pool._free) | set(pool._cached) == unowned
    assert not set(pool._free) & set(pool._cached)
    assert set(pool._cached) <= set(pool._hash_of)
    assert {h: b for b, h in pool._hash_of.items()} == pool._block_of
    for table in tables:
        assert len(table) == len(set(table))
    for request in scheduler.waiting:
        assert request.block_table == []
        assert request.num_computed == 0


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), num_blocks=st.integers(16, 40), caching=st.booleans(), positions=st.integers(0, 4))
def test_nothing_leaks_under_random_admission_preemption_and_abort(
    seed: int, num_blocks: int, caching: bool, positions: int
) -> None:
    rng = random.Random(seed)
    scheduler = Scheduler(BlockPool(num_blocks, caching), 4, 6, 24, 64, positions, hash_lookahead=positions > 0)
    done = steps = 0
    waiting = [
        make_request(str(i), [rng.choice((1, 2)) for _ in range(rng.randint(1, 40))], seed=rng.choice((None, 1)))
        for i in range(12)
    ]
    total = len(waiting)
    while waiting or scheduler.has_unfinished:
        steps += 1
        assert steps < 2000, "no progress"
        if waiting and rng.random() < 0.5:
            scheduler.add(waiting.pop())
        for request in [*scheduler.running, *scheduler.waiting]:
            if rng.random() < 0.01:
                scheduler.finish(request, rng.choice(("abort", "error")))
                done += 1
        schedule = scheduler.schedule()
        check_pool(scheduler)
        assert schedule.num_tokens + schedule.max_drafts <= 24
        assert len(scheduler.running) <= 6
        for scheduled in schedule.requests:
            request = scheduled.request
            assert request.state is RequestState.RUNNING
            room = len(request.block_table) * 4
            assert request.num_computed + scheduled.num_tokens <= min(room, len(request.tokens))
            produces = scheduled.produces
            if produces:
                assert room >= min(64, len(request.tokens) + positions)
            request.num_computed += scheduled.num_tokens
            if produces:
                accepted = rng.randint(0, min(positions, request.room - 1))
                request.tokens += [rng.choice((1, 2)) for _ in range(accepted + 1)]
                request.num_computed += accepted
            if request.room == 0:
                scheduler.finish(request, "length")
                done += 1
            else:
                scheduler.remember(request, request.num_computed)
        check_pool(scheduler)
    assert done == total
    assert scheduler.pool.num_owned == 0


def test_a_shared_prefix_is_computed_once_and_survives_its_first_owner() -> None:
    scheduler = Scheduler(BlockPool(16), 4, 4, 64, 64)
    first = make_request("a", [5] * 10)
    scheduler.add(first)
    scheduler.schedule()
    first.num_computed = 10
    scheduler.remember(first, 10)
    shared = first.block_table[:2]
    second = make_request("b", [5] * 10)
    scheduler.add(second)
    scheduler.schedule()
    assert second.block_table[:2] == shared
    scheduler.finish(first, "stop")
    scheduler.finish(second, "stop")
    third = make_request("c", [5] * 9)
    scheduler.add(third)
    scheduled = scheduler.schedule()
    assert third.block_table[:2] == shared
    assert scheduled.requests[0].num_tokens == 1


def test_the_last_token_is_always_computed_even_if_all_blocks_are_known() -> None:
    scheduler = Scheduler(BlockPool(16), 4, 4, 64, 64)
    for name in "ab":
        request = make_request(name, [5] * 8)
        scheduler.add(request)
        scheduled = scheduler.schedule().requests[-1]
        assert scheduled.produces
        request.num_computed = 8
        scheduler.remember(request, 8)
    assert scheduled.num_tokens == 4


def test_cached_blocks_are_reused_oldest_first_and_then_forgotten() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    assert blocks is not None
    for index, block in enumerate(blocks):
        pool.remember(block, bytes([index]))
    pool.release(blocks[1:2])
    pool.release(blocks[:1])
    taken = pool.allocate(1)
    assert taken == blocks[1:2]
    assert pool.match_prefix([bytes([1])]) == []
    assert pool.match_prefix([bytes([0])]) == blocks[:1]
    assert pool.allocate(1) is None


def test_what_a_failed_request_wrote_is_not_found_again() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.remember(blocks[0], b"x")
    assert pool.release(blocks, forget=True) == blocks
    assert pool.match_prefix([b"x"]) == []


def test_hashes_cover_everything_before_a_block_and_the_lookahead() -> None:
    def hashes(tokens: list[int], lookahead: int = 0) -> list[bytes]:
        found: list[bytes] = []
        extend_hashes(found, tokens, 2, lookahead)
        return found

    assert hashes([1, 2, 3, 4])[1] != hashes([9, 2, 3, 4])[1]
    assert hashes([1, 2, 3])[0] == hashes([1, 2, 4])[0]
    assert hashes([1, 2, 3], 1)[0] != hashes([1, 2, 4], 1)[0]
    assert len(hashes([1, 2, 3, 4], 1)) == 1
    assert hashes([1, 23])[0] != hashes([12, 3])[0]


def test_a_double_release_is_caught() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.release(blocks)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(blocks)


def test_decoding_requests_come_before_prefill_and_drafts_get_at_most_half_beside_it() -> None:
    scheduler = Scheduler(BlockPool(64), 4, 8, 16, 64, num_draft_positions=4)
    old = make_request("old", [1] * 5)
    scheduler.add(old)
    scheduler.schedule()
    old.num_computed, old.tokens = 5, [1] * 6
    scheduler.add(make_request("new", [2] * 40))
    schedule = scheduler.schedule()
    assert [(s.request.request_id, s.num_tokens) for s in schedule.requests] == [("old", 1), ("new", 15)]
