"""An answer that satisfies a JSON schema, whatever the model. `python examples/json_schema.py [GROUP]`."""

import json
import sys

from procengine import Client, SamplingParams, StructuredOutputs

GROUP = sys.argv[1] if len(sys.argv) > 1 else None
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "population": {"type": "integer", "minimum": 0, "maximum": 100_000_000},
        "continent": {"enum": ["Africa", "America", "Asia", "Europe", "Oceania"]},
    },
    "required": ["city", "population", "continent"],
    "additionalProperties": False,
}

if __name__ == "__main__":
    form = StructuredOutputs(json_schema=SCHEMA, disable_any_whitespace=True)
    params = SamplingParams(temperature=0, max_tokens=200, structured_outputs=form)
    with Client(GROUP) as client:
        answer = client.generate("Paris as JSON: ", params).outputs[0]
        print(json.dumps(json.loads(answer.text), indent=2))
