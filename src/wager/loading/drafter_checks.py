"""Whether a drafter's tokenizer and chat template are the target's, the first difference, and what follows from it.

Another vocabulary is refused, unless the drafter translates; another chat template is warned of: the drafter reads
prompts as the target's template writes them, guesses worse, and changes no text.
"""

from __future__ import annotations

import logging
from itertools import zip_longest
from pathlib import Path
from typing import Any

from wager.draft.vocabulary import check_same_vocabulary, vocabulary_difference
from wager.errors import TokenizerError, WagerError
from wager.models.tokenizer import Tokenizer

log = logging.getLogger("wager")

_CONVERSATIONS: tuple[list[dict[str, Any]], ...] = (
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello."},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "Bye."},
    ],
    [
        {"role": "user", "content": "Hello."},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "Bye."},
    ],
)
"""What templates are compared on; the second is for those that take no system message."""

_EXCERPT = 60
"""Characters of a line that are shown."""


def check_draft_tokenizer(path: Path, draft: Tokenizer, target: Tokenizer) -> None:
    """TokenizerError if some id of a draft model is another token than in the target; a warning if its chat template
    writes conversations otherwise. Both name the first difference."""
    check_same_vocabulary(target, draft, where=f" ({path})")
    _warn_of_template(f"draft model {path}", draft, target)


def translation(path: Path, draft: Tokenizer, target: Tokenizer) -> str:
    """What is to be said of a draft model whose guesses are translated; a warning if they need not be."""
    if found := vocabulary_difference(target, draft):
        return f"the draft model {path} has another vocabulary, so its guesses are translated: {found}."
    log.warning(
        "The draft model %s has the target's vocabulary: --drafter model:PATH drafts without translating.", path
    )
    return ""


def check_head_tokenizer(path: Path, target: Tokenizer) -> None:
    """As `check_draft_tokenizer`, of a head that has a tokenizer in its directory."""
    try:
        own = Tokenizer.load(path)
    except TokenizerError as error:
        log.warning("The tokenizer beside the head in %s is not compared with the target's: %s", path, error.message)
        return
    if found := vocabulary_difference(target, own):
        raise TokenizerError(
            f"The head in {path} has another tokenizer than the target: {found}.",
            "Give a head of this target, or train one: wager train.",
        )
    _warn_of_template(f"head in {path}", own, target)


def tokenizer_difference(path: Path, target: Tokenizer) -> str:
    """The first difference between the tokenizer in a directory and the target's, or else of their chat templates; ""
    if neither differs, or it cannot be read."""
    try:
        own = Tokenizer.load(path)
    except TokenizerError:
        return ""
    return vocabulary_difference(target, own) or template_difference(target, own)


def _warn_of_template(what: str, own: Tokenizer, target: Tokenizer) -> None:
    if found := template_difference(target, own):
        log.warning(
            "The %s differs in its chat template: %s. It reads the target's prompts, so its guesses may be wrong more "
            "often; answers stay the same.",
            what,
            found,
        )


def template_difference(target: Tokenizer, other: Tokenizer) -> str:
    """The first line in which two chat templates write a conversation differently, from both; "" if they write it
    alike, or the target has none."""
    mine, its = target.chat_template, other.chat_template
    if mine is None or mine == its:
        return ""
    if its is None:
        return "it has none"
    for conversation in _CONVERSATIONS:
        try:
            written, wanted = other.chat(conversation), target.chat(conversation)
        except WagerError:
            continue
        return _first_line(written, wanted, "of a conversation")
    return _first_line(its, mine, "of the template")


def _first_line(written: str, wanted: str, what: str) -> str:
    lines = zip_longest(written.split("\n"), wanted.split("\n"))
    for number, (one, other) in enumerate(lines, 1):
        if one != other:
            return f"line {number} {what} is {_excerpt(one, other)}, but {_excerpt(other, one)} in the target's"
    return ""


def _excerpt(line: str | None, other: str | None) -> str:
    """A line around the first character in which it differs from another one."""
    if line is None:
        return "absent"
    same = next((i for i, (a, b) in enumerate(zip(line, other or "", strict=False)) if a != b), 0)
    first = max(0, same - _EXCERPT // 2) if len(line) > _EXCERPT else 0
    return ("..." if first else "") + repr(line[first : first + _EXCERPT])
