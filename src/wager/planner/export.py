"""`wager plan --export`: the plan as what vLLM, SGLang or llama.cpp takes, and what the engine cannot express of it.

What an engine can do is read from its sources: vLLM 0.33.0 (config/speculative.py, v1/spec_decode/dynamic/utils.py and
the proposers of both model runners), SGLang 0.5.23 (srt/arg_groups/speculative_hook.py, srt/speculative/
adaptive_spec_params.py) and llama.cpp b11549 (common/arg.cpp, common/speculative.cpp). docs/export.md has it in words.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import click
import numpy as np
import numpy.typing as npt

from wager.arch import find_format
from wager.errors import UsageError
from wager.planner.cost import Cluster
from wager.planner.drafting import PassDraftCost
from wager.planner.plan import Deployment, DepthOutcome, batch_sizes
from wager.planner.report import PlanReport
from wager.terminal import console

DRAFTER = "DRAFTER"
"""Stands for the drafter's checkpoint where a plan knows its shape alone."""

_ADAPTIVE = "adaptive.json"
_KEPT = 0.995
"""A depth is kept for the next batch while it gives this share of the best one's tokens: each depth that is in use has
CUDA graphs of its own."""

_LOOKUP = 3
"""Tokens of the longest match that wager's `ngram` looks up unless it is told."""


_BLOCKS = ("dflash", "dspark")
_CHECKPOINTS = ("model", "eagle3", *_BLOCKS)
"""Kinds of drafters that have files of their own."""

_KINDS = {"free": "ngram", "eagle": "eagle3", "block": "dflash"}
"""Kinds of drafters that shapes of a plan are, where they are named otherwise."""


# ---- what the engines can do ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OtherEngine:
    """An engine with its version, and its methods by kind of drafter.

    Where the depth may depend on the batch, `by_batch` tells how deep is drafted to verify a depth of that table: as
    deep ("depth"); at least one token, with which a drafter keeps its cache up to date ("one"); as deep as the deepest
    of the table, always ("deepest") or where it is not 0 ("block"). `table` is a remark on these tables, `groups` why
    data-parallel groups have none (empty: there are no such groups). Kinds in `not_in_groups` cannot run there; of
    `padded` ones rows are verified whether or not something was drafted; those in `trees` draft trees, all of one
    shape. `caches` are the options for keys and values by their formats, `padding` says by how many tokens the
    vocabularies of a draft model and its target may differ, and `requests` how many run at once at most.
    """

    name: str
    methods: Mapping[str, str]
    by_batch: Mapping[str, Literal["depth", "one", "block", "deepest"]]
    table: str = ""
    groups: str = ""
    not_in_groups: Collection[str] = ()
    padded: Collection[str] = ()
    trees: Collection[str] = ()
    caches: Mapping[str, str] = field(default_factory=dict)
    padding: float = math.inf
    requests: float = math.inf


ENGINES: Mapping[str, OtherEngine] = {
    "vllm": OtherEngine(
        "vLLM 0.33.0",
        {"model": "draft_model"} | {kind: kind for kind in ("ngram", "suffix", "eagle3", "mtp", *_BLOCKS)},
        {"ngram": "depth", "eagle3": "one", "mtp": "one", "model": "deepest", **dict.fromkeys(_BLOCKS, "block")},
        table="Requests whose prompt is computed in a step count as its batch, too",
        groups="A depth by batch is dropped under data parallelism",
        caches={name: f"--kv-cache-dtype {name}" for name in ("fp8", "nvfp4")},
    ),
    "sglang": OtherEngine(
        "SGLang 0.5.23",
        {
            "ngram": "NGRAM",
            "model": "STANDALONE",
            "eagle3": "EAGLE3",
            "mtp": "NEXTN",
            **{kind: kind.upper() for kind in _BLOCKS},
        },
        {"eagle3": "one", "mtp": "one"},
        table="A batch is rounded up to that of a CUDA graph first, so that depths change some requests early",
        groups="A depth by batch is dropped under data-parallel attention",
        not_in_groups=("ngram", "model"),
        padded=("ngram",),
        trees=("eagle3", "mtp", "model"),
        caches={"fp8": "--kv-cache-dtype fp8_e4m3", "nvfp4": "--kv-cache-dtype nvfp4"},
        padding=0,
    ),
    "llama.cpp": OtherEngine(
        "llama.cpp b11549",
        {"ngram": "ngram-simple", "model": "draft-simple"}
        | {kind: f"draft-{kind}" for kind in ("eagle3", "mtp", *_BLOCKS)},
        {},
        caches={
            name: f"--cache-type-k {name} --cache-type-v {name}" for name in ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0")
        },
        padding=128,
        requests=256,
    ),
}


# ---- what is exported -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Limit:
    """What an engine cannot express. `loss` and `worst` are the shares of tokens/s that this costs, on average over the
    planned points and at most, there at the batch `worst_batch`; None where a plan cannot tell."""

    text: str
    loss: float | None = None
    worst: float | None = None
    worst_batch: int | None = None

    def __bool__(self) -> bool:
        """Whether it costs what can be seen."""
        return self.worst is not None and self.worst >= 5e-4

    def __str__(self) -> str:
        if self.loss is None:
            return f"{self.text}."
        return f"{self.text}: {self.loss:.1%} on average, at most {self.worst:.1%} (batch {self.worst_batch})."


@dataclass(frozen=True, slots=True)
class Export:
    """A plan for an engine. `method`: None where speculation is off at every batch. `depth`: of every batch, or the
    deepest of `by_batch`, which has first batch, last batch and depth of each range. `files`: what the command reads,
    as JSON by name. `total`: all limits together."""

    engine: str
    plan: str
    method: str | None
    depth: int
    by_batch: list[tuple[int, int, int]]
    command: list[str]
    environment: dict[str, str]
    files: dict[str, dict[str, Any]]
    limits: list[Limit]
    total: Limit

    def text(self) -> str:
        """A shell script; what is to be known beside it stands in its comments."""
        files = [f"cat > {name} <<'END'\n{json.dumps(content)}\nEND" for name, content in self.files.items()]
        words = [(" \\\n  " if word.startswith("--") else " ") + shlex.quote(word) for word in self.command]
        command = "".join(words).strip()
        comments = [f"What {self.engine} cannot express of the plan, and what that costs of its tokens/s:"]
        comments += [f"- {limit}" for limit in self.limits] if self.limits else ["- nothing."]
        if self.environment:
            values = " ".join(f"{name}={shlex.quote(value)}" for name, value in self.environment.items())
            comments.insert(0, f"In the environment instead: {values}")
        if self.command[0] == "llama-server":
            comments.insert(0, "llama.cpp reads GGUF files: write their paths where the command names models.")
        if self.method == "suffix":
            comments.insert(0, "vLLM needs a package for suffix decoding: pip install arctic-inference==0.1.1")
        if DRAFTER in command:
            comments.insert(0, f"Write the drafter's checkpoint for {DRAFTER}: the plan knows its shape alone.")
        head = [f"{self.engine} for {self.plan}", self._depths()]
        return "\n".join((*map(_comment, head), *files, command, *map(_comment, (*comments, str(self.total)))))

    def _depths(self) -> str:
        if self.method is None:
            return "Speculation stays off: over the planned batches nothing gives more tokens/s."
        if not self.by_batch:
            return f"{self.method}: {self.depth} draft token{'s' * (self.depth > 1)} at every batch."
        ranges = [
            f"{depth or 'off'} at batch {first}{f' to {last}' * (last > first)}" for first, last, depth in self.by_batch
        ]
        return f"{self.method}, draft tokens: {', '.join(ranges)}."


def _comment(text: str) -> str:
    text = " ".join(console.legible(text).split())  # a name that a file gives may have lines, which would be run
    return click.wrap_text(text, width=100, initial_indent="# ", subsequent_indent="#   ")


class _Setup(NamedTuple):
    """What a command is written from. `checkpoint`: of a drafter that has one. `longest`: tokens of a match that is
    looked up. `levels`: of a tree, whose nodes are `depth`."""

    report: PlanReport
    model: str
    kind: str
    method: str
    checkpoint: str | None
    longest: int
    depth: int
    by_batch: list[tuple[int, int, int]]
    levels: int | None = None

    @property
    def batch(self) -> int:
        """The largest that was planned, of one group."""
        return math.ceil(max(self.report.batches) * self.report.deployment.share)

    @property
    def cluster(self) -> Cluster:
        return self.report.deployment.cost.cluster


_Written = tuple[list[str], dict[str, str], dict[str, dict[str, Any]]]
"""Command, environment and files."""


def export_plan(
    report: PlanReport, engine: str, *, model: str, shape: str | None, precision: str | None, cache: str | None
) -> Export:
    """The plan for one of ENGINES, which is told to serve `model`; the drafter's `shape` and the formats `precision`
    and `cache` are as they were asked for, if they were. UsageError where the engine has no such drafter, or not where
    it is planned."""
    target, deployment = ENGINES[engine], report.deployment
    kind, argument = _kind_of(report)
    if kind not in target.methods:
        raise UsageError(
            f"{target.name} has no drafter of the kind {kind}.",
            f"It has {', '.join(target.methods)}; plan one of these (--drafter-shape), or another engine.",
        )
    _check_placement(report, target, kind)
    if kind == "model" and shape:
        argument = shape.partition(":")[2]
    if (differ := _other_tokens(deployment, kind)) > target.padding:
        raise UsageError(
            f"{target.name} drafts with the target's own vocabulary, and those of {deployment.cost.model.name} and "
            f"{argument} differ by {differ} tokens.",
            "Plan another draft model, or for vLLM.",
        )
    unfit = {point.batch for point in report.points if point.memory.fits is False}
    batches = [batch for batch in report.batches if batch not in unfit]
    report = replace(report, batches=[batch for batch in batches if batch <= target.requests])
    if batches and not report.batches:
        raise UsageError(f"{target.name} runs at most {target.requests} requests at once.", "Plan fewer (--batch).")
    if not batches:
        raise UsageError("No planned batch fits in memory.", "Plan fewer requests (--batch) or more devices (--tp).")
    grid = _Grid(report, target, kind)
    table = grid.depths_by_batch(kept=_KEPT) if grid.by_batch else grid.one_depth()
    checkpoint = (_folder(argument) or DRAFTER) if kind in _CHECKPOINTS else None
    longest = int(argument) if argument.isdecimal() else _LOOKUP
    by_batch, depth = _ranges(grid.sizes, table), max(table)
    levels = grid.levels[depth] if grid.levels else None
    setup = _Setup(report, _folder(model), kind, target.methods[kind], checkpoint, longest, depth, by_batch, levels)
    contexts, rates = ",".join(map(str, report.contexts)), ",".join(rate.label for rate in report.acceptances)
    further = [Limit("Larger planned batches do not fit in memory and are left out")] if unfit else []
    if len(report.batches) < len(batches):
        further.append(Limit(f"At most {target.requests} requests run at once; larger planned batches are left out"))
    if precision:
        further.append(Limit(f"Weights are planned in {precision}: serve a checkpoint that has them so"))
    stored = find_format(cache).name if cache else ""
    if stored not in ("", "bf16", "fp16", *target.caches):
        further.append(Limit(f"Keys and values are planned in {stored}, and it has {', '.join(target.caches)}"))
    command, environment, files = _WRITERS[engine](setup)
    return Export(
        target.name,
        f"{deployment.cost.model.name} on {deployment.cost.device.name}: drafter {deployment.drafter.name}, context "
        f"{contexts}, acceptance {rates}, batch "
        + " to ".join(map(str, sorted({min(report.batches), max(report.batches)}))),
        setup.method if depth else None,
        depth,
        by_batch,
        [*command, *target.caches.get(stored, "").split()],
        environment,
        files,
        [*_limits(target, setup, grid, table), *further],
        grid.limit("In all", grid.planned(), grid.exported(table)),
    )


def _folder(model: str) -> str:
    """What an engine takes for a configuration that was planned with: its folder."""
    return str(Path(model).parent) if Path(model).name == "config.json" else model


def _ranges(sizes: list[int], table: list[int]) -> list[tuple[int, int, int]]:
    """First batch from 1 on, last batch and depth of each range of a table that has several depths."""
    starts = [i for i, depth in enumerate(table) if i == 0 or depth != table[i - 1]]
    firsts = [1, *(sizes[i] for i in starts[1:])]
    lasts = [*(first - 1 for first in firsts[1:]), sizes[-1]]
    depths = [table[i] for i in starts]
    return list(zip(firsts, lasts, depths, strict=True)) if len(depths) > 1 else []


def _kind_of(report: PlanReport) -> tuple[str, str]:
    """What drafts, by a key of `methods`, and its argument. Lookup is what the acceptance was measured with."""
    name = report.deployment.drafter.name
    if name in ("fraction", "given"):
        raise UsageError("--drafter-cost says what drafting costs, and not what drafts.", "Give --drafter-shape.")
    measured = {rate.label for rate in report.acceptances if rate.label.partition(":")[0] in ("ngram", "suffix")}
    if name == "free" and len(measured) == 1:
        name = measured.pop()
    kind, _, argument = name.partition(":")
    return (name, "") if "+" in name or "//" in name else (_KINDS.get(kind, kind), argument)


def _check_placement(report: PlanReport, target: OtherEngine, kind: str) -> None:
    """UsageError for devices that the engine cannot use as planned."""
    drafter, cluster = report.deployment.drafter, report.deployment.cost.cluster
    splits = drafter.cost.cluster.tp if isinstance(drafter, PassDraftCost) else cluster.tp
    if splits != cluster.tp and (splits != 1 or target is not ENGINES["vllm"]):
        raise UsageError(f"{target.name} does not split a drafter over {splits} devices.", "Leave out --drafter-tp.")
    if cluster.ep > 1 and (not target.groups or (cluster.groups > 1 and kind in target.not_in_groups)):
        what = f"no {kind} drafter under data-parallel attention" if target.groups else "no expert parallelism"
        raise UsageError(f"{target.name} has {what}.", "Plan it without --ep, or for another engine.")


def _other_tokens(deployment: Deployment, kind: str) -> int:
    """By how many tokens the vocabularies of the target and of a draft model differ; heads have the target's."""
    if kind != "model" or not isinstance(deployment.drafter, PassDraftCost):
        return 0
    return abs(deployment.drafter.cost.model.vocab - deployment.cost.model.vocab)


# ---- depths and what they cost --------------------------------------------------------------------------------------

_Floats = npt.NDArray[np.float64]


class _Grid:
    """Tokens/s of the plan and of an engine, by batch size and cell (a context and an acceptance); those of an engine
    by depth, too, since it goes by the batch alone. There a depth is worth its mean share of the plan's tokens/s."""

    def __init__(self, report: PlanReport, target: OtherEngine, kind: str) -> None:
        deployment = report.deployment
        self.drafted = target.by_batch.get(kind, "depth")
        if _other_tokens(deployment, kind):  # vLLM falls back to its V1 runner
            self.drafted = "one"
        tree = deployment.tree if kind in target.trees else None
        self.by_batch = kind in target.by_batch and deployment.cost.cluster.groups == 1 and tree is None
        self.sizes = batch_sizes(report.batches)
        self._batches = sorted(report.batches)
        self._rows = [self.sizes.index(batch) for batch in self._batches]
        at = [(batch, cell, rate) for batch in self.sizes for cell in report.contexts for rate in report.acceptances]
        drafted = replace(deployment, tree=tree)
        planned = [deployment.outcomes(rate, batch=batch, context=context) for batch, context, rate in at]
        found = planned
        self.chains_instead = drafted != deployment
        if self.chains_instead:
            found = [drafted.outcomes(rate, batch=batch, context=context) for batch, context, rate in at]
        depths = range(min(map(len, found)))
        self.levels = [outcome.levels for outcome in found[-1][: len(depths)]] if tree else []
        self._depths = [depth for depth in depths if deployment.depth in (None, depth)]
        chosen = [deployment.choose(outcomes) for outcomes in planned]
        self._plan: _Floats = np.array([each.tokens / each.round_s for each in chosen]).reshape(len(self.sizes), -1)

        def by_depth(value: Callable[[DepthOutcome], float]) -> _Floats:
            values = [[value(outcomes[depth]) for depth in depths] for outcomes in found]
            return np.array(values).reshape(*self._plan.shape, len(depths))

        self._tokens = by_depth(lambda outcome: outcome.tokens)
        self._steps = self._engine_steps = by_depth(lambda outcome: outcome.step_s)
        self._drafts = by_depth(lambda outcome: outcome.draft_s)
        if kind in target.padded:
            seconds = [
                [deployment.cost.seconds(context, d + 1, batch=batch) for d in depths] for batch, context, _ in at
            ]
            self._engine_steps = np.array(seconds).reshape(self._steps.shape)

    # ---- which depth ------------------------------------------------------------------------------------------------

    def one_depth(self) -> list[int]:
        """The best one for all planned batches, by batch size."""
        shares = (self._tokens / (self._engine_steps + self._drafts) / self._plan[..., None])[self._rows].mean((0, 1))
        return [max(self._depths, key=lambda depth: float(shares[depth]))] * len(self.sizes)

    def depths_by_batch(self, *, kept: float = 1.0) -> list[int]:
        """The best one for each batch size, or one for all where nothing is gained; that of the batch before stays
        while it gives the share `kept` of the best one's tokens."""
        deepest = self._depths if self.drafted in ("block", "deepest") else self._depths[-1:]
        tables = [self.one_depth(), *(self._table(depth, kept) for depth in deepest)]
        return max(tables, key=lambda table: float((self.exported(table) / self.planned()).mean()))

    def _table(self, deepest: int, kept: float) -> list[int]:
        table: list[int] = []
        allowed = [depth for depth in self._depths if depth <= deepest]
        drafts = self._drafts[..., [self._drafted(depth, deepest) for depth in allowed]]
        shares = (
            self._tokens[..., allowed] / (self._engine_steps[..., allowed] + drafts) / self._plan[..., None]
        ).mean(1)
        for row in shares:
            best = int(row.argmax())
            stays = bool(table) and allowed[best] > 0 and row[allowed.index(table[-1])] >= kept * row[best]
            table.append(table[-1] if stays else allowed[best])
        return table

    def _drafted(self, depth: int, deepest: int) -> int:
        return {
            "depth": depth,
            "one": min(max(1, depth), deepest),
            "block": deepest if depth else 0,
            "deepest": deepest,
        }[self.drafted]

    # ---- tokens/s on the planned batches ----------------------------------------------------------------------------

    def planned(self) -> _Floats:
        """Tokens a second of the plan."""
        return self._plan[self._rows]

    def drafted_so(self) -> _Floats:
        """Tokens a second with drafts of the shape that the engine makes, at the best depth of every point."""
        best: _Floats = self._by_depth().max(-1)
        return best

    def _by_depth(self) -> _Floats:
        rates: _Floats = (self._tokens / (self._steps + self._drafts))[self._rows][..., self._depths]
        return rates

    def shared(self) -> _Floats:
        """The same with one depth for each batch, the best over all contexts and acceptances."""
        rates = self._by_depth()
        best = (rates / self.planned()[..., None]).mean(1).argmax(-1)
        return rates[np.arange(len(best)), :, best]

    def exported(self, table: list[int]) -> _Floats:
        """Tokens a second in the engine, with these depths by batch size."""
        one, deepest = len(set(table)) == 1, max(table)
        rows, depths = np.array(self._rows), np.array(table)[self._rows]
        drafted = [depth if one else self._drafted(depth, deepest) for depth in depths]
        seconds = self._engine_steps[rows, :, depths] + self._drafts[rows, :, drafted]
        rates: _Floats = self._tokens[rows, :, depths] / seconds
        return rates

    def limit(self, text: str, before: _Floats, after: _Floats) -> Limit:
        """What `after` costs against `before`."""
        loss = np.maximum(0.0, 1 - after / before)
        worst = loss.max(1)
        return Limit(text, float(loss.mean()), float(worst.max()), int(self._batches[int(worst.argmax())]))


def _limits(target: OtherEngine, setup: _Setup, grid: _Grid, table: list[int]) -> Iterator[Limit]:
    """The limits in the order in which they apply: the cost of each is beside those before it."""
    if setup.depth and setup.report.lacks_mtp:
        yield Limit(f"The release of {setup.model} has no MTP module: serve a checkpoint that has one")
    if grid.chains_instead:
        yield grid.limit("Drafts are chains", grid.planned(), grid.drafted_so())
    if len(setup.report.contexts) * len(setup.report.acceptances) > 1:
        text = "A depth goes by the batch, whatever context and acceptance"
        yield grid.limit(text, grid.drafted_so(), grid.shared())
    exact, text = table, "One depth for every batch, and none above which speculation is off"
    if grid.by_batch:
        exact = grid.depths_by_batch()
        where = "Wherever speculation is on" if grid.drafted == "block" else "At every batch"
        text = f"{where} as much is drafted as for depth {max(exact)}, of which less is verified"
        if grid.drafted == "one":
            text = "Where speculation is off the drafter still runs once a step, for its cache"
    if setup.kind in target.padded:
        text += "; a round without a draft verifies as many rows"
    costs = grid.limit(text, grid.shared(), grid.exported(exact))
    if costs or not grid.by_batch:
        yield costs
    text = f"A depth stays for larger batches while it gives {_KEPT:.1%} of the best one's tokens/s, to have few depths"
    if costs := grid.limit(text, grid.exported(exact), grid.exported(table)):
        yield costs
    if setup.kind in target.by_batch and setup.cluster.groups > 1:
        yield Limit(target.groups)
    if setup.by_batch:
        yield Limit(target.table)
        yield Limit(f"Beyond {setup.batch} requests the last depth holds; none was planned")
        if _other_tokens(setup.report.deployment, setup.kind):
            yield Limit("Another vocabulary needs the V1 runner, in which a table of depths has no full CUDA graphs")
    if setup.levels:
        yield Limit(f"Every tree has {setup.depth} nodes on {setup.levels} levels, as is best at batch {setup.batch}")
        yield Limit("Trees need --attention-backend fa3, flashinfer or triton, unless pages hold one token")
    if setup.method == "ngram-simple":
        yield Limit(f"Only matches of exactly {setup.longest} tokens are looked up, shorter ones are not")


# ---- as each engine writes it ---------------------------------------------------------------------------------------


def _vllm(setup: _Setup) -> _Written:
    cluster, deployment = setup.cluster, setup.report.deployment
    drafter = deployment.drafter
    command = ["vllm", "serve", setup.model, "--max-num-seqs", str(setup.batch)]
    if deployment.footprint(batch=1, context=deployment.cost.model.context).fits is False:  # vLLM would not start
        command += ["--max-model-len", "auto"]
    if cluster.tp > 1:
        command += ["--tensor-parallel-size", str(cluster.tp)]
    if cluster.groups > 1:
        command += ["--data-parallel-size", str(cluster.groups)]
    if cluster.ep > 1:
        command.append("--enable-expert-parallel")
    config: dict[str, Any] = {"method": setup.method, "num_speculative_tokens": setup.depth}
    if setup.checkpoint:
        config["model"] = setup.checkpoint
    if _other_tokens(deployment, setup.kind):
        config["use_heterogeneous_vocab"] = True
    if setup.kind == "ngram":
        config |= {"prompt_lookup_max": setup.longest, "prompt_lookup_min": 1}
    if setup.by_batch:
        config["num_speculative_tokens_per_batch_size"] = [list(each) for each in setup.by_batch]
    if isinstance(drafter, PassDraftCost) and drafter.cost.cluster.tp < cluster.tp:
        config["draft_tensor_parallel_size"] = drafter.cost.cluster.tp
    return command + (["--speculative-config", json.dumps(config)] if setup.depth else []), {}, {}


def _sglang(setup: _Setup) -> _Written:
    cluster = setup.cluster
    sizes = {"tp-size": cluster.devices, "ep-size": cluster.ep, "attn-dp-size": cluster.groups}
    flags: dict[str, Any] = {"model-path": setup.model, "max-running-requests": setup.batch * cluster.groups}
    flags |= {flag: size for flag, size in sizes.items() if size > 1}
    if setup.depth:
        flags["speculative-algorithm"] = setup.method
        if setup.checkpoint:
            flags["speculative-draft-model-path"] = setup.checkpoint
        rows = {"speculative-num-draft-tokens": setup.depth + 1}  # the last known token and the draft
        if setup.kind == "ngram":
            flags |= {"speculative-ngram-max-bfs-breadth": 1} | rows
        elif setup.kind in _BLOCKS:
            flags |= rows if setup.kind == "dflash" else {"speculative-dspark-block-size": setup.depth}
            flags |= {"enable-dp-lm-head": ""} if cluster.groups > 1 else {}
        else:
            tree = setup.report.deployment.tree
            width = tree.width if tree and setup.levels else 1
            flags |= {"speculative-num-steps": setup.levels or setup.depth, "speculative-eagle-topk": width} | rows
    files: dict[str, dict[str, Any]] = {}
    if setup.by_batch:
        files[_ADAPTIVE] = {str(first): {"candidate_steps": [depth]} for first, _, depth in setup.by_batch}
        flags |= {"speculative-adaptive": "", "speculative-adaptive-config": _ADAPTIVE}
    words = [word for flag, value in flags.items() for word in (f"--{flag}", str(value)) if word]
    return ["python", "-m", "sglang.launch_server", *words], {}, files


def _llama_cpp(setup: _Setup) -> _Written:
    # Slots divide the context. Without a size it is the model's own, in memory that was not planned.
    slot = max(setup.report.contexts) + setup.report.deployment.output
    command = ["llama-server", "-m", setup.model, "--parallel", str(setup.batch)]
    command += ["--ctx-size", str(setup.batch * slot)]
    rows = setup.batch * (setup.depth + 1)
    for flag, default in (("--batch-size", 2048), ("--ubatch-size", 512)):
        command += [flag, str(rows)] if rows > default else []  # more rows than this are several passes
    if setup.cluster.tp > 1:
        command += ["--split-mode", "tensor"]
    if not setup.depth:
        return command, {}, {}
    if setup.kind == "ngram":
        sizes = ["--spec-ngram-simple-size-n", str(setup.longest), "--spec-ngram-simple-size-m", str(setup.depth)]
        return [*command, "--spec-type", setup.method, *sizes], {}, {}
    flags = {"--spec-type": setup.method, "--spec-draft-n-max": str(setup.depth)}
    if setup.checkpoint:
        flags["--spec-draft-model"] = setup.checkpoint
    environment = {flag.replace("--", "LLAMA_ARG_").replace("-", "_").upper(): value for flag, value in flags.items()}
    return [*command, *(word for each in flags.items() for word in each)], environment, {}


_WRITERS: Mapping[str, Callable[[_Setup], _Written]] = {"vllm": _vllm, "sglang": _sglang, "llama.cpp": _llama_cpp}
