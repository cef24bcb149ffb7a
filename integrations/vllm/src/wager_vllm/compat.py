"""The one place that touches vLLM: what is used of it, by name, in which versions, and the hooks that are put into it.

vLLM promises none of these names. So at the start the version is looked up in VERSIONS and every function of NAMES is
imported and its parameters are compared; what differs is refused in a sentence, before a model is loaded. With
WAGER_VLLM_OPTIONAL=1 vLLM runs without the plugin instead, and one line of log says so.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import logging
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple, Protocol, runtime_checkable

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.registry import Collector

from wager.bench.machine import describe
from wager.errors import UsageError
from wager.types import NO_TENANT

log = logging.getLogger("vllm.wager")
"""Below vLLM's own logger, so that its lines are shown as vLLM's."""

VERSIONS: Mapping[str, str] = {
    "0.32": "the CPU build, started and tested (integrations/vllm/tests)",
    "0.31": "the CPU build: the tests of texts, of an unknown version and of the scheduler",
}
"""Versions that are known, and what of them was run."""

_RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_ASYNC_SCHEDULER = "vllm.v1.core.sched.async_scheduler:AsyncScheduler"
_SPECULATIVE = "vllm.config.speculative:SpeculativeConfig"

NAMES: Mapping[str, tuple[str, ...]] = {
    f"{_RUNNER}.execute_model": ("self", "scheduler_output", "intermediate_tensors"),
    f"{_RUNNER}.propose_draft_token_ids": ("self", "scheduler_output", "sampled_token_ids"),
    f"{_RUNNER}._sample": ("self", "logits", "spec_decode_metadata"),
    f"{_RUNNER}._dummy_run": (
        "self",
        "num_tokens",
        "force_attention",
        "uniform_decode",
        "skip_eplb",
        "profile_seq_lens",
    ),
    "vllm.v1.core.sched.output:NewRequestData.from_request": ("request",),
    "vllm.v1.worker.gpu_worker:Worker.compile_or_warm_up_model": ("self",),
    "vllm.v1.worker.cpu_worker:CPUWorker.compile_or_warm_up_model": ("self",),
    "vllm.distributed.parallel_state:get_tp_group": (),
    "vllm.distributed.parallel_state:GroupCoordinator.broadcast_object": ("self", "obj", "src"),
    f"{_SCHEDULER}._update_after_schedule": ("self", "scheduler_output"),
    f"{_SCHEDULER}.update_draft_token_ids": ("self", "draft_token_ids"),
    f"{_SCHEDULER}.update_from_output": ("self", "scheduler_output", "model_runner_output"),
    f"{_ASYNC_SCHEDULER}._update_after_schedule": ("self", "scheduler_output"),
    f"{_SPECULATIVE}.use_eagle": ("self",),
    f"{_SPECULATIVE}.use_dflash": ("self",),
    f"{_SPECULATIVE}.uses_draft_model": ("self",),
    f"{_SPECULATIVE}.uses_dynamic_speculative_decoding": ("self",),
    "vllm.v1.engine.core:DPEngineCoreProc._has_global_unfinished_reqs": ("self", "local_unfinished"),
    "vllm.v1.executor.abstract:Executor.collective_rpc": ("self", "method", "args"),
    "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer.dummy_run": ("self", "num_tokens"),
    "vllm.tokenizers.registry:cached_tokenizer_from_config": ("model_config",),
    "vllm.v1.metrics.prometheus:get_prometheus_registry": (),
}
"""Functions that are called or wrapped, `module:name`, with the parameters that they must have, in this order."""

FIELDS: Mapping[str, tuple[str, ...]] = {
    "vllm.v1.core.sched.output:SchedulerOutput": (
        "finished_req_ids",
        "num_scheduled_tokens",
        "num_spec_tokens_to_schedule",
        "scheduled_new_reqs",
        "scheduled_spec_decode_tokens",
        "total_num_scheduled_tokens",
    ),
    "vllm.v1.spec_decode.metadata:SpecDecodeMetadata": ("num_draft_tokens",),
    "vllm.v1.outputs:ModelRunnerOutput": ("req_id_to_index", "sampled_token_ids"),
    "vllm.v1.outputs:DraftTokenIds": ("req_ids", "draft_token_ids"),
    "vllm.v1.worker.gpu_input_batch:CachedRequestState": ("req_id", "sampling_params", "output_token_ids"),
}
"""Fields of dataclasses that are read."""


class IncompatibleError(UsageError):
    """A vLLM that is unknown, or not as it was when the plugin was written."""


def check() -> None:
    """IncompatibleError if this vLLM is not one that the plugin knows."""
    version = str(import_module("vllm").__version__)
    if ".".join(version.split(".")[:2]) not in VERSIONS:
        raise IncompatibleError(
            f"wager-vllm does not know vLLM {version}; it knows {', '.join(VERSIONS)}.",
            "Install one of these, or set WAGER_VLLM_OPTIONAL=1 to run vLLM without the plugin.",
        )
    for name, parameters in NAMES.items():
        try:
            found = list(inspect.signature(_resolve(name)).parameters)
        except (ImportError, AttributeError) as error:
            raise _differs(version, name, str(error)) from error
        if [each for each in found if each in parameters] != list(parameters):
            raise _differs(version, name, f"it takes {', '.join(found) or 'nothing'}, not {', '.join(parameters)}")
    for name, fields in FIELDS.items():
        missing = set(fields) - set(_resolve(name).__dataclass_fields__)
        if missing:
            raise _differs(version, name, f"it has no {', '.join(sorted(missing))}")


def _resolve(name: str) -> Any:
    module, _, path = name.partition(":")
    return functools.reduce(getattr, path.split("."), import_module(module))


def _differs(version: str, name: str, how: str) -> IncompatibleError:
    return IncompatibleError(
        f"{name} of vLLM {version} is not as wager-vllm expects it: {how}.",
        "Install a version that is known, or set WAGER_VLLM_OPTIONAL=1 to run vLLM without the plugin.",
    )


@functools.cache
def usable() -> bool:
    """Whether the plugin can be used. Where it cannot, IncompatibleError, or with WAGER_VLLM_OPTIONAL=1 one line of
    log."""
    try:
        check()
    except IncompatibleError as error:
        if os.environ.get("WAGER_VLLM_OPTIONAL") != "1":
            raise
        log.warning("%s vLLM runs without wager-vllm.", error.message)
        return False
    return True


# ---- what vLLM is asked ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Deployment:
    """What is served, and how. `tokenizer`: its name or folder; `fingerprint`: of the model's configuration;
    `execution`: whether it is compiled; `layout`: sizes of the parallel groups; `engine`: the data parallel rank;
    `depth`: num_speculative_tokens; `method`: of speculation; `leads`: whether this process is the one of its tensor
    parallel group whose draft tokens vLLM takes; `in_step`: whether engines wait for one another in every pass, as
    over a model of experts."""

    version: str
    device: str
    model: str
    tokenizer: str
    fingerprint: str
    served_as: str
    dtype: str
    execution: str
    vocab: int
    max_context: int
    max_requests: int
    max_rows: int
    layout: Mapping[str, int]
    engine: int
    depth: int
    method: str
    leads: bool
    in_step: bool = False

    @property
    def alone(self) -> bool:
        """Whether there is no data nor pipeline parallelism, so that a pass of one worker group waits for no other."""
        return all(size == 1 for name, size in self.layout.items() if name != "tensor")


def deployment(config: Any) -> Deployment:
    """Of a VllmConfig."""
    model, parallel, scheduler, speculative = (
        config.model_config,
        config.parallel_config,
        config.scheduler_config,
        config.speculative_config,
    )
    served = model.served_model_name
    device = _resolve("vllm.platforms:current_platform").get_device_name()
    if device == "cpu":
        device = f"{describe().cpu}, threads {os.environ.get('VLLM_CPU_OMP_THREADS_BIND', 'auto')}"
    try:
        leads = DummyPasses.group().rank_in_group == 0
    except AssertionError:  # no worker: the scheduler's process
        leads = False
    return Deployment(
        version=str(import_module("vllm").__version__),
        device=device,
        model=model.model,
        tokenizer=model.tokenizer,
        fingerprint=hashlib.sha256(model.hf_config.to_json_string().encode()).hexdigest()[:12],
        served_as=served if isinstance(served, str) else served[0],
        dtype=" ".join(filter(None, [str(model.dtype).removeprefix("torch."), model.quantization])),
        execution="eager" if model.enforce_eager else "compiled",
        vocab=model.get_vocab_size(),
        max_context=model.max_model_len,
        max_requests=scheduler.max_num_seqs,
        max_rows=scheduler.max_num_batched_tokens,
        layout={
            "tensor": parallel.tensor_parallel_size,
            "pipeline": parallel.pipeline_parallel_size,
            "data": parallel.data_parallel_size,
        },
        engine=parallel.data_parallel_index,
        depth=speculative.num_speculative_tokens if speculative else 0,
        method=speculative.method if speculative else "",
        leads=leads,
        in_step=parallel.data_parallel_size > 1,
    )


def tokenizer_of(config: Any) -> Any:
    """vLLM's tokenizer of the model; None if it was started without one."""
    return _resolve("vllm.tokenizers.registry:cached_tokenizer_from_config")(config.model_config)


class RequestFacts(NamedTuple):
    """What does not change while a request runs. `prompt_tokens`: how many; `limit`: most tokens, prompt and answer
    together; `stops`: tokens that end it; `prediction`: what its output is expected to be like, a text or token ids."""

    prompt_tokens: int
    limit: int
    stops: Collection[int]
    prediction: str | Sequence[int]


class RowFacts(NamedTuple):
    """A request in a step that was taken. `tokens`: a view of all its known ones; `sampled`: how many of them this step
    gave, 0 while its prompt is computed; `cached`: positions computed before; `scheduled`: tokens computed in it."""

    request: str
    tokens: Any  # int32 [known]
    sampled: int
    cached: int
    scheduled: int


class RunnerStep(NamedTuple):
    """A step that a worker took, up to its sampled tokens. `rows` are in the order of vLLM's batch, and so must be the
    drafts; `verified` are the draft tokens that were in it; `facts` asks for a request's."""

    rows: Sequence[RowFacts]
    verified: Mapping[str, Sequence[int]]
    facts: Callable[[str], RequestFacts]


@runtime_checkable
class StepProposer(Protocol):
    """What the hooks call of a proposer: when a step begins, with the tenants of new requests and those that are over;
    after its tokens were sampled, for draft tokens by row; where `wants_logits`, with the logits that they are sampled
    from; and once, when the model is ready for dummy passes."""

    wants_logits: bool

    def step_begins(self, tenants: Mapping[str, str], finished: Collection[str]) -> None: ...

    def logits_computed(self, logits: Any) -> None: ...

    def step_sampled(self, step: RunnerStep) -> list[list[int]]: ...

    def model_ready(self, passes: DummyPasses) -> None: ...


def _runner_step(runner: Any, scheduled: Any, sampled: Sequence[Sequence[int]]) -> RunnerStep:
    batch, rows = runner.input_batch, []
    for at, request in enumerate(batch.req_ids):
        known = int(batch.num_tokens_no_spec[at])
        count = scheduled.num_scheduled_tokens.get(request, 0)
        cached = int(batch.num_computed_tokens_cpu[at])
        rows.append(RowFacts(request, batch.token_ids_cpu[at, :known], len(sampled[at]), cached, count))

    def facts(request: str) -> RequestFacts:
        state = runner.requests[request]
        params, prompt = state.sampling_params, state.num_prompt_tokens
        if params is None:
            return RequestFacts(prompt, runner.max_model_len, (), "")
        stops = params.stop_token_ids or () if params.ignore_eos else params.all_stop_token_ids
        limit = runner.max_model_len if params.max_tokens is None else prompt + params.max_tokens
        return RequestFacts(
            prompt, min(runner.max_model_len, limit), stops, (params.extra_args or {}).get("prediction", "")
        )

    return RunnerStep(rows, scheduled.scheduled_spec_decode_tokens, facts)


class DummyPasses:
    """Passes of a worker's model over made-up tokens, as vLLM makes them to warm up. All workers of a tensor parallel
    group must make the same ones, one after the other."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self.max_rows: int = runner.max_num_tokens

    @staticmethod
    def group() -> Any:
        """The tensor parallel group of this process."""
        return _resolve("vllm.distributed.parallel_state:get_tp_group")()

    def agree(self, value: bool) -> bool:  # noqa: FBT001
        """The first worker's value, for all of them."""
        group = self.group()
        return bool(group.broadcast_object(value, src=0)) if group.world_size > 1 else value

    def run(self, rows: int, *, context: int, drafted: bool) -> int:
        """One pass of `rows` tokens with `context` cached positions for each request, logits included; ends when the
        device is done. `drafted`: each request has as many tokens as with a draft of num_speculative_tokens, else one.
        The number of requests."""
        runner = self._runner
        with import_module("torch").inference_mode():
            hidden, _ = runner._dummy_run(
                rows, force_attention=True, uniform_decode=drafted, skip_eplb=True, profile_seq_lens=context
            )
            runner.model.compute_logits(hidden[:rows])
        runner._sync_device()
        each = runner.uniform_decode_query_len if drafted else 1
        return int(min(runner.scheduler_config.max_num_seqs, -(-rows // each)))


# ---- hooks ----------------------------------------------------------------------------------------------------------


@functools.cache
def install_hooks() -> None:
    """Have workers call a StepProposer, and requests take their cache_salt to them as their tenant. Once a process."""
    logging.getLogger("wager").parent = log
    runner = _resolve(_RUNNER)
    _wrap(runner, "execute_model", _execute_model)
    _wrap(runner, "propose_draft_token_ids", _propose)
    _wrap(runner, "_sample", _sample)
    for worker in ("vllm.v1.worker.gpu_worker:Worker", "vllm.v1.worker.cpu_worker:CPUWorker"):
        _wrap(_resolve(worker), "compile_or_warm_up_model", _warm_up)
    data = _resolve("vllm.v1.core.sched.output:NewRequestData")
    original = data.from_request.__func__

    @functools.wraps(original)
    def from_request(cls: Any, request: Any, *rest: Any, **named: Any) -> Any:
        made = original(cls, request, *rest, **named)
        made.wager_tenant = request.cache_salt or NO_TENANT
        return made

    data.from_request = classmethod(from_request)


def add_collector(collector: Collector) -> None:
    """Show its metrics under vLLM's /metrics, with one API server and with several."""
    REGISTRY.register(collector)
    module = import_module("vllm.v1.metrics.prometheus")
    original = module.get_prometheus_registry

    def get_prometheus_registry() -> CollectorRegistry:
        registry: CollectorRegistry = original()
        if registry is not REGISTRY:  # of files that all API servers write
            registry.register(collector)
        return registry

    for name in ("vllm.v1.metrics.prometheus", "vllm.entrypoints.serve.instrumentator.metrics"):
        if (loaded := sys.modules.get(name)) is not None:
            setattr(loaded, "get_prometheus_registry", get_prometheus_registry)  # noqa: B010


def _wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    original = owner.__dict__[name]

    @functools.wraps(original)
    def wrapped(self: Any, *given: Any, **named: Any) -> Any:
        return around(functools.partial(original, self), self, *given, **named)

    setattr(owner, name, wrapped)


def _proposer(runner: Any) -> StepProposer | None:
    drafter = getattr(runner, "drafter", None)
    return drafter if isinstance(drafter, StepProposer) else None


def _execute_model(original: Callable[..., Any], runner: Any, scheduler_output: Any, *rest: Any, **named: Any) -> Any:
    if (proposer := _proposer(runner)) is not None:
        new = scheduler_output.scheduled_new_reqs
        tenants = {each.req_id: getattr(each, "wager_tenant", NO_TENANT) for each in new}
        proposer.step_begins(tenants, scheduler_output.finished_req_ids)
    return original(scheduler_output, *rest, **named)


def _sample(original: Callable[..., Any], runner: Any, logits: Any, spec_decode_metadata: Any) -> Any:
    """A step without draft tokens is sampled as without speculation: the rejection sampler takes longer, and on a CPU
    that of 0.32 raises there if a request has a top_k, under every speculative method."""
    if (proposer := _proposer(runner)) is not None:
        if proposer.wants_logits and logits is not None:
            proposer.logits_computed(logits)
        if spec_decode_metadata is not None and not any(spec_decode_metadata.num_draft_tokens):
            spec_decode_metadata = None
    return original(logits, spec_decode_metadata)


def _propose(original: Callable[..., Any], runner: Any, scheduled: Any, sampled: Any, *rest: Any, **named: Any) -> Any:
    if (proposer := _proposer(runner)) is None:
        return original(scheduled, sampled, *rest, **named)
    return proposer.step_sampled(_runner_step(runner, scheduled, sampled))


def _warm_up(original: Callable[..., Any], worker: Any) -> Any:
    found = original()
    if (proposer := _proposer(worker.model_runner)) is not None:
        proposer.model_ready(DummyPasses(worker.model_runner))
    return found


# ---- the scheduler --------------------------------------------------------------------------------------------------

_MOST_DEPTH = 1 << 10
"""More than any depth, so that a vote holds both numbers."""


def drafts_by_batch(config: Any) -> bool:
    """Whether vLLM drafts for all requests of a step to one depth, which its scheduler names."""
    speculative = config.speculative_config
    return speculative is not None and bool(
        speculative.use_eagle() or speculative.use_dflash() or speculative.uses_draft_model()
    )


def scheduler_base(config: Any) -> Any:
    """The class that vLLM would take of its own."""
    return _resolve(_ASYNC_SCHEDULER if config.scheduler_config.async_scheduling else _SCHEDULER)


def needs_table(config: Any) -> bool:
    """Whether vLLM records graphs of whole steps at one depth: it does unless it is told that depths vary."""
    graphs, speculative = config.compilation_config.cudagraph_mode, config.speculative_config
    return not speculative.uses_dynamic_speculative_decoding() and graphs.has_full_cudagraphs()


def vote(requests: int, depth: int) -> int:
    """Of an engine with so many requests that decode, for the depth of all engines: the greatest vote counts."""
    return requests * _MOST_DEPTH + depth


def elected(vote: int) -> int:
    """The depth of a vote."""
    return vote % _MOST_DEPTH


@functools.cache
def install_vote() -> None:
    """Have engines whose workers wait for one another agree on the depth of their schedulers. Once a process."""
    _wrap(_resolve("vllm.v1.engine.core:DPEngineCoreProc"), "_has_global_unfinished_reqs", _agree)


def _agree(original: Callable[..., Any], engine: Any, *given: Any) -> Any:
    """All engines come here after each of their steps, which they count alike, those without requests too."""
    unfinished, scheduler = original(*given), engine.scheduler
    asks = engine.step_counter == 1 or engine.step_counter % engine.dp_sync_interval == 0
    if asks and not scheduler.use_v2_model_runner:
        torch = import_module("torch")
        votes = torch.tensor([scheduler.vote if scheduler.running else 0])
        torch.distributed.all_reduce(votes, op=torch.distributed.ReduceOp.MAX, group=engine.dp_group)
        depth = elected(int(votes[0]))
        if depth != scheduler.agreed:
            engine.model_executor.collective_rpc(_set_dummy_depth, args=(depth,))
            scheduler.agreed = depth
    return unfinished


def _set_dummy_depth(worker: Any, depth: int) -> None:
    """A worker without requests makes as many passes of the drafter as the others, who make one even to depth 0."""
    worker.model_runner.drafter.num_speculative_tokens = max(1, depth)
