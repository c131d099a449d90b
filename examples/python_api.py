"""Generate in this process, without a server."""

from trimtab import LLM, SamplingParams

llm = LLM("smollm2", speculative_config={"method": "ngram", "num_speculative_tokens": 4})
params = SamplingParams(temperature=0, max_tokens=32)

for result in llm.generate(["The capital of France is", "Water boils at"], params):
    print(result.text)

answer = llm.chat([{"role": "user", "content": "Say hello in French."}], params)[0]
print(answer.text)
metrics = answer.outputs[0].metrics
print(f"drafted {metrics.num_drafted}, verified {metrics.num_verified}, accepted {metrics.num_accepted}")
