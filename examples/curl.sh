#!/usr/bin/env bash
# The API by hand: a chat answer, a streamed completion, and the counters. Needs a running server.
set -euo pipefail
url="${TRIMTAB_URL:-http://127.0.0.1:8000}"

curl -sS --fail-with-body "$url/v1/chat/completions" -H "Content-Type: application/json" -d '{
  "messages": [{"role": "user", "content": "Why is the sky blue?"}],
  "temperature": 0, "max_tokens": 32
}'
echo
curl -sS --fail-with-body -N "$url/v1/completions" -H "Content-Type: application/json" -d '{
  "prompt": "Once upon a time", "max_tokens": 16, "temperature": 0, "stream": true
}'
curl -sS "$url/metrics" | grep "^vllm:spec_decode"
