"""What training reads: token sequences, the target's hidden states at its taps, and its distribution at every answer.

A store is a directory of append-only files. A sequence counts once its line in ``sequences.jsonl`` is written, so an
interrupted writer loses at most the sequence it was writing; the next writer cuts the unfinished tail off.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

SEQUENCES, META = "sequences.jsonl", "meta.json"
FEATURES, TEACHER_IDS, TEACHER_PROBS = "features.bf16", "teacher_ids.i32", "teacher_probs.f16"


@dataclass(frozen=True, slots=True)
class StoreLayout:
    """What every row of a store holds.

    Attributes:
        target: name of the model that answered.
        taps: indices into its hidden states (the last layer's is taken before the final norm).
        teacher_size: how many of the target's most likely tokens are kept per answered position.
    """

    target: str
    taps: tuple[int, ...]
    hidden_size: int
    vocab_size: int
    teacher_size: int

    @property
    def feature_width(self) -> int:
        return len(self.taps) * self.hidden_size


@dataclass(frozen=True, slots=True)
class Sample:
    """One prompt and its answer.

    Attributes:
        token_ids: prompt, then answer.
        first_row: first of ``len(token_ids) - 1`` rows; row i holds what the target computed at token i, which is the
            law of token i + 1 (the last token was never an input).
    """

    id: str
    prompt_len: int
    token_ids: list[int]
    first_row: int

    @property
    def num_rows(self) -> int:
        return len(self.token_ids) - 1


class StoreWriter:
    """Appends sequences to a store.

    Raises:
        ValueError: if the directory holds a store of another layout.
    """

    def __init__(self, directory: Path, layout: StoreLayout) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory, self.layout = directory, layout
        meta = directory / META
        if meta.is_file() and read_layout(directory) != layout:
            raise ValueError(
                f"{directory} was written as {read_layout(directory)}, not {layout}; use another directory"
            )
        meta.write_text(json.dumps(asdict(layout)))
        _cut_unfinished_line(directory / SEQUENCES)
        done = read_samples(directory)
        self.ids = {sample.id for sample in done}
        self.num_rows = done[-1].first_row + done[-1].num_rows if done else 0
        widths = {FEATURES: 2 * layout.feature_width, TEACHER_IDS: 4 * layout.teacher_size}
        widths[TEACHER_PROBS] = 2 * layout.teacher_size
        self._files = {name: _open_at(directory / name, self.num_rows * width) for name, width in widths.items()}
        self._index = (directory / SEQUENCES).open("a")

    def append(
        self, id: str, prompt_len: int, token_ids: list[int], features: Tensor, ids: Tensor, probs: Tensor
    ) -> None:
        """Add one sequence.

        Args:
            features: ``[len(token_ids) - 1, num_taps * hidden_size]``.
            ids, probs: ``[len(token_ids) - 1, teacher_size]`` the target's most likely next tokens, how likely.
        """
        sample = Sample(id, prompt_len, token_ids, self.num_rows)
        assert features.shape == (sample.num_rows, self.layout.feature_width)
        assert ids.shape == probs.shape == (sample.num_rows, self.layout.teacher_size)
        self._files[FEATURES].write(features.to(torch.bfloat16).contiguous().view(torch.int16).numpy().tobytes())
        self._files[TEACHER_IDS].write(ids.to(torch.int32).numpy().tobytes())
        self._files[TEACHER_PROBS].write(probs.to(torch.float16).numpy().tobytes())
        for file in self._files.values():
            file.flush()
        self._index.write(json.dumps(asdict(sample)) + "\n")
        self._index.flush()
        self.ids.add(id)
        self.num_rows += sample.num_rows

    def close(self) -> None:
        for file in [*self._files.values(), self._index]:
            file.close()


class StoreReader:
    """Reads a store; `refresh` picks up what was appended since."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.layout = read_layout(directory)
        self.samples: list[Sample] = []
        self.refresh()

    def refresh(self) -> int:
        """Read the index again; returns the number of rows."""
        self.samples = read_samples(self.directory)
        if not self.samples:
            raise ValueError(f"{self.directory} holds no sequences yet")
        rows = self.samples[-1].first_row + self.samples[-1].num_rows
        width, size = self.layout.feature_width, self.layout.teacher_size
        self._features = np.memmap(self.directory / FEATURES, np.int16, "r", shape=(rows, width))
        self._ids = np.memmap(self.directory / TEACHER_IDS, np.int32, "r", shape=(rows, size))
        self._probs = np.memmap(self.directory / TEACHER_PROBS, np.float16, "r", shape=(rows, size))
        return rows

    def features(self, sample: Sample) -> Tensor:
        """``[len(token_ids) - 1, num_taps * hidden_size]`` float32."""
        rows = slice(sample.first_row, sample.first_row + sample.num_rows)
        return torch.from_numpy(np.array(self._features[rows])).view(torch.bfloat16).float()

    def teacher(self, sample: Sample) -> tuple[Tensor, Tensor]:
        """``[len(token_ids) - 1, teacher_size]`` int64 ids and float32 probabilities of the next token."""
        rows = slice(sample.first_row, sample.first_row + sample.num_rows)
        ids, probs = np.array(self._ids[rows]), np.array(self._probs[rows])
        return torch.from_numpy(ids).long(), torch.from_numpy(probs).float()


def read_layout(directory: Path) -> StoreLayout:
    values: dict[str, Any] = json.loads((directory / META).read_text())
    return StoreLayout(**{**values, "taps": tuple(values["taps"])})


def read_samples(directory: Path) -> list[Sample]:
    path = directory / SEQUENCES
    if not path.is_file():
        return []
    lines = path.read_text().split("\n")
    complete: Sequence[str] = lines[:-1]  # what follows the last newline is an unfinished line
    return [Sample(**json.loads(line)) for line in complete if line]


def _cut_unfinished_line(path: Path) -> None:
    if path.is_file():
        content = path.read_bytes()
        path.write_bytes(content[: content.rfind(b"\n") + 1])


def _open_at(path: Path, size: int) -> Any:
    path.touch()
    with path.open("r+b") as file:
        file.truncate(size)
    return path.open("ab")
