"""Receipts: which model, prompt, parameters and seed an answer came from, so that anybody with the model can check it.

A receipt is a claim: *this* model gives *this* answer to *this* prompt. It is checked by computing the answer again,
which takes one pass over prompt and answer instead of one for each token: the answer is the draft, and every row of it
is verified as guesses always are, with the noise of its own position. What is signed are the digests of a receipt's
parts, so that a part that was changed is named. docs/receipts.md has the format.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, NamedTuple

from wager.config import EngineConfig
from wager.draft.base import Drafter
from wager.errors import MALFORMED, MemoryPlanError, RequestError, SetupError, UsageError
from wager.inputs import expand_path, read_text, shown, strict_json, whole_number
from wager.loading.load import LoadedEngine, LoadedTarget, load
from wager.models.digests import ModelDigests, canonical
from wager.types import (
    NO_TENANT,
    Completion,
    Draft,
    DraftRequest,
    FinishReason,
    Grammar,
    KVDtype,
    Request,
    SamplingParams,
    Stats,
    VerifyRule,
    as_token_ids,
)

FORMAT = 2
"""Of the receipts that are written; others are refused. 1 had digests that changed with wager's own classes."""

_NEUTRAL: Mapping[str, Any] = {
    **dict.fromkeys(("top_k", "min_p", "presence_penalty", "frequency_penalty", "min_tokens"), 0),
    **dict.fromkeys(("top_p", "repetition_penalty"), 1),
    "logit_bias": {},
    "stop": [],
    "stop_token_ids": [],
    "ignore_eos": False,
    "grammar": None,
}
"""Parameters that are a part of `sampling` where they are not these, which change no token: a receipt stays what it is
when there are further ones. `max_tokens` and `temperature` are a part always, the seed stands alone."""

_MOST_NAMED = 3
"""Weights that differ and are named."""

# ---- keys ------------------------------------------------------------------------------------------------------------


class Signature(NamedTuple):
    """An Ed25519 signature with the key that checks it, both in hex."""

    public_key: str
    value: str


class SigningKey:
    """An Ed25519 key that signs receipts."""

    def __init__(self, key: Any) -> None:
        self._key = key
        self.public_key: str = key.public_key().public_bytes_raw().hex()

    @classmethod
    def read(cls, path: Path) -> SigningKey:
        """From a PEM file without a password. UsageError if it holds no Ed25519 key, or `cryptography` is missing."""
        hint = "Make one (openssl genpkey -algorithm ed25519 -out key.pem)."
        return cls(_read_key(path, "private", hint))

    def sign(self, data: bytes) -> Signature:
        return Signature(self.public_key, self._key.sign(data).hex())


def read_public_key(path: Path) -> str:
    """The Ed25519 public key in a PEM file, in hex. UsageError as SigningKey.read."""
    hint = "The signer makes it (openssl pkey -in key.pem -pubout -out key.pub.pem)."
    return str(_read_key(path, "public", hint).public_bytes_raw().hex())


def _read_key(path: Path, kind: Literal["private", "public"], hint: str) -> Any:
    data = read_text(path, f"{kind} key", hint).encode()
    ed25519, serialization = _cryptography()
    wanted = ed25519.Ed25519PrivateKey if kind == "private" else ed25519.Ed25519PublicKey
    try:
        if kind == "private":
            key = serialization.load_pem_private_key(data, password=None)
        else:
            key = serialization.load_pem_public_key(data)
    except Exception:  # of the library's own kinds too
        raise UsageError(f"{path} holds no {kind} key that can be read.", hint) from None
    if not isinstance(key, wanted):
        raise UsageError(f"The key in {path} is not of Ed25519.", hint)
    return key


def _cryptography() -> tuple[Any, Any]:
    """Its modules of Ed25519 keys and of their files."""
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        hint = "Install it: pip install 'wager[receipts]'."
        raise UsageError("Signatures need the package cryptography, which is not installed.", hint) from None
    return ed25519, serialization


def _is_signed(data: bytes, signature: Signature) -> bool:
    ed25519, _ = _cryptography()
    from cryptography.exceptions import InvalidSignature

    try:
        key = ed25519.Ed25519PublicKey.from_public_bytes(bytes.fromhex(signature.public_key))
        key.verify(bytes.fromhex(signature.value), data)
    except (InvalidSignature, ValueError):
        return False
    return True


# ---- receipts --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Receipt:
    """What one choice of one request was made of, and its answer.

    `digests`, `dtype`, `kv_dtype` and `max_context` say what the model was and how it was loaded, `arithmetic` what
    its kernels compute (Kernels.arithmetic). `params` is without what changes no token; its seed is None where the
    answer is greedy, which needs none. `choice` is the number of the choice among the n of its request. `model` and
    `made_by` are for readers alone. `parts` are the digests of the parts as they were when it was made, by their names
    in JSON.
    """

    model: str
    digests: ModelDigests
    dtype: str
    kv_dtype: KVDtype
    max_context: int
    arithmetic: str
    prompt: tuple[int, ...]
    params: SamplingParams
    choice: int
    output: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    made_by: Mapping[str, str]
    parts: Mapping[str, str] = field(default_factory=dict)
    signature: Signature | None = None

    @classmethod
    def of(
        cls,
        engine: LoadedEngine,
        request: Request,
        completion: Completion,
        *,
        key: SigningKey | None = None,
        model: str = "",
    ) -> Receipt:
        """The receipt of a completed choice of a request that the engine served; `model` is what it is called there, ""
        for the name by which it was loaded (of a path its last part). UsageError as `check_rule`; RequestError for an
        answer that failed, was aborted or was given with the request."""
        check_rule(engine.runner.rule)
        if completion.finish_reason not in ("stop", "length"):
            raise RequestError(
                f"An answer that ended with {completion.finish_reason!r} has no receipt.", "Ask for it again."
            )
        target, params = engine.target, request.params
        grammar = params.grammar and replace(params.grammar, compiled=None)
        if grammar and grammar.kind == "tokens":
            raise RequestError("An answer whose tokens were given has no receipt.", "Every model would give it.")
        seed = None if params.greedy else completion.stats.seed
        made_by = {
            "kernels": engine.kernels.name,
            **_versions("wager", "tokenizers", *(["llguidance"] if grammar else [])),
        }
        receipt = cls(
            model=model or _name_of(target),
            digests=target.digests,
            dtype=target.config.model.dtype,
            kv_dtype=target.config.model.kv_dtype,
            max_context=target.opened.limits.context,
            arithmetic=engine.kernels.arithmetic,
            prompt=request.prompt,
            params=replace(params, seed=seed, logprobs=None, n=1, prediction=(), grammar=grammar),
            choice=completion.index,
            output=completion.token_ids,
            text=completion.text,
            finish_reason=completion.finish_reason,
            made_by=made_by,
        )
        return receipt.sealed(key)

    def sealed(self, key: SigningKey | None = None) -> Receipt:
        """With the digests of its parts as they are, signed with a key if there is one."""
        parts = self._digests_of_parts()
        return replace(self, parts=parts, signature=key.sign(canonical(parts)) if key else None)

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        signature = None if self.signature is None else {"algorithm": "ed25519", **self.signature._asdict()}
        return {**self._content(), "parts": dict(self.parts), "signature": signature}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Receipt:
        """From JSON. UsageError that says what is wrong with it."""
        try:
            _check_format(values["wager_receipt"])
            receipt = _from_dict(values)
            EngineConfig.from_options(**receipt.setup)  # refuses what no engine is set up with
            own = receipt.as_dict()
            # What no digest covers must not be there: who reads the file would take it for what was signed.
            others = [name for name in values if name not in own or canonical(values[name]) != canonical(own[name])]
            if others:
                raise ValueError(f"its part {shown(others[0])} is not as this wager writes it")
        except FormatError:
            raise
        except UsageError as error:
            raise UsageError(f"This is no receipt: {error.message}", error.hint) from None
        except MALFORMED as error:
            cause = f"{error} is missing or wrong" if isinstance(error, LookupError) else str(error)
            if isinstance(error, AttributeError):  # of what should be an object
                cause = "a part of it is of another type"
            raise UsageError(f"This is no receipt: {cause}.", "Give the file that --receipt wrote.") from None
        return receipt

    @classmethod
    def read(cls, path: Path | str) -> Receipt:
        """The one receipt in a file; UsageError if there is another number of them, or none can be read."""
        found = read_receipts(Path(path))
        if len(found) != 1:
            raise UsageError(f"{path} has {len(found)} receipts, not one.", "Use wager verify.")
        return found[0]

    def verify(self, model: str, *, signed_by: str | None = None, **options: Any) -> Verification:
        """Load a model and check the receipt with it; `options` as of LLM, for threads and memory. See Verifier."""
        [found] = verifications([self], EngineConfig.from_options(model=model, **options), signed_by=signed_by)
        return found

    @property
    def setup(self) -> dict[str, Any]:
        """Options of an engine that computes as the one that made it."""
        return {"dtype": self.dtype, "kv_dtype": self.kv_dtype, "max_context": self.max_context}

    def problems_of_parts(self, signed_by: str | None = None) -> Iterator[str]:
        """What shows that it was changed after it was made, in sentences. `signed_by`: the public key, in hex, that
        must have signed it. UsageError where that cannot be checked."""
        found = self._digests_of_parts()
        for name in [name for name in {**found, **self.parts} if self.parts.get(name) != found.get(name)]:
            yield f"Its part {shown(name)} was changed after it was made."
        if signed_by is not None and self.signature is None:
            yield "It is not signed."
        elif signed_by is not None and self.signature is not None and self.signature.public_key != signed_by:
            yield f"It is signed with another key, {shown(self.signature.public_key, length=64)}."
        if self.signature is not None and not _is_signed(canonical(dict(self.parts)), self.signature):
            yield "Its signature is not of these parts: they were changed, or it was."

    def _content(self) -> dict[str, Any]:
        params, digests = self.params, self.digests
        return {
            "wager_receipt": FORMAT,
            "model": {
                "name": self.model,
                **self.setup,
                "config": digests.config,
                "tokenizer": digests.tokenizer,
                "chat_template": digests.chat_template,
            },
            "weights": dict(digests.weights),
            "arithmetic": self.arithmetic,
            "prompt_ids": list(self.prompt),
            "sampling": _sampling(params),
            "seed": None if params.seed is None else str(params.seed),  # which programs with floats alone would round
            "choice": self.choice,
            "output_ids": list(self.output),
            "text": self.text,
            "finish_reason": self.finish_reason,
            "made_by": dict(self.made_by),
        }

    def _digests_of_parts(self) -> dict[str, str]:
        return {name: hashlib.sha256(canonical(value)).hexdigest() for name, value in self._content().items()}


def _name_of(target: LoadedTarget) -> str:
    """What `--model` takes on any machine; nothing of this one's folders."""
    name = target.config.model.model
    return Path(os.path.abspath(target.opened.path)).name if expand_path(name).exists() else name


def _sampling(params: SamplingParams) -> dict[str, Any]:
    """What changes the tokens, but for the seed."""
    found = {name: getattr(params, name) for name in _NEUTRAL}
    if grammar := params.grammar:
        spaced = {"any_whitespace": True} if grammar.any_whitespace else {}
        found["grammar"] = {"kind": grammar.kind, "text": grammar.text, **spaced}
    found["logit_bias"] = {str(token): bias for token, bias in params.logit_bias.items()}
    found |= {"stop": list(params.stop), "stop_token_ids": list(params.stop_token_ids)}
    changing = {name: value for name, value in found.items() if value != _NEUTRAL[name]}
    return {"max_tokens": params.max_tokens, "temperature": params.temperature, **changing}


def request_digest(request: Request) -> str:
    """SHA-256, in hex, of what determines the answer of a request beside the model."""
    params = request.params
    asked = {"prompt_ids": list(request.prompt), "sampling": _sampling(params), "seed": params.seed}
    return hashlib.sha256(canonical(asked)).hexdigest()


def _versions(*packages: str) -> dict[str, str]:
    """Of the packages that are installed."""
    found = {}
    for package in packages:
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


class FormatError(UsageError):
    """A receipt of another format."""


def _check_format(given: Any) -> None:
    """FormatError unless receipts of that format are read here."""
    if given != FORMAT:
        raise FormatError(
            f"The receipt is of format {shown(str(given))[1:-1]}, and this wager reads {FORMAT}, whose digests are of "
            "other things.",
            "Check it with the version of wager that its made_by names, or have it made again.",
        )


def _from_dict(values: Mapping[str, Any]) -> Receipt:
    """What MALFORMED lists, or UsageError, if a value is not as `Receipt.as_dict` writes it."""
    model, sampling, signature = dict(values["model"]), dict(values["sampling"]), values["signature"]
    if unknown := sampling.keys() - {"max_tokens", "temperature", *_NEUTRAL}:
        raise ValueError(f"sampling has {shown(min(unknown))}, which this wager does not know")
    if grammar := sampling.get("grammar"):
        if grammar["kind"] == "tokens":
            raise ValueError("its grammar holds the whole answer, so that every model gives it")
        spaced = bool(grammar.get("any_whitespace"))
        sampling["grammar"] = Grammar(grammar["kind"], _text(grammar["text"]), any_whitespace=spaced)
    sampling["logit_bias"] = {int(token): bias for token, bias in sampling.get("logit_bias", {}).items()}
    least = {name: sampling.pop(name) for name in ("max_tokens", "temperature")}
    seed = values["seed"] if values["seed"] is None else whole_number(_text(values["seed"]))
    params = SamplingParams(**least, **sampling, seed=seed)
    if params.greedy != (params.seed is None):
        raise ValueError("a sampled answer has a seed, and a greedy one has none")
    if values["finish_reason"] not in ("stop", "length"):
        raise ValueError(f"no answer with a receipt ends with {shown(str(values['finish_reason']))}")
    choice, context = values["choice"], model["max_context"]
    if type(choice) is not int or type(context) is not int or not 0 <= choice < 1 << 31:
        raise ValueError("choice and max_context are whole numbers")
    return Receipt(
        model=_text(model["name"]),
        digests=ModelDigests(
            _texts(values["weights"]), *(_text(model[name]) for name in ("config", "tokenizer", "chat_template"))
        ),
        dtype=_text(model["dtype"]),
        kv_dtype=model["kv_dtype"],
        max_context=context,
        arithmetic=_text(values["arithmetic"]),
        prompt=_ids(values["prompt_ids"]),
        params=params,
        choice=choice,
        output=_ids(values["output_ids"]),
        text=_text(values["text"]),
        finish_reason=values["finish_reason"],
        made_by=_texts(values["made_by"]),
        parts=_texts(values["parts"]),
        signature=None if signature is None else Signature(_hex(signature["public_key"]), _hex(signature["value"])),
    )


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{shown(str(value))} is no text")
    return value


def _hex(value: Any) -> str:
    text = _text(value)
    if not re.fullmatch("[0-9a-f]+", text):
        raise ValueError(f"{shown(text)} is not in hex")
    return text


def _ids(value: Any) -> tuple[int, ...]:
    ids = as_token_ids(value)
    if not ids or not 0 <= min(ids) <= max(ids) < 1 << 31:
        raise ValueError("token ids are missing or out of range")
    return ids


def _texts(value: Any) -> dict[str, str]:
    return {_text(name): _text(each) for name, each in value.items()}


def read_receipts(path: Path) -> list[Receipt]:
    """The receipts in a file: one, a list of them, or an answer of `wager serve` with its `receipts`, whole or as its
    stream of events came. UsageError if it holds none, or what is no receipt."""
    hint = "Give the file that --receipt wrote, or an answer with receipts."
    text = read_text(path, "receipt", hint)
    try:
        if text.lstrip().startswith(("data:", "event:", ":")):  # the last begins what proxies say between events
            said = [line[5:].strip() for line in text.split("\n") if line.startswith("data:")]
            events = [strict_json(each) for each in said if each.startswith("{")]
            values = [each for event in events for each in _held_by(event)]
        else:
            value = strict_json(text)
            values = value if isinstance(value, list) else _held_by(value)
    except MALFORMED as error:
        raise UsageError(f"{path} is not JSON: {error}.", hint) from None
    if not values or not all(isinstance(each, dict) and "wager_receipt" in each for each in values):
        raise UsageError(f"{path} holds no receipt.", hint)
    try:
        return [Receipt.from_dict(each) for each in values]
    except UsageError as error:
        raise UsageError(f"{path}: {error.message}", error.hint) from None


def _held_by(value: Any) -> list[Any]:
    """A receipt itself; or those of an answer, or of an event, which may hold the answer."""
    if not isinstance(value, dict):
        return []
    if "wager_receipt" in value:
        return [value]
    found = value.get("receipts") or _held_by(value.get("response"))
    return found if isinstance(found, list) else []


def check_rule(rule: VerifyRule) -> None:
    """UsageError if answers under a rule cannot be computed again, and so have no receipts."""
    if rule != "match":
        raise UsageError(
            f"Under --verify {rule} an answer depends on its guesses: nobody could compute it again from a receipt.",
            "Use --verify match, the default.",
        )


# ---- checking --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Verification:
    """What checking a receipt found. `problems`, in sentences, are none where it is verified; `first_difference` is
    the number, from 0, of the first token of the answer that the model does not give (None: all are the model's).
    `notes` are what a reader should know besides. `computed` tokens of prompt and answer took `seconds`."""

    problems: tuple[str, ...]
    first_difference: int | None
    notes: tuple[str, ...]
    computed: int
    seconds: float

    @property
    def verified(self) -> bool:
        return not self.problems

    def as_dict(self) -> dict[str, Any]:
        return {"verified": self.verified, **{each.name: getattr(self, each.name) for each in fields(self)}}


class _AnswerDrafter(Drafter):
    """Guesses what a receipt says: `text` are the tokens of its prompt and answer, of which all that fit into a pass,
    `depth`, are guessed at once."""

    name = "receipt"

    def __init__(self, depth: int) -> None:
        self.default_depth = self.max_depth = depth
        self.text: Sequence[int] = ()

    def begin(self, seq_id: str, tokens: Sequence[int], params: SamplingParams, *, tenant: str = NO_TENANT) -> None:
        """Nothing is kept."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return [self._draft(request) for request in requests]

    def accept(self, seq_id: str, tokens: Sequence[int]) -> None:
        """Nothing is kept."""

    def end(self, seq_id: str) -> None:
        """Nothing is kept."""

    def _draft(self, request: DraftRequest) -> Draft:
        guesses = self.text[request.position : request.position + request.depth]
        return Draft.chain(request.seq_id, guesses, drafter=self.name, scores=[1.0] * len(guesses))


class Verifier:
    """Checks receipts with one loaded model, set up as `first` was; others must have the same `setup`.

    `config` names the model, threads and memory; `open_engine` loads it (arguments as of `load`). WagerError as there,
    SetupError if the model cannot be set up so.
    """

    def __init__(
        self, first: Receipt, config: EngineConfig, *, open_engine: Callable[..., LoadedEngine] = load
    ) -> None:
        self._drafter = _AnswerDrafter(depth=config.capacity.max_rows)
        drafting = {"drafter": "none", "policy": "fixed", "depth": None, "verify": "match"}
        options = {**first.setup, **drafting, "prefix_cache": False}
        self.engine = open_engine(config.with_options(**options), drafter=self._drafter)
        self._setup = first.setup

    def fits(self, receipt: Receipt) -> bool:
        """Whether the model is loaded as a receipt needs it."""
        return receipt.setup == self._setup

    def verify(self, receipt: Receipt, *, signed_by: str | None = None) -> Verification:
        """Check a receipt: its parts and signature (`signed_by`: a public key in hex), the digests of its model, and
        every token, text and end of its answer. UsageError if it needs another setup, or its signature cannot be
        checked."""
        if not self.fits(receipt):
            raise UsageError("The receipt is of a model that was loaded otherwise.", "Check it with its own Verifier.")
        problems = [*receipt.problems_of_parts(signed_by), *self._problems_of_model(receipt)]
        answer = self._compute(receipt)
        problems += answer.problems
        notes = []
        own = self.engine.kernels.arithmetic
        if own != receipt.arithmetic:
            notes.append(
                f"It was made with the arithmetic {shown(receipt.arithmetic)} and checked with {own!r}, whose results "
                "may differ in their last bits."
            )
        grammar = receipt.params.grammar
        limits = [
            *([f"a grammar ({grammar.kind})"] if grammar else []),
            *(["logit_bias"] if receipt.params.logit_bias else []),
        ]
        if limits:
            notes.append(f"What the answer may be was limited by {' and '.join(limits)}.")
        library = {"llguidance": receipt.made_by.get("llguidance", "")}
        if grammar is not None and library != _versions("llguidance"):
            notes.append(
                f"Its grammar was compiled by llguidance {shown(library['llguidance'])}, here by another version."
            )
        seconds = answer.stats.prefill_s + answer.stats.decode_s if answer.stats else 0.0
        computed = len(receipt.prompt) + len(answer.tokens)
        return Verification(tuple(problems), answer.first_difference, tuple(notes), computed, seconds)

    def _problems_of_model(self, receipt: Receipt) -> Iterator[str]:
        own, given = self.engine.target.digests, receipt.digests
        names = [*dict.fromkeys((*given.weights, *own.weights))]
        differing = [name for name in names if own.weights.get(name) != given.weights.get(name)]
        if differing:
            named = ", ".join(shown(name, length=80) for name in differing[:_MOST_NAMED])
            more = f" and {len(differing) - _MOST_NAMED} others" if len(differing) > _MOST_NAMED else ""
            yield (
                f"The model's weights are not those of the receipt: of {len(names)}, {named}{more} "
                f"{'differs' if len(differing) == 1 else 'differ'}."
            )
        for what, name in (("configuration", "config"), ("tokenizer", "tokenizer"), ("chat template", "chat_template")):
            if getattr(own, name) != getattr(given, name):
                yield f"The model's {what} is not that of the receipt."

    def _compute(self, receipt: Receipt) -> _ComputedAnswer:
        """The model's own answer, up to the first token that differs."""
        engine, claimed = self.engine, receipt.output
        # One token more than the receipt has, if the parameters allow one, shows whether the answer ends there.
        most = min(receipt.params.max_tokens, len(claimed) + 1)
        params = replace(receipt.params, max_tokens=most, min_tokens=min(receipt.params.min_tokens, most))
        found = _ComputedAnswer(receipt, engine)
        try:
            request = Request("receipt", receipt.prompt, params, first_choice=receipt.choice)
            engine.add(request)
        except (RequestError, UsageError) as error:  # the latter where grammars are not possible
            found.problems.append(f"The model cannot be asked this: {error.message}")
            return found
        self._drafter.text = (*receipt.prompt, *claimed)
        while engine.busy:
            for delta in engine.step():
                found.take(delta.token_ids, delta.text)
                if delta.stats is not None:
                    found.stats = delta.stats
                if delta.finish_reason is not None:
                    found.end(delta.finish_reason, delta.error)
            if found.first_difference is not None:
                engine.abort(request.id)
        return found


class _ComputedAnswer:
    """The model's own answer to the prompt of a receipt, and how it differs, in sentences."""

    def __init__(self, receipt: Receipt, engine: LoadedEngine) -> None:
        self.problems: list[str] = []
        self.first_difference: int | None = None
        self.tokens: list[int] = []
        self.stats: Stats | None = None
        self._receipt = receipt
        self._tokenizer = engine.tokenizer
        self._text = ""

    def take(self, tokens: Sequence[int], text: str) -> None:
        """The next tokens, and the text that they make certain. After the first difference they are ignored."""
        claimed = self._receipt.output
        for token in tokens:
            at = len(self.tokens)
            if self.first_difference is not None:
                return
            if at < len(claimed) and claimed[at] == token:
                self.tokens.append(token)
                continue
            self.first_difference = at
            given = f"{self._shown(claimed[at])} in the receipt" if at < len(claimed) else "absent from the receipt"
            self.problems.append(f"Token {at} of the answer, from 0, is {given}; the model gives {self._shown(token)}.")
        self._text += text

    def end(self, finish_reason: FinishReason, error: str) -> None:
        """The model's answer ends."""
        receipt = self._receipt
        if self.first_difference is not None:
            return
        if finish_reason == "error":
            self.problems.append(f"The model fails behind token {len(self.tokens)} of the answer: {error}")
        elif len(self.tokens) < len(receipt.output):
            self.first_difference = len(self.tokens)
            self.problems.append(f"The model's answer ends with {len(self.tokens)} tokens, before that of the receipt.")
        elif finish_reason != receipt.finish_reason:
            self.problems.append(
                f"The model's answer ends with {finish_reason!r}, that of the receipt with {receipt.finish_reason!r}."
            )
        elif self._text != receipt.text:
            self.problems.append("The text of the receipt is not that of its tokens.")

    def _shown(self, token: int) -> str:
        return f"{token} ({self._tokenizer.decode([token], special=True)!r})"


def verifications(
    receipts: Iterable[Receipt],
    config: EngineConfig,
    *,
    signed_by: str | None = None,
    open_engine: Callable[..., LoadedEngine] = load,
) -> Iterator[Verification]:
    """Check receipts, in order, with the model of `config`, which is loaded anew where the next one needs another
    setup; one that the model, or the memory, cannot be set up for is not verified. WagerError as Verifier."""
    verifier: Verifier | None = None
    for receipt in receipts:
        try:
            if verifier is None or not verifier.fits(receipt):
                verifier = None  # two models need not be in memory
                verifier = Verifier(receipt, config, open_engine=open_engine)
            found = verifier.verify(receipt, signed_by=signed_by)
        except (SetupError, MemoryPlanError) as error:
            told = f"The model cannot be set up as the receipt says: {error.message}"
            found = Verification((*receipt.problems_of_parts(signed_by), told), None, (), 0, 0.0)
        yield found
