"""Settings of the server; those of the engine are in `trimtab.engine.config`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from trimtab.engine.config import StrictModel


class ServerConfig(StrictModel):
    """Where the server listens and what it lets in. Names are vLLM's wherever vLLM has the setting."""

    host: str = Field("127.0.0.1", description="address to listen on; 0.0.0.0 for every interface")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    served_model_name: str | None = Field(None, description="name that clients use; default: MODEL as given")
    api_key: str | None = Field(None, description="clients must send it as a bearer token; default: $TRIMTAB_API_KEY")
    allowed_origins: str | None = Field(None, description="origins for CORS, separated by commas; default: none")
    max_queue: int = Field(256, ge=0, description="sequences that may wait; beyond that the answer is 429")
    request_timeout: float = Field(600.0, gt=0, description="seconds after which a request is ended")
    drain_timeout: float = Field(30.0, ge=0, description="seconds that running requests get at shutdown")
    max_body_mb: float = Field(8.0, gt=0, description="largest request body, MiB")
    per_request_spec_decode_metrics: Literal["none", "summary", "detailed"] = Field(
        "none", description="report drafted and accepted tokens in every response under metrics.speculative_decoding"
    )
    enable_log_requests: bool = Field(False, description="log each request's id, size and outcome; never its text")
