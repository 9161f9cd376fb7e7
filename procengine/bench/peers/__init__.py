"""Other engines beside this one, on the same prompts, by turns: `scripts/bench peers` (docs/PERFORMANCE.md, *Peers*).

Each engine is a process that stays (`process`) and answers JSON lines (`answers`); `session` lets them run one after
the other; `loads` says what they run, `comparison` and `targets` what came of it. Which peers there are, and how each
is driven, lies in `scripts/peers/`: those files run in the peers' own environments.
"""
