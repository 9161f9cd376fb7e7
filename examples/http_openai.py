"""OpenAI's own client, unmodified. `python examples/http_openai.py [URL]`.

procengine serve smollm2-135m --port 8000 &
pip install openai
"""

import sys

from openai import OpenAI

URL = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8000"

if __name__ == "__main__":
    client = OpenAI(base_url=f"{URL}/v1", api_key="none")  # what --api-key says, if it says something
    model = client.models.list().data[0].id
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Say hello in three languages."}],
        max_tokens=60,
        stream=True,
        extra_body={"top_k": 40, "repetition_penalty": 1.1},  # what OpenAI's API does not have
    )
    for event in stream:
        print(event.choices[0].delta.content or "", end="", flush=True)
    print()
    vector = client.embeddings.create(model=model, input="hello").data[0].embedding
    print(f"{model}: a vector of {len(vector)} numbers")
