"""Stage 1 and 2: the target answers prompts, and what it computed on the way is kept for training.

The taps and the target's distribution come from the very forward pass that samples the next token, so features cost
no second pass. Answers that exist already (a responses file) are read by one teacher-forced pass instead.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trimtab.models.executor import ForwardBatch, ModelExecutor
from trimtab.training.store import StoreLayout, StoreWriter

BLOCK_SIZE = 32


@dataclass(frozen=True, slots=True)
class Prompt:
    id: str
    token_ids: list[int]


@dataclass(slots=True)
class _Slot:
    """A prompt being answered."""

    prompt: Prompt
    tokens: list[int]
    table: list[int]
    cached: int = 0
    features: list[Tensor] = field(default_factory=list)
    teacher_ids: list[Tensor] = field(default_factory=list)
    teacher_probs: list[Tensor] = field(default_factory=list)


def read_prompts(path: Path, tokenizer: Any, max_prompt_tokens: int) -> list[Prompt]:
    """Prompts of a JSONL file, each line ``{"id", "turns": [first user message, ...]}`` or ``{"prompt"}``.

    Longer prompts than ``max_prompt_tokens`` are left out, not cut: a cut prompt asks something else.

    Raises:
        ValueError: if a line has neither key, with its number.
    """
    prompts = []
    for number, line in enumerate(path.read_text().split("\n"), start=1):
        if not line.strip():
            continue
        entry = json.loads(line)
        text = entry["turns"][0] if entry.get("turns") else entry.get("prompt")
        if not isinstance(text, str):
            raise ValueError(f'{path} line {number} has neither "turns" nor "prompt"')
        prompts.append(Prompt(str(entry.get("id", number)), chat_ids(tokenizer, text)))
    return [prompt for prompt in prompts if len(prompt.token_ids) <= max_prompt_tokens]


def chat_ids(tokenizer: Any, text: str) -> list[int]:
    """Token ids of one user message in the model's chat format (bare text without a template)."""
    if getattr(tokenizer, "chat_template", None) is None:
        return list(tokenizer(text).input_ids)
    message = [{"role": "user", "content": text}]
    rendered = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(rendered, add_special_tokens=False).input_ids)


def answer_prompts(
    executor: ModelExecutor,
    writer: StoreWriter,
    prompts: Sequence[Prompt],
    responses: Path,
    *,
    max_new_tokens: int,
    num_slots: int,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, tokens: None,
    stop: Callable[[], bool] = lambda: False,
) -> None:
    """Sample one answer per prompt at temperature 1; append it to ``responses`` and the store.

    Prompts whose id the store holds are skipped, so an interrupted run goes on where it was.
    """
    waiting = iter([prompt for prompt in prompts if prompt.id not in writer.ids])
    blocks_per_slot = -(-(max(len(prompt.token_ids) for prompt in prompts) + max_new_tokens) // BLOCK_SIZE)
    free = [list(range(i * blocks_per_slot, (i + 1) * blocks_per_slot)) for i in range(num_slots)]
    generator = torch.Generator().manual_seed(seed + len(writer.ids))
    active: list[_Slot] = []
    done = tokens = 0
    with responses.open("a") as output:
        while True:
            while free and (prompt := next(waiting, None)) is not None:
                active.append(_Slot(prompt, list(prompt.token_ids), free.pop()))
            if not active or stop():
                return
            _decode_step(executor, active, writer.layout.teacher_size, generator)
            for slot in [s for s in active if _finished(s, executor, max_new_tokens)]:
                active.remove(slot)
                free.append(slot.table)
                start = len(slot.prompt.token_ids)
                line = {"id": slot.prompt.id, "prompt_ids": slot.tokens[:start], "response_ids": slot.tokens[start:]}
                output.write(json.dumps(line) + "\n")
                output.flush()
                laws = torch.cat(slot.teacher_ids), torch.cat(slot.teacher_probs)
                writer.append(slot.prompt.id, start, slot.tokens, torch.cat(slot.features), *laws)
                done, tokens = done + 1, tokens + len(slot.tokens) - start
                progress(done, tokens)


def _finished(slot: _Slot, executor: ModelExecutor, max_new_tokens: int) -> bool:
    new = len(slot.tokens) - len(slot.prompt.token_ids)
    return new >= max_new_tokens or slot.tokens[-1] in executor.info.eos_token_ids


def _decode_step(executor: ModelExecutor, slots: list[_Slot], teacher_size: int, generator: torch.Generator) -> None:
    pending = [slot.tokens[slot.cached :] for slot in slots]
    lengths = [len(tokens) for tokens in pending]
    batch = ForwardBatch(
        token_ids=torch.tensor([token for tokens in pending for token in tokens]),
        query_lens=lengths,
        context_lens=[slot.cached for slot in slots],
        block_tables=[slot.table for slot in slots],
        logit_rows=torch.arange(sum(lengths)),
    )
    output = executor.forward(batch)
    assert output.features is not None
    probs = output.logits.softmax(-1)
    top = probs.topk(teacher_size, dim=-1)
    last_rows = torch.tensor(lengths).cumsum(0) - 1
    drawn = sample_rows(probs[last_rows], torch.rand(len(slots), generator=generator)).tolist()
    features = torch.split(output.features.to(torch.bfloat16), lengths)
    ids, values = torch.split(top.indices.to(torch.int32), lengths), torch.split(top.values.half(), lengths)
    for row, slot in enumerate(slots):
        slot.cached = len(slot.tokens)
        slot.tokens.append(drawn[row])
        slot.features.append(features[row].clone())
        slot.teacher_ids.append(ids[row].clone())
        slot.teacher_probs.append(values[row].clone())


def sample_rows(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Inverse-CDF draw of each row of ``probs [R, V]`` with ``uniforms [R]``; int64 ``[R]``."""
    cumulative = probs.double().cumsum(-1)
    threshold = uniforms.double() * cumulative[:, -1]
    return torch.searchsorted(cumulative, threshold.unsqueeze(1), right=True).squeeze(1).clamp_(max=probs.shape[1] - 1)


def read_responses(path: Path) -> Iterator[tuple[str, list[int], list[int]]]:
    """``(id, prompt_ids, response_ids)`` of every complete line of a responses file."""
    for line in path.read_text().split("\n")[:-1]:
        if line:
            entry = json.loads(line)
            yield str(entry["id"]), entry["prompt_ids"], entry["response_ids"]


def read_features(
    executor: ModelExecutor,
    writer: StoreWriter,
    responses: Path,
    *,
    max_tokens: int = 1024,
    progress: Callable[[int, int], None] = lambda done, tokens: None,
) -> None:
    """Stage 2 for answers that were sampled elsewhere: one teacher-forced pass over each one not in the store yet."""
    table = list(range(-(-max_tokens // BLOCK_SIZE)))
    tokens = 0
    for done, (id, prompt, response) in enumerate(read_responses(responses)):
        if id in writer.ids or not response or len(prompt) >= max_tokens:
            continue
        ids = (prompt + response)[: max_tokens + 1]
        inputs = torch.tensor(ids[:-1])
        output = executor.forward(ForwardBatch(inputs, [len(inputs)], [0], [table], torch.arange(len(inputs))))
        assert output.features is not None
        top = output.logits.softmax(-1).topk(writer.layout.teacher_size, dim=-1)
        writer.append(id, len(prompt), ids, output.features, top.indices, top.values)
        tokens += len(ids) - len(prompt)
        progress(done + 1, tokens)


def layout_of(executor: ModelExecutor, teacher_size: int) -> StoreLayout:
    info = executor.info
    return StoreLayout(executor.loaded.name, executor.taps, info.hidden_size, info.vocab_size, teacher_size)
