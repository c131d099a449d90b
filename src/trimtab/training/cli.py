"""``trimtab train KIND``: makes a drafter for a target from a file of prompts."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

KINDS = ("dspark", "eagle3", "mtp", "dflash", "eagle")


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the ``train`` command to an ``argparse`` sub-parser collection; `run` is its handler (``args.run``)."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "train",
        help="train a drafter on the target's own answers",
        description="The target answers the prompts, its hidden states are kept, and a drafter is trained on them. "
        "An interrupted run goes on where it was when the same command is given again.",
    )
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--target", required=True, help="model that answers: directory, .gguf file, hub id or smollm2")
    parser.add_argument(
        "--prompts", required=True, type=Path, help='JSONL, each line {"turns": ["..."]} or {"prompt": "..."}'
    )
    parser.add_argument("--out", required=True, type=Path, help="directory of the finished drafter and its state")
    parser.add_argument("--data", type=Path, help="answers and features, shared between kinds (default: OUT/data)")
    parser.add_argument("--epochs", type=float, default=5.0, help="passes over the data (default 5)")
    parser.add_argument("--minutes", type=float, help="train for this long instead")
    parser.add_argument("--num-answers", type=int, help="answer at most this many prompts (default: all)")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--draft-vocab-size", type=int, default=10240)
    parser.add_argument("--num-positions", type=int, default=5, help="draft positions to train (default 5)")
    parser.add_argument("--num-layers", type=int, default=2, help="layers of dflash and dspark (default 2)")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--dtype", default="auto", help="type in which the target answers (default: as in serving)")
    parser.add_argument("--num-threads", type=int, help="CPU threads (default: all cores)")
    parser.add_argument("--seed", type=int, default=0)
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Train; returns the exit status."""
    import torch
    from rich.console import Console

    from trimtab.training.pipeline import Recipe, train
    from trimtab.training.trainer import TrainOptions

    if args.num_threads:
        torch.set_num_threads(args.num_threads)
    console = Console(stderr=True)
    recipe = Recipe(
        kind=args.kind,
        target=args.target,
        prompts=args.prompts,
        out=args.out,
        data=args.data or args.out / "data",
        dtype=args.dtype,
        num_answers=args.num_answers,
        max_new_tokens=args.max_new_tokens,
        draft_vocab_size=args.draft_vocab_size,
        num_positions=args.num_positions,
        num_layers=args.num_layers,
        seed=args.seed,
    )
    options = TrainOptions(minutes=args.minutes, epochs=args.epochs, learning_rate=args.learning_rate, seed=args.seed)
    try:
        with _ProgressReport(console) as report:
            train(recipe, options, report)
    except (ValueError, OSError) as error:
        console.print(f"error: {error}", soft_wrap=True, markup=False, highlight=False)
        return 2
    console.print(f'drafter written to {args.out}; try it with --speculative-config \'{{"model": "{args.out}"}}\'')
    return 0


class _ProgressReport:
    """A bar that shows the latest message; evaluations (they name held-out acceptance) are kept as lines above it."""

    def __init__(self, console: Any) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self._progress = Progress(
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
            console=console,
        )
        self._task = self._progress.add_task("loading the target", total=None)

    def __enter__(self) -> _ProgressReport:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def __call__(self, message: str) -> None:
        if "held out" in message:
            self._progress.console.print(message, highlight=False)
            share = float(message.split("%")[0]) / 100
            self._progress.update(self._task, total=1.0, completed=share)
        self._progress.update(self._task, description=message.split(" | ")[0])
