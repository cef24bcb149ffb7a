"""`wager corpus`: what `--learn` keeps in a folder, and its removal."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from wager.errors import UsageError
from wager.inputs import expand_path, replacing, shown
from wager.terminal import console, flags

if TYPE_CHECKING:
    from wager.draft.corpus.files import LearnedText
    from wager.models.tokenizer import Tokenizer

_ACTIONS = ("list", "show", "export", "import", "forget")


@click.command("corpus", cls=flags.Verb)
@click.argument("action", type=click.Choice(_ACTIONS))
@click.argument("folder", type=flags.Parsed(expand_path))
@click.option("--tenant", metavar="NAME", help="Of the tenants whose names, as list has them, begin so.")
@click.option("--api-key-file", type=flags.InputPath(), help="Of the tenants whose API keys are in this file.")
@click.option("--user", metavar="VALUE", help="Of this value of serve's --tenant-by, with the keys of --api-key-file.")
@click.option("--all", "everyone", is_flag=True, help="Of all tenants: forget wants it said.")
@click.option("--limit", type=flags.Count(min=1), default=10, help="show: the latest texts of each tenant.")
@click.option("--file", "path", type=flags.InputPath(), help="import: recorded answers, as acceptance reads them.")
@click.option("--output", "output_path", type=flags.OutputPath(), metavar="PATH", help="export: JSON lines of texts.")
@click.option("-m", "--model", metavar="MODEL", help="Whose tokenizer it is: show gives texts; import needs it.")
@flags.ENGINE_FLAGS["chat_template"]
@flags.json_flag
def command(
    *,
    action: str,
    folder: Path,
    tenant: str | None,
    api_key_file: Path | None,
    user: str | None,
    everyone: bool,
    limit: int,
    path: Path | None,
    output_path: Path | None,
    model: str | None,
    chat_template: Path | None,
    json_path: Path | None,
) -> None:
    """List, show, export, import or forget what --learn keeps in FOLDER.

    list and show only read, also while a server learns there; import and forget want it stopped. What is forgotten
    is overwritten and removed. Each tenant has a folder whose name does not tell its API key. Of what export writes
    `wager train --kind store --answers PATH` makes a store. What was learned with a --chat-template is found with it.
    """
    _check_given(action, everyone=everyone)
    if model is None:
        flags.refuse(["chat_template"], "without --model", "Give the model.")
    tokenizer = _tokenizer(model, chat_template) if model else None
    chosen = _Choice(folder, tenant, _names_of(folder, api_key_file, user))
    if action == "import":
        _import(chosen, _needed(path, "--file"), _needed(tokenizer, "--model"), str(model))
    elif action == "forget":
        _forget(chosen, everyone=everyone)
    else:
        from wager.draft.corpus.learning import being_read

        _key_of(folder)
        with being_read(folder):
            if action == "export":
                _export(chosen, _needed(output_path, "--output"))
            elif action == "show":
                _show(chosen, limit, tokenizer, str(model), json_path)
            else:
                _list(chosen, json_path)


_USES = {
    "list": {"json_path"},
    "show": {"limit", "model", "chat_template", "json_path"},
    "export": {"output_path"},
    "import": {"path", "model", "chat_template"},
    "forget": {"everyone"},
}


def _check_given(action: str, *, everyone: bool) -> None:
    """UsageError for an option that the action does not use."""
    always = {"action", "folder", "tenant", "api_key_file", "user"}
    flags.refuse(flags.given().keys() - always - _USES[action], f"with wager corpus {action}")
    if everyone and flags.given().keys() & {"tenant", "api_key_file", "user"}:
        raise UsageError("--all names all tenants, and another option some.", "Give one of them.")


def _needed(value: Any, option: str) -> Any:
    if value is None:
        raise UsageError(f"{option} is missing.", "See wager corpus --help.")
    return value


@dataclass(frozen=True, slots=True)
class _Choice:
    """Some tenants of a folder: those whose names begin so, and are among `names` (None: all)."""

    folder: Path
    begin: str | None
    names: tuple[str, ...] | None

    def tenants(self) -> list[Path]:
        """Their folders. UsageError if there is none where some were named."""
        from wager.draft.corpus.learning import TENANT_FOLDERS

        _key_of(self.folder)
        found = []
        for path in sorted(self.folder.glob(TENANT_FOLDERS)):  # and no other folders
            if path.name.startswith(self.begin or "") and (self.names is None or path.name in self.names):
                found.append(path)
        if not found and (self.begin is not None or self.names is not None):
            raise UsageError(f"{self.folder} has nothing of that tenant.", "wager corpus list names all of them.")
        return found


def _key_of(folder: Path) -> bytes:
    """The key of the names below a folder. UsageError if nothing was learned there."""
    try:
        return (folder / "key").read_bytes()
    except OSError:
        hint = "Give the one that was learned in."
        raise UsageError(f"{shown(str(folder))} is no folder of --learn.", hint) from None


def _names_of(folder: Path, api_key_file: Path | None, user: str | None) -> tuple[str, ...] | None:
    """The names of the tenants of API keys, or of a user of them; None if neither is given."""
    if api_key_file is None and user is None:
        return None
    from wager.draft.corpus.learning import tenant_folder_name
    from wager.serve.limits import read_api_keys
    from wager.tenants import tenant_of_key, tenant_of_user

    secret = _key_of(folder)
    keys = [tenant_of_key(key) for key in read_api_keys(api_key_file)] if api_key_file else [""]
    return tuple(tenant_folder_name(tenant_of_user(key, user or ""), secret) for key in keys)


def _texts(tenant: Path) -> Iterator[LearnedText]:
    """The texts of a tenant, the oldest first; files that cannot be read are named and left out."""
    from wager.draft.corpus.files import CorpusFile, CorpusFileError, Segment, corpus_files, read_log

    read: list[CorpusFile] = []
    for file in corpus_files(tenant):
        if any(each.supersedes(file) for each in read):
            continue
        try:
            if file.is_log:
                yield from read_log(file.path)[0]
            else:
                segment = Segment(file)
                segment.verify()
                texts = [text._replace(tokens=text.tokens.copy()) for text in segment]
                segment.verify()  # again: a server overwrites what leaves
                yield from texts
        except CorpusFileError as error:
            console.warn(str(error))
        except FileNotFoundError:
            console.warn(f"A server has merged or removed {file.path} meanwhile: texts of it are left out.")
        else:
            read.append(file)


def _list(chosen: _Choice, json_path: Path | None) -> None:
    rows: list[dict[str, Any]] = []
    for tenant in chosen.tenants():
        texts = list(_texts(tenant))
        times = [text.written for text in texts]
        rows.append(
            {
                "tokenizer": tenant.parent.name,
                "tenant": tenant.name,
                "texts": len(texts),
                "tokens": sum(len(text.tokens) for text in texts),
                "bytes": sum(map(_bytes_of, tenant.iterdir())),
                "oldest": _time(min(times)) if times else None,
                "newest": _time(max(times)) if times else None,
            }
        )
    console.write_json({"tenants": rows}, json_path)
    if json_path != console.STDOUT:
        columns = ["tokenizer", "tenant", "texts", "tokens", "bytes", "oldest", "newest"]
        cells = [["" if row[name] is None else str(row[name]) for name in columns] for row in rows]
        console.table("", columns, cells, to_stdout=True, texts=(0, 1, 5, 6))


def _bytes_of(path: Path) -> int:
    with suppress(FileNotFoundError):  # a server has merged or removed it meanwhile
        return path.stat().st_size
    return 0


def _show(chosen: _Choice, limit: int, tokenizer: Tokenizer | None, model: str, json_path: Path | None) -> None:
    found = []
    for tenant in chosen.tenants():
        if tokenizer is not None and tenant.parent.name != _fingerprint(tokenizer)[:16]:
            console.warn(f"{tenant.parent.name} is not the tokenizer of {model}: {tenant.name} is left out.")
            continue
        for text in list(_texts(tenant))[-limit:]:
            ids = text.tokens.tolist()
            said = tokenizer.decode(ids) if tokenizer else None
            found.append({"tenant": tenant.name, "written": _time(text.written), "token_ids": ids, "text": said})
    console.write_json({"texts": found}, json_path)
    for each in found if json_path != console.STDOUT else ():
        said = console.legible(each["text"] or str(each["token_ids"]))
        click.echo(f"{each['tenant']} {each['written']}: {said}")


def _export(chosen: _Choice, path: Path) -> None:
    count = 0
    with replacing(path, mode=0o600) as file:
        for tenant in chosen.tenants():
            for text in _texts(tenant):
                first, *rest = text.tokens.tolist()
                row = {"category": tenant.name, "written": _time(text.written), "prompt": [first], "answer": rest}
                file.write(json.dumps(row).encode() + b"\n")
                count += 1
    console.say(f"{count} texts are in {path}.")


def _import(chosen: _Choice, path: Path, tokenizer: Tokenizer, model: str) -> None:
    """The recorded answers of a file as learned now."""
    from wager.draft.corpus.learning import LearnedTexts
    from wager.prompts import encode_answer, read_prompts

    prompts = [prompt for prompt in read_prompts(path) if prompt.answer]
    if not prompts:
        raise UsageError(f"No request of {path} has an answer.", 'A row has an "answer" (docs/acceptance.md).')
    names = chosen.names or ()
    if chosen.begin is not None:
        names = tuple(dict.fromkeys(each.name for each in chosen.tenants()))
    if len(names) > 1:
        raise UsageError("Texts can be learned for one tenant at a time.", "Give one key, or more of the name.")

    def texts() -> Iterator[tuple[Sequence[int], Sequence[int]]]:
        for prompt in prompts:
            answer = encode_answer(tokenizer, prompt.answer)
            asked = flags.Framing().encode(tokenizer, prompt.content)
            if max(*asked, *answer) >= tokenizer.vocab_size:
                raise UsageError(
                    f"Request {prompt.id} has token ids that {model} lacks.", "Give the model of the file."
                )
            yield asked, answer

    learned = LearnedTexts(chosen.folder, _fingerprint(tokenizer))
    try:
        count = learned.learn_all(texts(), folder=next(iter(names), ""))
    finally:
        learned.close()
    known = f"; {len(prompts) - count} were known" if count < len(prompts) else ""
    console.say(f"{count} answers were learned{known}.")


def _forget(chosen: _Choice, *, everyone: bool) -> None:
    from wager.draft.corpus.learning import forget_tenants

    if not everyone and chosen.begin is None and chosen.names is None:
        raise UsageError("Whose texts are to be forgotten is not said.", "Give --tenant, --api-key-file or --all.")
    tenants = chosen.tenants()
    forget_tenants(chosen.folder, tenants)
    console.say(f"It is forgotten, of {len(tenants)} tenant{'s' * (len(tenants) != 1)}.")


def _tokenizer(model: str, chat_template: Path | None) -> Tokenizer:
    from wager.models.opening import open_model

    return open_model(model, chat_template=chat_template)[2]


def _fingerprint(tokenizer: Tokenizer) -> str:
    from wager.models.opening import tokenizer_fingerprint

    return tokenizer_fingerprint(tokenizer)


def _time(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
