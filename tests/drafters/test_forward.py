"""Each published layout drafts what an independent dense computation of it drafts, round after round."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.drafters.layouts import ALL, BLOCK, Layout
from tests.drafters.reference import Target, draft_logits
from tests.tiny import save_tiny_model
from trimtab.drafters import DraftBatch, Drafter, make_drafter
from trimtab.models.executor import ModelExecutor
from trimtab.models.loader import load_model

TABLES = [[3, 0, 5, 1, 9], [2, 8, 4, 6, 7]]  # blocks of 8, in no order


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> ModelExecutor:
    directory = save_tiny_model(
        tmp_path_factory.mktemp("target"), num_hidden_layers=6, tie_word_embeddings=False, rms_norm_eps=1e-5
    )
    return ModelExecutor(load_model(directory, "float32"), num_blocks=12, block_size=8)


def settings(model: str | None = None, method: str | None = None, **more: Any) -> Any:
    defaults = {"num_speculative_tokens": None, "allow_lossy": False}
    return SimpleNamespace(model=model, method=method, **(defaults | more))


def assert_agree(actual: Tensor, expected: Tensor) -> None:
    """Equal up to float32 rounding, which grows with the largest logit."""
    assert torch.equal(actual.isfinite(), expected.isfinite())
    finite = expected.isfinite()
    error = (actual[finite] - expected[finite]).abs().max()
    assert error <= 3e-4 * expected[finite].abs().max() + 1e-5


class Scripted:
    """A sampler that draws given tokens and remembers what it was shown."""

    def __init__(self, tokens: Tensor, depth: int) -> None:
        self.tokens, self.depth = tokens, depth
        self.logits: list[Tensor] = []
        self.heads: list[Tensor | None] = []

    def sample(self, logits: Tensor, position: int, head_logits: Tensor | None = None) -> Tensor:
        assert position == len(self.logits)
        self.logits.append(logits.clone())
        self.heads.append(None if head_logits is None else head_logits.clone())
        return self.tokens[:, position]

    def propose(self, token_ids: Any) -> None:
        raise AssertionError("these drafters draw from a distribution")


class Conversation:
    """Two requests whose target features are random but fixed."""

    def __init__(self, width: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tokens = [torch.randint(0, 62, (40,), generator=generator) for _ in range(2)]
        self.features = [torch.randn(40, width, generator=generator) for _ in range(2)]

    def batch(self, spans: list[tuple[int, int]], max_drafts: list[int]) -> DraftBatch:
        """Requests that committed positions [start, end) of theirs."""
        rows = [(r, start, end) for r, (start, end) in enumerate(spans)]
        return DraftBatch(
            request_ids=["a", "b"],
            num_new=[end - start for _, start, end in rows],
            start_positions=[start for _, start, _ in rows],
            token_ids=torch.cat([self.tokens[r][start:end] for r, start, end in rows]),
            next_token_ids=torch.cat([self.tokens[r][start + 1 : end + 1] for r, start, end in rows]),
            features=torch.cat([self.features[r][start:end] for r, start, end in rows]),
            block_tables=TABLES,
            max_drafts=max_drafts,
            histories=[self.tokens[r][: end + 1].tolist() for r, _, end in rows],
        )


@pytest.mark.parametrize("layout", ALL, ids=lambda layout: layout.name)
def test_drafts_equal_a_dense_computation(layout: Layout, target: ModelExecutor, tmp_path: Path) -> None:
    drafter = make_drafter(settings(layout.save(tmp_path / "drafter")), target)
    assert drafter.name == layout.kind
    assert drafter.taps == layout.taps
    depth = min(3, drafter.num_positions)
    talk = Conversation(len(layout.taps) * target.info.hidden_size)
    reference = Target(target.model)
    # a prompt; two more positions each after a partly rejected draft; a round in which only request b drafts
    for spans, max_drafts in [([(0, 7), (0, 13)], [9, 9]), ([(7, 9), (13, 14)], [9, 9]), ([(9, 10), (14, 18)], [0, 9])]:
        drafting = [row for row in range(2) if max_drafts[row]]
        drawn = torch.randint(0, 62, (2, depth), generator=torch.Generator().manual_seed(spans[0][0]))[drafting]
        sampler = Scripted(drawn, depth)
        drafter.propose(talk.batch(spans, max_drafts), sampler)
        assert len(sampler.logits) == depth
        for index, row in enumerate(drafting):
            end = spans[row][1]
            logits, confidence = draft_logits(
                layout, reference, talk.features[row][:end], talk.tokens[row][: end + 1], drawn[index].tolist()[:-1]
            )
            for k in range(depth):
                assert_agree(sampler.logits[k][index], logits[k])
                head = sampler.heads[k]
                assert (head is None) == (confidence is None)
                if head is not None and confidence is not None:
                    assert_agree(head[index], confidence[k])


@pytest.mark.parametrize("layout", ALL, ids=lambda layout: layout.name)
def test_the_vocabulary_map_holds_target_ids(layout: Layout, target: ModelExecutor, tmp_path: Path) -> None:
    drafter = make_drafter(settings(layout.save(tmp_path / "drafter")), target)
    if layout.draft_ids is None:
        assert drafter.vocab_map is None
    else:
        assert torch.equal(drafter.vocab_map, layout.draft_ids)


def test_a_block_is_drafted_whole_however_few_positions_are_sampled(target: ModelExecutor, tmp_path: Path) -> None:
    layout = next(layout for layout in ALL if layout.name == "dflash-zlab")
    shown = []
    for depth in (1, BLOCK - 1):
        drafter = make_drafter(settings(layout.save(tmp_path / "drafter")), target)
        sampler = Scripted(torch.zeros(2, BLOCK, dtype=torch.int64), depth)
        drafter.propose(Conversation(2 * 32).batch([(0, 7), (0, 13)], [9, 9]), sampler)
        assert len(sampler.logits) == depth
        shown.append(sampler.logits[0])
    torch.testing.assert_close(shown[0], shown[1])


def test_the_selector_gives_no_chance_to_other_candidates(target: ModelExecutor, tmp_path: Path) -> None:
    layout = next(layout for layout in ALL if layout.name == "dflash2")
    drafter = make_drafter(settings(layout.save(tmp_path / "drafter")), target)
    sampler = Scripted(torch.zeros(2, BLOCK, dtype=torch.int64), 2)
    drafter.propose(Conversation(2 * 32).batch([(0, 7), (0, 13)], [9, 9]), sampler)
    for logits in sampler.logits:
        assert logits.isfinite().sum(-1).tolist() == [4, 4]


def test_a_round_without_drafts_still_advances(target: ModelExecutor, tmp_path: Path) -> None:
    for layout in ALL:
        talk = Conversation(len(layout.taps) * 32)
        results = []
        for steps in ([[(0, 9), (0, 14)]], [[(0, 5), (0, 6)], [(5, 9), (6, 14)]]):
            drafter: Drafter = make_drafter(settings(layout.save(tmp_path / layout.name)), target)
            for spans in steps[:-1]:
                drafter.propose(talk.batch(spans, [0, 0]), Scripted(torch.zeros(0, 1, dtype=torch.int64), 1))
            sampler = Scripted(torch.full((2, 2), 7), 2)
            drafter.propose(talk.batch(steps[-1], [2, 2]), sampler)
            results.append(torch.stack(sampler.logits))
        assert_agree(results[0], results[1])
