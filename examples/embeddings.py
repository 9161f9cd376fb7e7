"""Which of these texts is nearest to a question? `python examples/embeddings.py [GROUP]`.

A model that was trained for it gives better vectors than a chat model does.
"""

import sys

from procengine import Client

GROUP = sys.argv[1] if len(sys.argv) > 1 else None
TEXTS = ["A cat sleeps on the sofa.", "The stock market fell today.", "Dogs like to run in the park."]
QUESTION = "Where does the cat sleep?"

if __name__ == "__main__":
    with Client(GROUP) as client:
        *vectors, wanted = (output.embedding for output in client.embed([*TEXTS, QUESTION]))
    # They have length 1, so the cosine is the sum of products.
    cosines = [sum(a * b for a, b in zip(vector, wanted, strict=True)) for vector in vectors]
    for cosine, text in sorted(zip(cosines, TEXTS, strict=True), reverse=True):
        print(f"{cosine:6.3f}  {text}")
