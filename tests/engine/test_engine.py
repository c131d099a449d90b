"""The engine end to end on tiny models: what speculation may never change, and what must not stop serving."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from tests.engine.conftest import MakeEngine, Output, fix_cost, prompts, run
from tests.tiny import save_tiny_model
from trimtab.drafters.base import DraftBatch, DraftSampler
from trimtab.engine.engine import Engine
from trimtab.engine.sampling_params import SamplingParams
from trimtab.models.executor import ForwardBatch, ForwardOutput
from trimtab.policy import CostModel, planner_names

GREEDY = SamplingParams(temperature=0, max_tokens=40)
DRAFTERS = ["ngram", "draft_model", "greedy draft_model"]
Settings = dict[str, dict[str, Any]]


def tokens_of(outputs: list[Output]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


@pytest.fixture(scope="module")
def plain(make_engine: MakeEngine) -> Engine:
    return make_engine()


@pytest.fixture(scope="module")
def greedy_tokens(plain: Engine) -> list[list[int]]:
    return tokens_of(run(plain, [(prompt, GREEDY) for prompt in prompts(16)]))


def test_plain_greedy_output_is_that_of_transformers(target_dir: str, greedy_tokens: list[list[int]]) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target_dir)
    for prompt, tokens in zip(prompts(16), greedy_tokens, strict=True):
        ids = torch.tensor([prompt])
        generated = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=40)
        assert generated[0, len(prompt) :].tolist() == tokens


@pytest.mark.parametrize("planner", planner_names())
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_speculation_does_not_change_greedy_output(
    make_engine: MakeEngine, speculative: Settings, greedy_tokens: list[list[int]], drafter: str, planner: str
) -> None:
    batch = make_engine(speculative[drafter] | {"planner": planner})
    assert tokens_of(run(batch, [(prompt, GREEDY) for prompt in prompts(16)])) == greedy_tokens
    assert tokens_of(run(batch, [(prompts(16)[3], GREEDY)])) == greedy_tokens[3:4]
    small = make_engine(speculative[drafter] | {"planner": planner}, num_kv_blocks=20, max_num_batched_tokens=48)
    assert tokens_of(run(small, [(prompt, GREEDY) for prompt in prompts(16)])) == greedy_tokens
    assert small.stats().num_preemptions > 0
    stats = batch.stats()
    assert stats.num_verified > 0
    assert stats.num_accepted > 0
    assert stats.fallbacks_by_reason == {}


def test_planners_do_trim(make_engine: MakeEngine, speculative: Settings) -> None:
    engine = make_engine(speculative["draft_model"])
    fix_cost(engine, CostModel.constant(1.0, 0.3))
    for _ in range(3):  # the first lasts about as long as the estimator warms up
        run(engine, [(prompt, replace(GREEDY, max_tokens=80, ignore_eos=True)) for prompt in prompts(8)])
    stats = engine.stats()
    assert 0 < stats.num_verified < stats.num_drafted
    assert stats.policy.num_refits >= 3


@pytest.mark.parametrize("method", ["standard", "block"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_seeded_request_gives_the_same_output_alone_and_in_any_batch(
    make_engine: MakeEngine, speculative: Settings, drafter: str, method: str
) -> None:
    engine = make_engine(speculative[drafter] | {"rejection_sample_method": method}, enable_prefix_caching=True)
    seeded = SamplingParams(temperature=0.9, top_p=0.95, seed=11, max_tokens=40)
    prompt = prompts(1, seed=9)[0]
    alone = run(engine, [(prompt, seeded)])[0].token_ids
    others = [(p, SamplingParams(temperature=1.0, max_tokens=30, top_k=20)) for p in prompts(15, seed=2)]
    assert run(engine, [(prompt, seeded), *others])[0].token_ids == alone
    small = make_engine(
        speculative[drafter] | {"rejection_sample_method": method}, num_kv_blocks=24, max_num_batched_tokens=40
    )
    assert run(small, [*others, (prompt, seeded)])[-1].token_ids == alone
    assert small.stats().num_preemptions > 0
    assert run(engine, [(prompt, replace(seeded, seed=12))])[0].token_ids != alone


@pytest.mark.parametrize("drafter", ["ngram", "draft_model"])
@pytest.mark.parametrize("method", ["standard", "block"])
def test_sampled_tokens_follow_the_target(
    make_engine: MakeEngine, plain: Engine, speculative: Settings, target_dir: str, drafter: str, method: str
) -> None:
    """Chi-square of four tokens jointly against the exact law (the first is never speculated)."""
    from transformers import AutoModelForCausalLM

    engine = make_engine(
        speculative[drafter] | {"rejection_sample_method": method, "planner": "lookahead"}, max_num_seqs=64
    )
    # The model's own greedy text repeats itself, so that a look-up finds something.
    prompt = [5, 6, 7, *run(plain, [([5, 6, 7], replace(GREEDY, max_tokens=24, ignore_eos=True))])[0].token_ids]
    params = SamplingParams(temperature=0.7, top_k=3, max_tokens=4, ignore_eos=True)
    count = 800
    outputs = run(engine, [(prompt, params) for _ in range(count)])
    assert engine.stats().num_accepted > 50
    model = AutoModelForCausalLM.from_pretrained(target_dir)

    def law(tokens: list[int]) -> Tensor:
        logits = model(torch.tensor([prompt + tokens])).logits[0, -1] / 0.7
        keep = logits >= logits.topk(3).values[-1]
        return logits.masked_fill(~keep, float("-inf")).softmax(-1).double()

    with torch.no_grad():
        expected: dict[tuple[int, ...], float] = {(): 1.0}
        for _ in range(4):
            expected = {
                (*tokens, token): weight * float(probability)
                for tokens, weight in expected.items()
                for token, probability in enumerate(law(list(tokens)))
                if probability > 0
            }
    found = dict.fromkeys(expected, 0)
    for output in outputs:
        found[tuple(output.token_ids)] += 1  # a KeyError is a token that the target never gives
    common = [tokens for tokens in expected if count * expected[tokens] >= 5]
    observed = [found[tokens] for tokens in common]
    wanted = [count * expected[tokens] for tokens in common]
    observed, wanted = [*observed, count - sum(observed)], [*wanted, count - sum(wanted)]
    assert len(common) > 5
    assert chisquare(observed, wanted).pvalue > 1e-3


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_penalties_bias_and_min_tokens_act_alike_with_and_without_drafts(
    plain: Engine, make_engine: MakeEngine, speculative: Settings, drafter: str
) -> None:
    engine = make_engine(speculative[drafter])
    changed = [
        replace(GREEDY, repetition_penalty=1.3),
        replace(GREEDY, presence_penalty=1.0, frequency_penalty=0.7),
        replace(GREEDY, logit_bias={7: 5.0, 9: -100.0}),
        replace(GREEDY, min_tokens=30, logit_bias={2: 8.0}),
    ]
    requests = [(prompt, params) for prompt in prompts(4, seed=4) for params in changed]
    expected = run(plain, requests)
    assert tokens_of(run(engine, requests)) == tokens_of(expected)
    assert any(2 in output.token_ids[29:] for output in expected[3::4])
    assert all(2 not in output.token_ids[:30] for output in expected[3::4])
    if engine.speculation is not None:
        assert engine.speculation.stats().num_refits == 0, "altered targets must not teach"
    assert engine.stats().num_accepted > 0


@pytest.mark.parametrize("drafter", [None, *DRAFTERS])
def test_a_stop_ends_tokens_text_and_logprobs_at_the_same_place(
    plain: Engine, make_engine: MakeEngine, speculative: Settings, drafter: str | None
) -> None:
    engine = plain if drafter is None else make_engine(speculative[drafter])
    # Few repetitions, so that places are unique.
    varied = replace(GREEDY, presence_penalty=2.0, logit_bias={2: -100.0, 0: -100, 1: -100, 3: -100}, max_tokens=16)
    requests = [(prompt, varied) for prompt in prompts(8)]
    ran = 0
    for (prompt, _), whole in zip(requests, run(plain, requests), strict=True):
        tokens = whole.token_ids
        for at in (0, 2, 5, 9):
            if at >= len(tokens) or tokens[at] in tokens[:at] or tokens[at] < 4:
                continue
            ran += 1
            by_id = replace(varied, stop_token_ids=[tokens[at]], logprobs=2)
            by_text = replace(varied, stop=[f"w{tokens[at] - 4} "], logprobs=0)
            first, second = run(engine, [(prompt, by_id), (prompt, by_text)])
            assert first.finish_reason == "stop"
            assert first.token_ids == tokens[: at + 1]
            assert len(first.logprobs) == at + 1
            assert first.text.split() == [f"w{t - 4}" for t in tokens[:at] if t >= 4]
            if second.finish_reason == "stop" and at + 1 < len(tokens) and tokens[at + 1] >= 4:
                assert second.token_ids == tokens[: at + 2], "the space comes with the next token"
                assert f"w{tokens[at] - 4} " not in second.text + " "
                assert len(second.logprobs) == len(second.token_ids)
    assert ran > 5


def test_logprobs_are_the_targets_whether_a_token_was_drafted_or_not(
    plain: Engine, make_engine: MakeEngine, speculative: Settings, target_dir: str
) -> None:
    from transformers import AutoModelForCausalLM

    engine = make_engine(speculative["draft_model"])
    params = SamplingParams(temperature=0.8, top_k=5, seed=3, logprobs=3, max_tokens=20, presence_penalty=0.5)
    prompt = prompts(1)[0]
    output = run(engine, [(prompt, params)])[0]
    assert output.num_steps < len(output.token_ids), "nothing was accepted"
    model = AutoModelForCausalLM.from_pretrained(target_dir)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + output.token_ids])).logits[0, len(prompt) - 1 : -1]
    expected = logits.log_softmax(-1)
    for row, entry, token in zip(expected, output.logprobs, output.token_ids, strict=True):
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(float(row[token]), abs=1e-3)
        top = row.topk(3)
        assert [id_ for id_, _ in entry.top] == top.indices.tolist()
        assert [value for _, value in entry.top] == pytest.approx(top.values.tolist(), abs=1e-3)


@pytest.mark.parametrize("drafter", [None, "ngram", "draft_model"])
def test_the_context_ends_where_the_model_ends(
    make_engine: MakeEngine, speculative: Settings, drafter: str | None
) -> None:
    engine = make_engine(speculative[drafter] if drafter else None, max_model_len=40)
    endless = replace(GREEDY, max_tokens=None, ignore_eos=True)
    outputs = run(engine, [(prompt, endless) for prompt in prompts(5, high=39)])
    for prompt, output in zip(prompts(5, high=39), outputs, strict=True):
        assert len(prompt) + len(output.token_ids) == 40
        assert output.finish_reason == "length"
    assert engine.stats().fallbacks_by_reason == {}


def test_a_drafter_with_a_shorter_context_stops_drafting_not_the_request(
    make_engine: MakeEngine, speculative: Settings, plain: Engine
) -> None:
    engine = make_engine(speculative["draft_model"])
    assert engine.speculation is not None
    engine.speculation.drafter.max_position = 30
    params = replace(GREEDY, max_tokens=60, ignore_eos=True)
    assert tokens_of(run(engine, [([5, 6, 7], params)])) == tokens_of(run(plain, [([5, 6, 7], params)]))
    stats = engine.stats()
    assert 0 < stats.num_drafted <= 4 * 30
    assert stats.fallbacks_by_reason == {}


def poison(engine: Engine, victim_token: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on every row of a request whose batch rows hold ``victim_token`` is NaN, in logits and cache."""
    forward = engine.executor.forward

    def poisoned(batch: ForwardBatch) -> ForwardOutput:
        output = forward(batch)
        start = 0
        for length, table in zip(batch.query_lens, batch.block_tables, strict=True):
            rows = range(start, start + length)
            if victim_token in batch.token_ids[start : start + length]:
                wanted = [i for i, row in enumerate(batch.logit_rows.tolist()) if row in rows]
                output.logits[wanted] = float("nan")
                engine.executor.cache._pool[:, :, list(table)] = float("nan")
            start += length
        return output

    monkeypatch.setattr(engine.executor, "forward", poisoned)


@pytest.mark.parametrize("drafter", [None, *DRAFTERS])
def test_a_row_that_is_not_finite_fails_its_request_alone(
    make_engine: MakeEngine, speculative: Settings, drafter: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(speculative[drafter] if drafter else None, enable_prefix_caching=False)
    healthy = [(prompt, GREEDY) for prompt in prompts(4) if 63 not in prompt]
    expected = tokens_of(run(engine, healthy))
    assert all(63 not in tokens for tokens in expected)
    poison(engine, 63, monkeypatch)
    outputs = run(engine, [([8, 63, 8], GREEDY), *healthy, ([63], SamplingParams(max_tokens=5))])
    for failed in (outputs[0], outputs[-1]):
        assert (failed.finish_reason, failed.token_ids) == ("error", [])
        assert failed.error is not None
        assert "not finite" in failed.error
    assert tokens_of(outputs[1:-1]) == expected
    assert tokens_of(run(engine, healthy)) == expected, "the failed requests' blocks must not spoil their next owner"
    assert engine.stats().finished_by_reason["error"] == 2


def test_ids_that_only_pad_the_head_are_never_emitted(tmp_path: Path, make_engine: MakeEngine) -> None:
    directory = save_tiny_model(tmp_path, vocab_size=100, tie_word_embeddings=False)
    for speculative in (None, {"method": "draft_model", "model": directory, "num_speculative_tokens": 3}):
        engine = make_engine(speculative, model=directory)
        assert engine.num_ids == 64
        params = SamplingParams(temperature=100.0, max_tokens=60, ignore_eos=True)
        outputs = run(engine, [(prompt, params) for prompt in prompts(4)])
        assert max(token for output in outputs for token in output.token_ids) < 64


def test_draft_models_of_another_padding_serve_and_of_another_tokenizer_are_refused(
    tmp_path: Path, make_engine: MakeEngine, greedy_tokens: list[list[int]]
) -> None:
    padded = save_tiny_model(tmp_path / "padded", vocab_size=80, scale=5.0)
    settings = {"method": "draft_model", "model": padded, "num_speculative_tokens": 2}
    engine = make_engine(settings)
    assert tokens_of(run(engine, [(prompt, GREEDY) for prompt in prompts(16)])) == greedy_tokens
    assert engine.stats().num_verified > 0
    from transformers import AutoTokenizer

    other = AutoTokenizer.from_pretrained(padded)
    other.add_tokens(["extra"])
    other.save_pretrained(padded)
    with pytest.raises(ValueError, match="65 tokens, the target of 64"):
        make_engine(settings)


@pytest.mark.parametrize("when", ["waiting", "prefill", "decode"])
def test_abort_ends_a_request_at_any_moment(make_engine: MakeEngine, speculative: Settings, when: str) -> None:
    engine = make_engine(speculative["draft_model"], max_num_seqs=1, max_num_batched_tokens=8)
    prompt = prompts(1, low=20, high=21)[0]
    engine.add_request("first", prompt, GREEDY)
    engine.add_request("second", prompt, GREEDY)
    for _ in range({"waiting": 0, "prefill": 1, "decode": 5}[when]):
        engine.step()
    victim = "second" if when == "waiting" else "first"
    engine.abort(victim)
    engine.abort("unknown")
    finished = {}
    while engine.has_unfinished:
        for output in engine.step():
            if output.finished:
                finished[output.request_id] = output.finish_reason
    survivor = "first" if when == "waiting" else "second"
    assert finished[victim] == "abort"
    assert finished[survivor] in ("length", "stop")
    assert engine.scheduler.pool.num_owned == 0


class BrokenDrafter:
    """Fails in one way or another."""

    name = "broken"
    num_positions = 3
    taps: tuple[int, ...] = ()
    vocab_map = None
    autoregressive = False
    max_position = 1000

    def __init__(self, how: str) -> None:
        self.how = how
        self.calls = 0

    def propose(self, batch: DraftBatch, sampler: DraftSampler) -> None:
        self.calls += 1
        if not batch.drafting:
            return
        if self.how == "raises":
            raise RuntimeError("no")
        if self.how == "nan":
            sampler.sample(torch.full((len(batch.drafting), 64), float("nan")), 0)
        if self.how == "shape":
            sampler.sample(torch.zeros(len(batch.drafting) + 1, 64), 0)
        if self.how == "outside":
            sampler.propose([[64]] * len(batch.drafting))
        if self.how == "few":
            sampler.propose([[5]] * (len(batch.drafting) - 1))


@pytest.mark.parametrize("how", ["raises", "nan", "shape", "outside", "few"])
def test_a_drafter_that_fails_costs_drafts_not_output(
    make_engine: MakeEngine, speculative: Settings, greedy_tokens: list[list[int]], how: str
) -> None:
    engine = make_engine(speculative["ngram"] | {"num_speculative_tokens": 3})
    assert engine.speculation is not None
    drafter = BrokenDrafter(how)
    engine.speculation.drafter = drafter
    assert tokens_of(run(engine, [(prompt, GREEDY) for prompt in prompts(16)])) == greedy_tokens
    fallbacks = engine.stats().fallbacks_by_reason
    assert fallbacks["RuntimeError" if how == "raises" else "bad_draft"] >= 3
    assert fallbacks["paused"] > drafter.calls, "a drafter that fails again and again is left alone"
    assert engine.stats().num_verified == 0


class WatchingDrafter:
    """Checks what it is handed: each position once, in order, with the features of the target there."""

    name = "watching"
    num_positions = 3
    vocab_map = None
    autoregressive = False
    max_position = 1000
    taps = (1, 2)

    def __init__(self) -> None:
        self.seen: dict[str, list[Tensor]] = {}
        self.num_restarts = 0

    def propose(self, batch: DraftBatch, sampler: DraftSampler) -> None:
        assert batch.features is not None
        row = 0
        for index, name in enumerate(batch.request_ids):
            count, start = batch.num_new[index], batch.start_positions[index]
            rows = slice(row, row + count)
            history = batch.histories[index]
            assert batch.token_ids[rows].tolist() == history[start : start + count]
            assert batch.next_token_ids[rows].tolist() == history[start + 1 : start + count + 1]
            if start < len(self.seen.get(name, [])):
                self.num_restarts += 1
            assert start <= len(self.seen.get(name, [])), "a position was left out"
            self.seen[name] = [*self.seen.get(name, [])[:start], *batch.features[rows].clone()]
            if batch.max_drafts[index] > 0:
                assert start + count == len(history) - 1
                assert len(batch.block_tables[index]) * 8 >= start + count + 1 + self.num_positions
            row += count
        assert row == len(batch.features)
        if batch.drafting:
            sampler.propose([[5] * 3 for _ in batch.drafting])


def test_a_drafter_is_handed_every_committed_position_with_the_targets_hidden_states(
    make_engine: MakeEngine, speculative: Settings, target_dir: str
) -> None:
    from transformers import AutoModelForCausalLM

    engine = make_engine(
        speculative["ngram"] | {"num_speculative_tokens": 3},
        num_kv_blocks=20,
        max_num_batched_tokens=32,
        enable_prefix_caching=False,
    )
    assert engine.speculation is not None
    drafter = WatchingDrafter()
    engine.speculation.drafter = drafter
    engine.executor.set_taps(drafter.taps)
    requests = [(prompt, GREEDY) for prompt in prompts(8)]
    outputs = run(engine, requests)
    assert engine.stats().fallbacks_by_reason == {}
    assert drafter.num_restarts > 0, "no request was preempted and resumed"
    model = AutoModelForCausalLM.from_pretrained(target_dir)
    for index, ((prompt, _), output) in enumerate(zip(requests, outputs, strict=True)):
        with torch.no_grad():
            states = model(torch.tensor([prompt + output.token_ids]), output_hidden_states=True).hidden_states
        expected = torch.cat([states[1][0], model.model.layers[1](states[1], **_inputs(model, states[1]))[0]], -1)
        seen = torch.stack(drafter.seen[f"{index}/0"])
        assert len(prompt) <= len(seen) <= len(prompt) + len(output.token_ids)
        torch.testing.assert_close(seen, expected[: len(seen)], atol=2e-4, rtol=2e-4)


def _inputs(model: Any, states: Tensor) -> dict[str, Any]:
    positions = torch.arange(states.shape[1])[None]
    return {"position_embeddings": model.model.rotary_emb(states, positions), "attention_mask": None}


def test_completions_of_one_prompt_are_told_apart_and_differ(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add_request("x", [5, 6, 7], SamplingParams(n=3, max_tokens=12, seed=1, ignore_eos=True))
    found: dict[int, list[int]] = {}
    while engine.has_unfinished:
        for output in engine.step():
            found.setdefault(output.index, []).extend(output.token_ids)
    assert sorted(found) == [0, 1, 2]
    assert len({tuple(tokens) for tokens in found.values()}) == 3


def test_what_was_learned_is_kept_between_starts(
    make_engine: MakeEngine, speculative: Settings, tmp_path: Path
) -> None:
    first = make_engine(speculative["draft_model"], state_dir=str(tmp_path))
    run(first, [(prompt, GREEDY) for prompt in prompts(16)])
    first.close()
    second = make_engine(speculative["draft_model"], state_dir=str(tmp_path))
    assert second.stats().policy.intercepts == first.stats().policy.intercepts
    assert second.stats().policy.num_refits == first.stats().policy.num_refits > 0
    for path in tmp_path.glob("estimator*.json"):
        path.write_text("{}")
    assert make_engine(speculative["draft_model"], state_dir=str(tmp_path)).stats().policy.num_refits == 0


@pytest.mark.parametrize(
    ("tokens", "params", "message"),
    [
        ([], GREEDY, "no tokens"),
        ([5] * 128, GREEDY, "128 tokens"),
        ([64], GREEDY, "prompt holds token id 64"),
        ([5], replace(GREEDY, logit_bias={70: 1.0}), "logit_bias holds token id 70"),
        ([5], replace(GREEDY, stop_token_ids=[99]), "stop_token_ids holds token id 99"),
    ],
)
def test_requests_that_can_not_be_served_are_refused(
    plain: Engine, tokens: list[int], params: SamplingParams, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        plain.add_request("bad", tokens, params)
    assert not plain.has_unfinished


def test_an_id_in_use_is_refused(plain: Engine) -> None:
    plain.add_request("twice", [5], replace(GREEDY, max_tokens=1))
    with pytest.raises(ValueError, match="in use"):
        plain.add_request("twice", [5], GREEDY)
    while plain.has_unfinished:
        plain.step()
    plain.add_request("twice", [5], replace(GREEDY, max_tokens=1))
    while plain.has_unfinished:
        plain.step()


def test_settings_that_do_not_fit_are_refused_with_the_remedy(make_engine: MakeEngine, speculative: Settings) -> None:
    with pytest.raises(ValueError, match="max_model_len is 999"):
        make_engine(max_model_len=999)
    with pytest.raises(ValueError, match="--max-model-len 80"):
        make_engine(num_kv_blocks=10)
    with pytest.raises(ValueError, match='needs "model"'):
        make_engine({"method": "draft_model"})
    with pytest.raises(ValueError, match="no confidence head"):
        make_engine(speculative["ngram"] | {"confidence": "head"})


def test_adaptive_verification_needs_a_backend_of_variable_length(
    make_engine: MakeEngine, speculative: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trimtab.models import executor

    uniform = executor.BACKENDS["uniform"]
    monkeypatch.setitem(executor.BACKENDS, "paged", uniform)
    with pytest.raises(ValueError, match="enable_adaptive_verification to false"):
        make_engine(speculative["ngram"])
    make_engine(speculative["ngram"] | {"enable_adaptive_verification": False})


def test_nothing_grows_over_many_requests(make_engine: MakeEngine, speculative: Settings) -> None:
    engine = make_engine(speculative["ngram"], max_num_seqs=32)
    short = SamplingParams(max_tokens=4)
    for _ in range(4):
        run(engine, [(prompt, short) for prompt in prompts(100, high=10)])
        assert engine._requests == {}
        assert engine.scheduler.running == []
        assert not engine.scheduler.waiting
    assert engine.stats().num_generated_tokens > 1000
