"""Ask a running server (`scripts/serve`) through the official client: pip install openai."""

import os

from openai import OpenAI

client = OpenAI(base_url=os.environ.get("TRIMTAB_URL", "http://127.0.0.1:8000") + "/v1", api_key="none")
model = client.models.list().data[0].id

reply = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "Name three rivers in Europe."}],
    temperature=0,
    max_tokens=48,
)
print(reply.choices[0].message.content)
print(f"{reply.usage.prompt_tokens} tokens in, {reply.usage.completion_tokens} out")
