"""The completion script for bash. Owns: its text. Never does: know a command (`completion_tree` tells it).

It needs nothing of the package bash-completion, and starts `procengine` for names of models and groups only.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from procengine.cli.completion_tree import Node, Values, nodes_of

__all__ = ["bash_script"]

# In `_procengine_at PATH PLACE`, PLACE is "commands", "flags", a flag, or the number of a positional. REPLY becomes
# "=words", "@source", "?" (anything) or "" (there is no such place: the flag takes no value).
_SCRIPT = r"""# bash completion of procengine. Load it with: source <(procengine completion bash)
_procengine_at() {
  REPLY=""
  case "$1:$2" in
%(cases)s
  esac
}

_procengine_fill() {
  if [[ $1 == =* ]]; then COMPREPLY=($(compgen -W "${1#=}" -- "$2")); return; fi
  local IFS=$'\n' # file names may have spaces
  case $1 in
    @folders) COMPREPLY=($(compgen -d -- "$2")); compopt -o filenames 2>/dev/null ;;
    @files) COMPREPLY=($(compgen -f -- "$2")); compopt -o filenames 2>/dev/null ;;
    @models)
      COMPREPLY=($(compgen -W "$(procengine completion --list models 2>/dev/null)" -- "$2") $(compgen -f -- "$2"))
      [[ $2 == */* || $2 == .* ]] && compopt -o filenames 2>/dev/null ;;
    @groups) COMPREPLY=($(compgen -W "$(procengine completion --list groups 2>/dev/null)" -- "$2")) ;;
  esac
}

_procengine() {
  local IFS=$' \t\n' REPLY="" cur="${COMP_WORDS[COMP_CWORD]}" path="" flag="" word i number=0
  COMPREPLY=()
  for ((i = 1; i < COMP_CWORD; i++)); do
    word=${COMP_WORDS[i]}
    if [[ $word == "=" ]]; then continue; fi # bash splits --flag=value into three words
    if [[ -n $flag ]]; then flag=""; continue; fi
    if [[ $word == -* ]]; then
      _procengine_at "$path" "$word"
      [[ -n $REPLY ]] && flag=$word
      continue
    fi
    _procengine_at "$path" commands
    if [[ " ${REPLY#=} " == *" $word "* ]]; then path="${path:+$path }$word"; else ((number++)); fi
  done
  [[ $cur == "=" ]] && cur=""
  if [[ -n $flag ]]; then
    _procengine_at "$path" "$flag"
  elif [[ $cur == -* ]]; then
    _procengine_at "$path" flags
  else
    REPLY=""
    ((number)) || _procengine_at "$path" commands
    [[ -n $REPLY ]] || _procengine_at "$path" "$number"
  fi
  _procengine_fill "$REPLY" "$cur"
}
complete -F _procengine procengine
"""


def bash_script(root: Node) -> str:
    """The script that completes this tree."""
    return _SCRIPT % {"cases": "\n".join(_cases(root))}


def _cases(root: Node) -> Iterator[str]:
    for node in nodes_of(root):
        path = " ".join(node.path)
        names = [name for flag in node.flags for name in flag.names]
        yield _case([f"{path}:flags"], "=" + " ".join(names))
        if node.children:
            yield _case([f"{path}:commands"], "=" + " ".join(child.path[-1] for child in node.children))
        places_by_reply: dict[str, list[str]] = {}
        for number, values in enumerate(node.positionals):
            places_by_reply.setdefault(_reply(values), []).append(f"{path}:{number}")
        for flag in node.flags:
            if flag.values is not None:
                places_by_reply.setdefault(_reply(flag.values), []).extend(f"{path}:{name}" for name in flag.names)
        for reply, places in places_by_reply.items():
            yield _case(places, reply)


def _case(places: list[str], reply: str) -> str:
    return f"    {' | '.join(map(shlex.quote, places))}) REPLY={shlex.quote(reply)} ;;"


def _reply(values: Values) -> str:
    if values.words:
        return "=" + " ".join(values.words)
    return f"@{values.source}" if values.source else "?"
