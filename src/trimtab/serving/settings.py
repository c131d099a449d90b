"""Settings of the HTTP server, validated where they enter. Names are vLLM's wherever vLLM has the setting."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from trimtab.engine.config import StrictModel


class ServerConfig(StrictModel):
    """What the server offers, to whom, and how much of it at once."""

    host: str = Field("127.0.0.1", description="address to listen on; 0.0.0.0: every interface")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0: any free one")
    served_model_name: tuple[str, ...] = Field((), description="names clients may ask for; default: the model's")
    api_key: tuple[str, ...] = Field((), description="clients must send one of these; also $TRIMTAB_API_KEY")
    generation_config: Literal["auto", "vllm"] = Field(
        "auto", description="sampling defaults: the model's generation_config.json, or vLLM's neutral ones"
    )
    max_queued_requests: int = Field(512, ge=0, description="requests that may wait; further ones are answered 429")
    request_timeout: float = Field(600.0, gt=0, description="seconds after which a request is ended")
    drain_timeout: float = Field(60.0, ge=0, description="seconds that running requests have to end after SIGTERM")
    max_body_mb: float = Field(4.0, gt=0, description="largest request body")
    allowed_origins: tuple[str, ...] = Field((), description="origins that browsers may call from (CORS)")
    per_request_spec_decode_metrics: Literal["none", "summary"] = Field(
        "none", description="add metrics.speculative_decoding to every response"
    )
    enable_log_requests: bool = Field(False, description="log prompts, too")
