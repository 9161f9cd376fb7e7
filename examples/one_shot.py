"""Prompts in a script: a process group of its own, gone at the end. `python examples/one_shot.py [MODEL]`."""

import sys

from procengine import LLM, SamplingParams

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"  # procengine pull smollm2-135m
PROMPTS = ["The capital of France is", "Water boils at", "2 + 2 ="]

if __name__ == "__main__":
    with LLM(MODEL, max_num_seqs=16) as llm:
        for output in llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=16)):
            print(f"{output.prompt!r} -> {output.outputs[0].text!r} ({output.outputs[0].finish_reason})")
