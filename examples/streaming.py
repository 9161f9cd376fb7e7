"""A text as it comes, from a running group. `python examples/streaming.py [GROUP]`.

procengine serve smollm2-135m &
"""

import sys

from procengine import Client, SamplingParams

GROUP = sys.argv[1] if len(sys.argv) > 1 else None  # the only running one

if __name__ == "__main__":
    params = SamplingParams(temperature=0.8, max_tokens=60, stop=("\n\n",), seed=1)
    with Client(GROUP) as client:
        for delta in client.stream("Once upon a time", params):
            print(delta.text, end="", flush=True)
            if delta.finish_reason is not None:
                print(f"\n[{delta.finish_reason}]")
