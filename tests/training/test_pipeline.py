"""A drafter trained by the pipeline on a tiny target: stages resume, training and serving compute the same."""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.drafters.test_forward import Scripted, assert_agree
from tests.tiny import save_tiny_model
from trimtab.drafters import DraftBatch, make_drafter
from trimtab.models.executor import ModelExecutor
from trimtab.models.loader import load_model
from trimtab.training import cli
from trimtab.training.batches import Sampling, build_batch
from trimtab.training.generate import chat_ids, read_prompts, sample_rows
from trimtab.training.pipeline import FEATURES, RESPONSES, Recipe, train
from trimtab.training.store import FEATURES as FEATURE_FILE
from trimtab.training.store import StoreLayout, StoreReader, StoreWriter
from trimtab.training.trainer import TrainOptions, conditional, draft, survival

KINDS = ["dspark", "dflash", "eagle3", "mtp", "eagle"]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, prompts, and the answers that all kinds share."""
    directory = tmp_path_factory.mktemp("training")
    save_tiny_model(directory / "target", num_hidden_layers=4, scale=3.0)
    dice = random.Random(0)
    lines = [{"id": f"p{i}", "turns": [" ".join(f"w{dice.randrange(60)}" for _ in range(6))]} for i in range(45)]
    (directory / "prompts.jsonl").write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    return directory


def recipe(workplace: Path, kind: str) -> Recipe:
    return Recipe(
        kind=kind,
        target=str(workplace / "target"),
        prompts=workplace / "prompts.jsonl",
        out=workplace / kind,
        data=workplace / "data",
        dtype="float32",
        max_prompt_tokens=32,
        max_new_tokens=24,
        num_slots=8,
        teacher_size=12,
        draft_vocab_size=48,
        num_positions=3,
        num_layers=1,
        markov_rank=8,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_trained_drafter_serves_what_training_computed(kind: str, workplace: Path) -> None:
    messages: list[str] = []
    options = TrainOptions(epochs=2, rows_per_batch=120, evaluate_every=1e9)
    out = train(recipe(workplace, kind), options, messages.append)
    evaluations = [message for message in messages if "held out" in message]
    assert evaluations, "the run reported no held-out acceptance"
    config = json.loads((out / "config.json").read_text())
    assert config["speculators_model_type"] == kind
    assert "Learning curve" in (out / "README.md").read_text()

    target = ModelExecutor(load_model(str(workplace / "target"), "float32"), num_blocks=8, block_size=16)
    asked = SimpleNamespace(model=str(out), method=None, num_speculative_tokens=None, allow_lossy=False)
    drafter = make_drafter(asked, target)
    assert drafter.num_positions == 3
    reader = StoreReader(workplace / "data" / FEATURES)
    sample = next(s for s in reader.samples if s.num_rows - s.prompt_len > 6)
    anchor = sample.prompt_len + 2
    columns = [reader.layout.taps.index(tap) * 32 + i for tap in drafter.taps for i in range(32)]
    features = reader.features(sample)[:anchor, columns]
    ids = torch.tensor(sample.token_ids)
    drawn = ids[anchor + 1 : anchor + 4]
    batch = DraftBatch(
        ["a"], [anchor], [0], ids[:anchor], ids[1 : anchor + 1], features, [[2, 0, 5, 1]], [3], [sample.token_ids]
    )
    sampler = Scripted(drawn[None], 3)
    drafter.propose(batch, sampler)

    network = drafter.network  # type: ignore[attr-defined]
    to_draft = torch.arange(64)
    anchored = build_batch(reader, [sample], [torch.tensor([anchor])], to_draft, Sampling(3, 1.0, 1, 1.0))
    chosen = anchored.features[:, columns]
    if kind in ("mtp", "eagle"):
        chosen = target.final_norm(chosen)  # type: ignore[misc]
    output = draft(network, SimpleNamespace(**{**_fields(anchored), "features": chosen}))  # type: ignore[arg-type]
    for k in range(3):
        logits = network.logits(output.hidden[:, k])
        if output.latent is not None:
            logits = logits + network.markov_head.markov_w2(output.latent[:, k])
        assert_agree(sampler.logits[k], logits.detach())
        if output.confidence is not None:
            torch.testing.assert_close(sampler.heads[k], output.confidence[:, k].detach(), rtol=1e-3, atol=1e-3)


def _fields(batch: object) -> dict[str, object]:
    return {name: getattr(batch, name) for name in type(batch).__dataclass_fields__}  # type: ignore[attr-defined]


def test_training_helps_and_a_second_run_goes_on(workplace: Path) -> None:
    settings = recipe(workplace, "dspark")
    settings = Recipe(**{**_fields(settings), "out": workplace / "again"})  # type: ignore[arg-type]
    first: list[str] = []
    options = TrainOptions(epochs=12, rows_per_batch=120, evaluate_every=1e9, learning_rate=3e-3)
    train(settings, options, first.append)
    state = torch.load(workplace / "again" / "training.pt", weights_only=False)
    second: list[str] = []
    train(settings, TrainOptions(epochs=1, rows_per_batch=120, evaluate_every=1e9), second.append)
    assert f"resumed at step {state['step_count']}" in second
    again = torch.load(workplace / "again" / "training.pt", weights_only=False)
    assert again["step_count"] > state["step_count"]
    lengths = [point["length"] for point in again["history"]]
    assert lengths[-1] > 1.2, "a tiny target with 64 tokens is learned in a few epochs"


def test_answers_are_not_sampled_twice(workplace: Path) -> None:
    train(recipe(workplace, "dflash"), TrainOptions(epochs=0.1, evaluate_every=1e9), lambda _: None)
    ids = [json.loads(line)["id"] for line in (workplace / "data" / RESPONSES).read_text().splitlines()]
    assert len(ids) == len(set(ids)) == 45
    assert len(StoreReader(workplace / "data" / FEATURES).samples) == 45


def test_features_read_afterwards_equal_those_kept_while_answering(workplace: Path) -> None:
    train(recipe(workplace, "dflash"), TrainOptions(epochs=0.1, evaluate_every=1e9), lambda _: None)
    settings = Recipe(**{**_fields(recipe(workplace, "dflash")), "data": workplace / "copy"})  # type: ignore[arg-type]
    settings.data.mkdir(exist_ok=True)
    (settings.data / RESPONSES).write_text((workplace / "data" / RESPONSES).read_text())
    train(settings, TrainOptions(epochs=0.1, evaluate_every=1e9), lambda _: None)
    kept, again = StoreReader(workplace / "data" / FEATURES), StoreReader(workplace / "copy" / FEATURES)
    by_id = {sample.id: sample for sample in again.samples}
    for sample in kept.samples[:5]:
        other = by_id[sample.id]
        torch.testing.assert_close(kept.features(sample), again.features(other), rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(kept.teacher(sample)[1], again.teacher(other)[1], rtol=5e-3, atol=2e-3)


def test_an_interrupted_store_is_cut_back_to_its_last_sample(tmp_path: Path) -> None:
    layout = StoreLayout("t", (1,), 4, 9, 2)
    writer = StoreWriter(tmp_path, layout)
    rows = torch.arange(12.0).view(3, 4)
    laws = torch.tensor([[1, 2]] * 3), torch.tensor([[0.5, 0.25]] * 3)
    writer.append("a", 2, [5, 6, 7, 8], rows, *laws)
    writer.close()
    with (tmp_path / FEATURE_FILE).open("ab") as file:
        file.write(b"\x01" * 5)
    with (tmp_path / "sequences.jsonl").open("a") as file:
        file.write('{"id": "b", "prompt')
    writer = StoreWriter(tmp_path, layout)
    assert writer.ids == {"a"}
    writer.append("c", 1, [1, 2, 3, 4], rows + 1, *laws)
    writer.close()
    reader = StoreReader(tmp_path)
    assert [sample.id for sample in reader.samples] == ["a", "c"]
    assert torch.equal(reader.features(reader.samples[1]), rows + 1)
    with pytest.raises(ValueError, match="another directory"):
        StoreWriter(tmp_path, StoreLayout("t", (1, 2), 4, 9, 2))


def test_prompts_are_read_or_refused(tmp_path: Path, workplace: Path) -> None:
    tokenizer = load_model(str(workplace / "target"), "float32").tokenizer
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "w3 w4"}\n\n{"turns": ["w5"], "id": "x"}\n{"prompt": "' + "w1 " * 50 + '"}\n')
    prompts = read_prompts(path, tokenizer, 10)
    assert [prompt.id for prompt in prompts] == ["1", "x"]
    assert prompts[0].token_ids == chat_ids(tokenizer, "w3 w4")
    path.write_text('{"question": "?"}\n')
    with pytest.raises(ValueError, match="line 1"):
        read_prompts(path, tokenizer, 10)


def test_rows_are_drawn_by_inverse_cdf() -> None:
    probs = torch.tensor([[0.25, 0.0, 0.75], [0.5, 0.5, 0.0]])
    assert sample_rows(probs, torch.tensor([0.2, 0.6])).tolist() == [0, 1]
    assert sample_rows(probs, torch.tensor([0.25, 0.999999])).tolist() == [2, 1]


def test_acceptance_is_conditional_on_survival() -> None:
    overlap = torch.tensor([[1.0, 0.5], [0.0, 1.0]])
    assert conditional(overlap) == pytest.approx([0.5, 0.5])
    assert survival(overlap) == pytest.approx((1 + 0.5 + 0 + 0) / 2)


def test_the_command_parses_and_reports_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    cli.add_parser(parser.add_subparsers())
    missing = ["train", "eagle3", "--target", str(tmp_path / "none"), "--prompts", "p", "--out", str(tmp_path / "o")]
    args = parser.parse_args(missing)
    assert args.run(args) == 2
    assert "does not exist" in " ".join(capsys.readouterr().err.split())
