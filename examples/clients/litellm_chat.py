"""litellm: a whole answer, and a streamed one.

OPENAI_BASE_URL and MODEL say where.
"""

import json
import os

import litellm

place = {"api_base": os.environ["OPENAI_BASE_URL"], "api_key": "none"}
model = f"openai/{os.environ['MODEL']}"
question = [{"role": "user", "content": "What is the capital of France?"}]
fields = {"model": model, "messages": question, "temperature": 0, "max_tokens": 30, **place}

whole = litellm.completion(**fields)
pieces = [piece.choices[0].delta.content or "" for piece in litellm.completion(**fields, stream=True)]
print(json.dumps({"text": whole.choices[0].message.content, "streamed": "".join(pieces)}))
