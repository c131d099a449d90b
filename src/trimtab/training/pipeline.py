"""The three stages of making a drafter: the target answers prompts, its hidden states are kept, a network is trained.

Every stage goes on where an earlier run stopped. The data directory can serve several kinds of drafter.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.drafters.dspark import DSparkNetwork
from trimtab.drafters.kinds import make_network
from trimtab.drafters.networks import DraftNetwork, DraftShape
from trimtab.models.executor import ModelExecutor
from trimtab.models.loader import LoadedModel, load_model
from trimtab.training.batches import Sampling, common_prefix
from trimtab.training.export import calibrate, export_drafter, model_card
from trimtab.training.generate import BLOCK_SIZE, Prompt, answer_prompts, layout_of, read_features, read_prompts
from trimtab.training.initialise import bigram_logits, draft_vocabulary, start_from_target, start_markov
from trimtab.training.store import StoreReader, StoreWriter
from trimtab.training.trainer import Trainer, TrainOptions, save_state

RESPONSES, FEATURES, STATE = "responses.jsonl", "features", "training.pt"
BLOCK_KINDS = ("dflash", "dspark")
LAST_STATE_KINDS = ("mtp", "eagle")
Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Recipe:
    """What to make and from what.

    Attributes:
        data: directory of responses and features.
        dtype: type in which the target answers and computes features.
        num_answers: at most this many prompts are answered; None: all.
        num_positions: K, draft positions to train.
        num_layers: of block kinds; the others have one.
        prompt_weight: density of training positions inside prompts, relative to answers.
    """

    kind: str
    target: str
    prompts: Path
    out: Path
    data: Path
    dtype: str = "auto"
    num_answers: int | None = None
    max_prompt_tokens: int = 256
    max_new_tokens: int = 256
    num_slots: int = 32
    teacher_size: int = 48
    draft_vocab_size: int = 10240
    num_positions: int = 5
    num_layers: int = 2
    markov: str = "gated"
    markov_rank: int = 64
    density: float = 0.35
    prompt_weight: float = 0.5
    seed: int = 0


def train(recipe: Recipe, options: TrainOptions, report: Report) -> Path:
    """Run all stages; returns the directory of the finished drafter.

    Raises:
        ValueError: if the prompts or the data do not fit the recipe.
    """
    if recipe.kind not in (*BLOCK_KINDS, *LAST_STATE_KINDS, "eagle3"):
        raise ValueError(f'can not train "{recipe.kind}"; kinds: eagle3, eagle, mtp, dflash, dspark')
    loaded = load_model(recipe.target, recipe.dtype)
    prompts = read_prompts(recipe.prompts, loaded.tokenizer, recipe.max_prompt_tokens)
    if not prompts:
        raise ValueError(f"{recipe.prompts} holds no prompt of at most {recipe.max_prompt_tokens} tokens")
    random.Random(recipe.seed).shuffle(prompts)
    executor = collect(recipe, loaded, prompts[: recipe.num_answers], report)
    reader = StoreReader(recipe.data / FEATURES)
    trainer, draft_ids = prepare(recipe, options, executor, reader, prompts, report)

    def save() -> None:
        save_state(trainer, recipe.out / STATE, {"draft_ids": draft_ids, "shape": asdict(trainer.network.shape)})

    trainer.run(save, report)
    publish(recipe, trainer, loaded, draft_ids)
    return recipe.out


def collect(recipe: Recipe, loaded: LoadedModel, prompts: list[Prompt], report: Report) -> ModelExecutor:
    """Stages 1 and 2: answers that exist get their features, prompts without an answer get both."""
    recipe.data.mkdir(parents=True, exist_ok=True)
    longest = recipe.max_prompt_tokens + recipe.max_new_tokens
    blocks = max(recipe.num_slots * (-(-longest // BLOCK_SIZE)), 64)
    executor = ModelExecutor(loaded, blocks, BLOCK_SIZE, default_taps(loaded))
    writer = StoreWriter(recipe.data / FEATURES, layout_of(executor, recipe.teacher_size))
    try:
        if (recipe.data / RESPONSES).is_file():
            read_features(
                executor,
                writer,
                recipe.data / RESPONSES,
                max_tokens=longest,
                progress=lambda done, tokens: report(f"features of {done} answers, {tokens} tokens"),
            )
        answer_prompts(
            executor,
            writer,
            prompts,
            recipe.data / RESPONSES,
            max_new_tokens=recipe.max_new_tokens,
            num_slots=recipe.num_slots,
            seed=recipe.seed,
            progress=lambda done, tokens: report(f"{done} of {len(prompts)} prompts answered, {tokens} tokens"),
        )
    finally:
        writer.close()
    return executor


def default_taps(loaded: LoadedModel) -> tuple[int, ...]:
    """EAGLE-3's three taps and the last layer: enough for every kind."""
    num_layers = loaded.model.config.num_hidden_layers
    return tuple(sorted({min(2, num_layers), num_layers // 2, max(num_layers - 3, 0), num_layers}))


def shape_of(recipe: Recipe, config: Any, taps: tuple[int, ...], draft_vocab_size: int) -> DraftShape:
    """The drafter's architecture: layers like the target's."""
    block = recipe.kind in BLOCK_KINDS
    dspark = recipe.kind == "dspark"
    rope = getattr(config, "rope_parameters", None) or {}
    heads = config.num_attention_heads
    last_state = recipe.kind in LAST_STATE_KINDS
    return DraftShape(
        kind=recipe.kind,
        vocab_size=config.vocab_size,
        draft_vocab_size=draft_vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=recipe.num_layers if block else 1,
        num_heads=heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        rms_norm_eps=float(config.rms_norm_eps),
        rope_theta=float(rope.get("rope_theta", 10000.0)),
        taps=taps[-1:] if last_state else taps[:-1],
        target_hidden_size=config.hidden_size,
        num_positions=recipe.num_positions,
        max_position=config.max_position_embeddings,
        block_size=recipe.num_positions + (not dspark) if block else 0,
        from_anchor=dspark,
        markov=recipe.markov if dspark and recipe.markov_rank else "",
        markov_rank=recipe.markov_rank if dspark else 0,
        confidence=dspark,
        confidence_with_markov=dspark and recipe.markov_rank > 0,
    )


def prepare(
    recipe: Recipe,
    options: TrainOptions,
    executor: ModelExecutor,
    reader: StoreReader,
    prompts: list[Prompt],
    report: Report,
) -> tuple[Trainer, Tensor]:
    """A trainer, started from the target or from the state of an earlier run, and its draft vocabulary."""
    recipe.out.mkdir(parents=True, exist_ok=True)
    path = recipe.out / STATE
    state = torch.load(path, weights_only=False) if path.is_file() else None
    source = load_model(recipe.target, "float32").model if executor.loaded.dtype != "float32" else executor.loaded.model
    config = source.config
    if state is not None:
        draft_ids, shape = state["draft_ids"], DraftShape(**state["shape"])
        if shape.kind != recipe.kind:
            raise ValueError(f'{path} is a "{shape.kind}" drafter, not "{recipe.kind}"; use another output directory')
    else:
        tokens = [prompt.token_ids for prompt in prompts]
        size = min(recipe.draft_vocab_size, config.vocab_size)
        draft_ids, held = draft_vocabulary(reader, tokens, size)
        report(f"draft vocabulary of {len(draft_ids)} tokens holds {held:.1%} of the target's probability")
        shape = shape_of(recipe, config, reader.layout.taps, len(draft_ids))
    network = make_network(shape)
    embedding: nn.Module = source.get_input_embeddings()
    network.embed_tokens = embedding.requires_grad_(False)
    if state is None:
        start(network, source, executor, reader, draft_ids, report)
    head = source.get_output_embeddings().weight.detach()[draft_ids].contiguous()
    to_draft = torch.full((config.vocab_size,), -1)
    to_draft[draft_ids] = torch.arange(len(draft_ids))
    prefix = common_prefix(reader.samples)
    sampling = Sampling(recipe.num_positions, recipe.density, prefix, recipe.prompt_weight)
    norm = source.base_model.norm.requires_grad_(False) if recipe.kind in LAST_STATE_KINDS else None
    trainer = Trainer(network, reader, head, to_draft, sampling, options, norm)
    if state is not None:
        trainer.load_state(state)
        report(f"resumed at step {trainer.step_count}")
    return trainer, draft_ids


def start(
    network: DraftNetwork,
    source: Any,
    executor: ModelExecutor,
    reader: StoreReader,
    draft_ids: Tensor,
    report: Report,
) -> None:
    """Give an untrained network what the target knows."""
    start_from_target(network, source)
    if isinstance(network, DSparkNetwork) and network.markov_head is not None and network.shape.markov != "rnn":
        report("reading the target's bigrams for the Markov head")
        bigrams = bigram_logits(executor, reader.samples[0].token_ids, draft_ids, draft_ids)
        counts = torch.zeros(network.shape.vocab_size)
        for sample in reader.samples:
            counts += torch.bincount(torch.tensor(sample.token_ids), minlength=len(counts))
        start_markov(network, draft_ids, bigrams, counts[draft_ids] + 0.5)


def publish(recipe: Recipe, trainer: Trainer, loaded: LoadedModel, draft_ids: Tensor) -> None:
    """Write weights and model card; the confidence head is calibrated on held-out answers first."""
    training, held_out = trainer.held_out()
    overlap, _, confidence = trainer.judge(held_out, 1.0)
    temperatures = [] if confidence is None else calibrate(confidence, overlap)
    names = getattr(loaded.model.config, "architectures", None) or [type(loaded.model).__name__]
    export_drafter(recipe.out, trainer.network, draft_ids, loaded.name, names, temperatures)
    evaluation = trainer.evaluate(held_out)
    rows = sum(sample.num_rows for sample in training)
    answered = sum(len(sample.token_ids) - sample.prompt_len for sample in training)
    facts = {
        "target": loaded.name,
        "parameters": f"{sum(p.numel() for p in trainer.network.parameters() if p.requires_grad):,}",
        "prompts": f"{recipe.prompts.name}, {len(training)} answered and trained on, {len(held_out)} held out",
        "answers": f"{answered:,} tokens sampled by the target at temperature 1 ({rows:,} with prompts)",
        "training": f"{trainer.step_count:,} steps, {trainer.tokens_seen:,} tokens seen",
        "draft vocabulary": f"{len(draft_ids):,} of {trainer.network.shape.vocab_size:,} tokens",
        "held-out length": f"{evaluation.length:.3f} at temperature 1, {evaluation.greedy_length:.3f} greedy",
    }
    (recipe.out / "README.md").write_text(model_card(recipe.kind, facts, trainer.history))
