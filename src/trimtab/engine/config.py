"""Settings of the engine, validated where they enter. Names are vLLM's wherever vLLM has the setting."""

from __future__ import annotations

import difflib
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class StrictModel(BaseModel):
    """Refuses unknown keys and says which key was probably meant."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _suggest_key(cls, values: Any) -> Any:
        if isinstance(values, dict):
            for key in values:
                if key not in cls.model_fields:
                    close = difflib.get_close_matches(str(key), cls.model_fields, n=1)
                    hint = f'; did you mean "{close[0]}"?' if close else f"; known keys: {', '.join(cls.model_fields)}"
                    raise ValueError(f'unknown key "{key}"{hint}')
        return values


class SpeculativeConfig(StrictModel):
    """``--speculative-config``: vLLM's keys, and below them ours."""

    method: str | None = Field(None, description="drafter kind: draft_model, ngram, eagle, eagle3, mtp, dflash, dspark")
    model: str | None = Field(None, description="drafter checkpoint: directory, hub id or shipped name")
    num_speculative_tokens: int | None = Field(None, ge=1, le=64, description="K, the most tokens drafted per step")
    draft_sample_method: Literal["greedy", "probabilistic"] = Field(
        "probabilistic", description="draw drafts from the draft distribution, or take its most likely token"
    )
    rejection_sample_method: Literal["standard", "block"] = Field(
        "standard", description="acceptance test: token by token, or whole blocks"
    )
    prompt_lookup_min: int = Field(2, ge=1, description="ngram: shortest match to draft from")
    prompt_lookup_max: int = Field(4, ge=1, description="ngram: longest match to look for")
    enable_adaptive_verification: bool = Field(True, description="verify only the draft tokens that pay for themselves")

    confidence: str | None = Field(
        None, description="confidence source; default: head if the drafter has one, else estimator"
    )
    confidence_features: tuple[str, ...] | None = Field(None, description="what the estimator reads of each draft")
    planner: str | None = Field(None, description="planner; default: the policy's default")
    exploration: float = Field(0.02, ge=0, le=1, description="share of requests verified untrimmed")
    max_verified_tokens: int | None = Field(None, ge=0, description="cap on admitted draft slots per step")
    allow_lossy: bool = Field(False, description="accept a checkpoint whose verifier_accept_k is above 1")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min {self.prompt_lookup_min} is above prompt_lookup_max {self.prompt_lookup_max}"
            )
        return self


class EngineConfig(StrictModel):
    """Everything that decides how an engine runs."""

    model: str = Field(description="target model: directory, .gguf file, hub id, or smollm2 (embedded)")
    tokenizer: str | None = Field(None, description="tokenizer, if not the model's own")
    dtype: Literal["auto", "float32", "bfloat16", "float16", "int8"] = Field(
        "auto", description="number type of the weights; auto: int8 on CPU, the checkpoint's own on CUDA"
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="where the model runs")
    max_model_len: int | None = Field(None, ge=1, description="longest prompt plus output; default: the model's own")
    max_num_seqs: int = Field(64, ge=1, description="most requests that run at once; further ones wait")
    max_num_batched_tokens: int = Field(512, ge=1, description="most tokens computed in one step")
    block_size: int = Field(32, ge=1, description="tokens per cache block")
    num_kv_blocks: int | None = Field(None, ge=1, description="cache blocks; default: from kv_cache_memory_gb")
    kv_cache_memory_gb: float = Field(2.0, gt=0, description="memory for keys and values")
    enable_prefix_caching: bool = Field(True, description="reuse the cache of prompts that begin alike")
    num_threads: int | None = Field(None, ge=1, description="CPU threads of the model; default: all cores")
    seed: int = Field(0, description="of requests that bring none of their own")
    speculative_config: SpeculativeConfig | None = Field(None, description="drafter and verification, as JSON")
    state_dir: str | None = Field(None, description="where estimator and cost model are kept between starts")
