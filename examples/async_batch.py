"""Many requests at once from one event loop; the group batches them. `python examples/async_batch.py [GROUP]`."""

import asyncio
import sys

from procengine import AsyncClient, OverloadedError, RequestOutput, SamplingParams

GROUP = sys.argv[1] if len(sys.argv) > 1 else None
PROMPTS = [f"A fact about the number {number}:" for number in range(32)]


async def ask(client: AsyncClient, prompt: str) -> RequestOutput:
    """One answer; a group that is full says when to come again."""
    while True:
        try:
            return await client.generate(prompt, SamplingParams(temperature=0, max_tokens=24))
        except OverloadedError as error:
            await asyncio.sleep(error.retry_after_s or 1.0)


async def main() -> None:
    """Ask all, print in the order of the prompts."""
    async with AsyncClient(GROUP) as client:
        for output in await asyncio.gather(*(ask(client, prompt) for prompt in PROMPTS)):
            print(f"{output.prompt} {output.outputs[0].text.strip()!r}")


if __name__ == "__main__":
    asyncio.run(main())
