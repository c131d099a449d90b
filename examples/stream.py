"""Print an answer while it is written, then how its drafts fared. Needs a running server and the openai package."""

import os

from openai import OpenAI

client = OpenAI(base_url=os.environ.get("TRIMTAB_URL", "http://127.0.0.1:8000") + "/v1", api_key="none")
stream = client.chat.completions.create(
    model=client.models.list().data[0].id,
    messages=[{"role": "user", "content": "Count from one to ten in words."}],
    temperature=0,
    max_tokens=48,
    stream=True,
    stream_options={"include_usage": True},
    extra_body={"include_metrics": True},
)
for chunk in stream:
    for choice in chunk.choices:
        print(choice.delta.content or "", end="", flush=True)
    if chunk.usage:
        record = chunk.model_extra["metrics"]["speculative_decoding"]
        print(f"\n{chunk.usage.completion_tokens} tokens, acceptance length {record['mean_acceptance_length']}")
